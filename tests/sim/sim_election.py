"""The election of one node in the simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.election.election import (
    AnswerVisitor,
    AskWhoLeads,
    Election,
    ElectionSettings,
    Raise,
    Retire,
    Seek,
    Stand,
)
from nvrx_slurm.core.election.quorum import peer_of
from nvrx_slurm.core.machine import Say
from nvrx_slurm.types import Peer

from .network import COORDINATOR_KEEPALIVE_S
from .process import Process

if TYPE_CHECKING:
    from .processes import SimAgent
    from .world import World


class SimElection(Process):
    """One node's part in elections; its commands are carried out by its agent."""

    core: Election

    def __init__(self, world: World, agent: SimAgent) -> None:
        self.agent = agent
        candidates = tuple(Peer(str(host.infra_rank), host.name, "", 0) for host in world.hosts[:32])
        me = peer_of(agent.core.node)
        super().__init__(
            world, Election(me, candidates, ElectionSettings(COORDINATOR_KEEPALIVE_S), world.clock.now), agent.host
        )

    def do(self, command: Any) -> None:
        """Carry out one command."""
        if isinstance(command, Seek):
            self.agent.seek(command.peer, command.term)
        elif isinstance(command, Stand):
            self.agent.stand(command)
        elif isinstance(command, Retire):
            self.agent.retire()
        elif isinstance(command, Raise):
            assert self.agent.coordinator is not None
            self.agent.coordinator.step(ev.Raised(command.term))
        elif isinstance(command, AskWhoLeads):
            self.agent.ask_who_leads(command.peer)
        elif isinstance(command, AnswerVisitor):
            self.agent.answer(command)
        else:
            assert isinstance(command, Say), command
