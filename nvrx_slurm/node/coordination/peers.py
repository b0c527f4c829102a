"""Other agents of the job: where they listen, what they answer, whether they are dead; and those that come here."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.election import events as el
from nvrx_slurm.core.election.quorum import peer_key
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.coordination.link import credentials
from nvrx_slurm.node.job import Meeting
from nvrx_slurm.system import bounded
from nvrx_slurm.system.ports import is_refused

if TYPE_CHECKING:
    from nvrx_slurm.control.server import ControlServer
    from nvrx_slurm.node.coordination.coordinator import CoordinatorHost

_ANSWER_S = 3.0  # to WhoLeads
_PROBE_CONNECT_S = 2.0
_RESOLVE_S = 25.0


async def endpoints(meeting: Meeting, peer: t.Peer) -> list[tuple[str, int]]:
    """Where `peer` may listen. Before the first plan its ports are those of the job."""
    if peer.port:
        return [(peer.addr, peer.port)]
    address = peer.addr
    if not address:
        with contextlib.suppress(UsageError, bounded.Overrun):
            ask = partial(meeting.control.node_address, peer.host)
            address = await bounded.call_async(ask, _RESOLVE_S, "the resolver")
    return [(address or peer.host, port) for port in meeting.ports_of(peer.key)]


async def ask(meeting: Meeting, token: str, peer: t.Peer) -> t.Elsewhere | None:
    """Ask `peer` where the coordinator is; None where it does not tell within _ANSWER_S."""
    from nvrx_slurm.control.client import ControlClient

    answer: asyncio.Future[t.Elsewhere | None] = asyncio.get_running_loop().create_future()

    def post(event: Any) -> None:
        if isinstance(event, ag.Connected):
            client.send(t.WhoLeads())
        elif not answer.done():
            answer.set_result(event if isinstance(event, t.Elsewhere) else None)

    proof = None if token else await credentials(meeting)
    places = await endpoints(meeting, peer)
    client = ControlClient(places, meeting.key, token, post, meeting.keepalive, proof)
    client.start()
    try:
        return await bounded.wait_for(answer, _ANSWER_S)
    except asyncio.TimeoutError:
        return None
    finally:
        await client.close(0.0)


async def refuses(meeting: Meeting, peer: t.Peer) -> bool:
    """Whether the host answers, at each of its addresses, that nothing listens where this agent may."""
    for host, port in await endpoints(meeting, peer):
        probe = partial(is_refused, host, port, _PROBE_CONNECT_S)
        if not await bounded.call_or_none(probe, 4 * _PROBE_CONNECT_S, "a probe"):
            return False
    return True


class Registrations:
    """The agents that register at this node. One waits for the answer of the election, then it is a member here.

    The coordinator of this node gets what members do, from `lead` to `retire`. The server goes on after it. `visited`
    is called with each agent that waits; `where()` answers agents that ask for the coordinator.
    """

    def __init__(
        self,
        server: ControlServer,
        visited: Callable[[el.Visited], None],
        where: Callable[[], t.Elsewhere],
    ) -> None:
        self._server = server
        self._visited = visited
        self._numbers: dict[str, int] = {}  # by node_id: of the last registration
        self._waiting: dict[str, ev.Joined] = {}
        self._members: dict[str, t.Node] = {}
        self._to_coordinator: Callable[[Any], None] | None = None
        server.listen_to(self._on_event, where)

    def lead(self, to_coordinator: Callable[[Any], None]) -> None:
        """A coordinator begins here."""
        self._to_coordinator = to_coordinator

    def retire(self) -> None:
        """It has ended."""
        self._to_coordinator = None
        for node_id in list(self._members):
            self.drop(node_id)

    def answer(self, command: el.AnswerVisitor) -> None:
        """Take a registration, or send it on."""
        visitor = command.visitor
        elsewhere = command.elsewhere
        joined = self._waiting.pop(visitor, None)
        if joined is None:
            return  # it has left
        if elsewhere is None and self._to_coordinator is not None:
            self._members[visitor] = joined.message.node
            self._to_coordinator(joined)
            return
        if elsewhere is not None:
            self._server.send(visitor, elsewhere)
        self._server.drop(visitor)

    def quorum_heard(self, host: CoordinatorHost) -> float:
        """When a quorum of the coordinator was heard last (monotonic seconds)."""
        return host.heard(self._server.heard_at, self._members)

    def unheard(self, since_s: float) -> tuple[str, ...]:
        """Keys of the members from which nothing has come since then (monotonic seconds)."""
        members = self._members.items()
        return tuple(
            peer_key(node) for node_id, node in members if self._server.heard_at(node_id) < since_s
        )

    def _on_event(self, event: Any) -> None:
        if isinstance(event, ev.Joined):
            return self._registers(event)
        node_id = event.node_id
        waited = self._waiting.pop(node_id, None) is not None
        if waited or self._to_coordinator is None or node_id not in self._members:
            return None
        if isinstance(event, ev.Lost):
            del self._members[node_id]
        return self._to_coordinator(event)

    def _registers(self, event: ev.Joined) -> None:
        node_id = event.message.node.node_id
        number = event.message.number
        if number < self._numbers.get(node_id, 0):
            return self._server.drop(node_id)
        self._numbers[node_id] = number
        self._waiting[node_id] = event
        return self._visited(el.Visited(node_id, event.message.vote))

    # --- for the coordinator of this node ---------------------------------------------------------------------

    def send(self, node_id: str, message: t.CoordinatorMessage) -> bool:
        """Push a message to one member."""
        return node_id in self._members and self._server.send(node_id, message)

    def send_all(self, message: t.CoordinatorMessage) -> None:
        """Push a message to every member."""
        for node_id in self._members:
            self._server.send(node_id, message)

    def drop(self, node_id: str) -> None:
        """Disconnect one member."""
        if self._members.pop(node_id, None) is not None:
            self._server.drop(node_id)

    async def close(self, grace_s: float) -> None:
        """Disconnect all."""
        for node_id in list(self._members):
            self.drop(node_id)
        await self._server.all_left(grace_s)
