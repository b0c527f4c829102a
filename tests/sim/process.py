"""One program of the simulation: a core, its timer and its event log; and the election of one node."""

from __future__ import annotations

from nvrx_slurm.core import event_log
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.election import events as el
from nvrx_slurm.core.election.election import Election
from nvrx_slurm.core.election.quorum import peer_of
from nvrx_slurm.core.machine import Say, Tick
from nvrx_slurm.types import Peer

from .network import COORDINATOR_KEEPALIVE_S


class Process:
    """A core with its timer and, if wanted, its event log."""

    def __init__(self, world, core, host):
        self.world, self.core, self.host = world, core, host
        self.alive = True
        self.log = [event_log.header_line(core)] if world.settings.record else []
        self._armed = None
        self._arm()

    def step(self, event):
        """Hand one event to the core and carry out its commands."""
        if not self.alive:
            return
        now = self.world.clock.now
        if self.host.frozen_until > now:
            self.world.clock.at(self.host.frozen_until, self.step, event)
            return
        commands = self.core.step(event, now)
        if self.world.validates:
            self.core.validate()
        if self.log:
            self.log.append(event_log.step_line(event, now, now, self.core, commands))
        self.world.stepped(self, event, commands)
        for command in commands:
            self.do(command)
        self._arm()

    def do(self, command):
        raise NotImplementedError

    def _arm(self):
        deadline = self.core.deadline() if self.alive else None
        if deadline != self._armed:
            self._armed = deadline
            if deadline is not None:
                self.world.clock.at(deadline, self._tick, deadline)

    def _tick(self, armed):
        if self.alive and self._armed == armed:
            self._armed = None
            self.step(Tick())


class SimElection(Process):
    """One node's part in elections; its commands are carried out by its agent."""

    core: Election

    def __init__(self, world, agent):
        self.agent = agent
        candidates = tuple(Peer(str(host.infra_rank), host.name, "", 0) for host in world.hosts[:32])
        me = peer_of(agent.core.node)
        settings = el.ElectionSettings(COORDINATOR_KEEPALIVE_S)
        super().__init__(world, Election(me, candidates, settings, world.clock.now), agent.host)

    def do(self, command):
        agent = self.agent
        if isinstance(command, el.Seek):
            agent.seek(command.peer, command.term)
        elif isinstance(command, el.Stand):
            agent.stand(command)
        elif isinstance(command, el.Retire):
            agent.retire()
        elif isinstance(command, el.Raise):
            agent.coordinator.step(ev.Raised(command.term))
        elif isinstance(command, el.AskWhoLeads):
            agent.ask_who_leads(command.peer)
        elif isinstance(command, el.AnswerVisitor):
            agent.answer(command)
        else:
            assert isinstance(command, Say), command
