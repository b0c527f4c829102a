"""Which members the coordinator's node has not heard."""

import pytest

from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.election import events as el
from nvrx_slurm.node.coordination.peers import Registrations
from nvrx_slurm.types import Node, Register

pytestmark = pytest.mark.fast


class Server:
    """A control server that has heard n1 at 5 s, and n2 at 9 s."""

    heard_at = {"n1.1": 5.0, "n2.1": 9.0}.get

    def listen_to(self, on_event, where):
        self.on_event = on_event


def test_members_that_are_silent_since_then_are_named():
    server, visits = Server(), []
    registrations = Registrations(server, visits.append, None)
    registrations.lead(lambda event: None)
    for rank in (1, 2):
        node = Node(f"n{rank}.1", rank, f"n{rank}", f"10.0.0.{rank}", 1, (), 1)
        server.on_event(ev.Joined(Register(node, 0)))
        registrations.answer(el.AnswerVisitor(node.node_id, None))
    assert len(visits) == 2
    assert registrations.unheard(6.0) == ("1",) and registrations.unheard(4.0) == ()
