"""Streams between agents and a coordinator: in order, late, sometimes twice, and broken in all the usual ways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nvrx_slurm.core.election.events import LEADER_SHARE, LEASE_SHARE, MEMBER_SHARE
from nvrx_slurm.types import Register

if TYPE_CHECKING:
    from .processes import SimAgent

COORDINATOR_KEEPALIVE_S = 5.0
AGENT_KEEPALIVE_S = MEMBER_SHARE * COORDINATOR_KEEPALIVE_S  # an agent notices silence earlier, as control.client does
LEASE_S, LEADS_S = LEASE_SHARE * COORDINATOR_KEEPALIVE_S, LEADER_SHARE * COORDINATOR_KEEPALIVE_S
_BACK_S = 3.0  # how long a node that was out may take to find the coordinator
_DELAY_S = (0.0002, 0.004)
_SLOW_DELAY_S = (0.2, 2.0)


@dataclass
class Host:
    """A machine. Agents come and go on it."""

    infra_rank: int
    nproc: int
    cut_until: float = 0.0  # partitioned: nothing gets through before
    mute_until: float = 0.0  # nothing that it sends arrives before
    deaf_until: float = 0.0  # nothing arrives at it before
    slow_until: float = 0.0  # its messages crawl
    frozen_until: float = 0.0  # stopped (SIGSTOP): its programs take no step before
    off: bool = False  # without power: it answers nothing
    out_last: float = 0.0  # until when it was last cut off, slow or stopped; 0.0 = never
    sick: str = ""  # what a health check finds from now on
    agent: SimAgent | None = None  # its latest life

    def unreachable_until(self, now):
        """Until when it answers nothing; 0.0 = it answers."""
        until = max(self.out_until, self.frozen_until, float("inf") if self.off else 0.0)
        return until if until > now else 0.0

    @property
    def was_out(self):
        return self.out_last > 0.0

    def out_after(self, when):
        """Whether it could not be reached at `when` or later, or was only just back then."""
        return self.was_out and self.out_last + _BACK_S >= when

    @property
    def out_until(self):
        """Until when it can make no connection."""
        return max(self.cut_until, self.mute_until, self.deaf_until)

    @property
    def name(self):
        return f"h{self.infra_rank}"


@dataclass
class Split:
    """Two sides of the cluster that hear nothing of each other."""

    until: float = 0.0
    side: frozenset[int] = frozenset()  # infra ranks of one of them

    def heals(self, sender, receiver):
        apart = (sender.infra_rank in self.side) != (receiver.infra_rank in self.side)
        there = max(sender.cut_until, receiver.cut_until, sender.mute_until, receiver.deaf_until)
        return max(there, self.until) if apart else there

    def reach(self, one, other, now):
        """Whether one of them can connect to the other, which may be frozen or off."""
        return one is other or max(self.heals(one, other), self.heals(other, one)) <= now


@dataclass(frozen=True)
class _End:
    """Last item of a direction: the other end has closed."""

    why: str


class Connection:
    """One stream. Messages keep their order; a duplicate comes again later, on the same stream."""

    def __init__(self, world, agent, coordinator):
        self.agent, self.coordinator = agent, coordinator
        self.open_at_agent = self.open_at_coordinator = True
        self.silent_until = 0.0
        self._well_at = 0.0  # when beats got through last, where they do not any more
        self._world, self._clock, self._rng = world, world.clock, world.rng
        self.local = agent.host is coordinator.host
        self._last_up = self._last_down = 0.0
        coordinator.accepted.append(self)

    def up(self, message):
        """Agent to coordinator."""
        heals = self._world.split.heals(self.agent.host, self.coordinator.host)
        self._last_up = self._carry(message, self._last_up, self._arrive_up, heals)

    def down(self, message):
        """Coordinator to agent."""
        heals = self._world.split.heals(self.coordinator.host, self.agent.host)
        self._last_down = self._carry(message, self._last_down, self._arrive_down, heals)

    def _carry(self, message, last, arrive, heals):
        now, ends = self._clock.now, (self.agent.host, self.coordinator.host)
        if self.local:
            self._clock.at(now, arrive, message)
            return now
        slow = any(host.slow_until > now for host in ends)
        delay_s = self._rng.uniform(*(_SLOW_DELAY_S if slow else _DELAY_S))
        when = max(last, max(now, heals) + delay_s)
        self._clock.at(when, arrive, message)
        twice = self._world.settings.twice
        if twice and not isinstance(message, (Register, _End)) and self._rng.random() < twice:
            self._world.fired["duplicate"] += 1
            self._clock.at(when + self._rng.uniform(0.0, 3.0), arrive, message)
        return when

    def _cut(self, message, arrive, sender, receiver):
        """A partition holds back what is under way (TCP sends it again once it heals)."""
        heals = 0.0 if self.local else self._world.split.heals(sender, receiver)
        if heals > self._clock.now:
            self._clock.at(heals, arrive, message)
        return heals > self._clock.now

    def _arrive_up(self, message):
        if not self.open_at_coordinator or self._cut(message, self._arrive_up, self.agent.host, self.coordinator.host):
            return
        if isinstance(message, _End):
            self.break_at_coordinator(message.why)
        else:
            self.coordinator.receive(self, message)

    def _arrive_down(self, message):
        if not self.open_at_agent or self._cut(message, self._arrive_down, self.coordinator.host, self.agent.host):
            return
        if isinstance(message, _End):
            self.break_at_agent(message.why)
        else:
            self.agent.receive(self, message)

    # --- how it ends ---------------------------------------------------------------------------------

    def close_at_agent(self, why):
        """The agent's end closes on purpose or with its process: what it sent before still arrives."""
        self._note()
        self.open_at_agent = False
        self.up(_End(why))

    def close_at_coordinator(self, why):
        self.open_at_coordinator = False
        self.down(_End(why))

    def break_at_agent(self, why, silent=False):
        if self.open_at_agent:
            self.close_at_agent(why)
            self.agent.disconnected(self, why, silent)

    def break_at_coordinator(self, why, silent=False):
        if self.open_at_coordinator:
            self._note()
            self.close_at_coordinator(why)
            self.coordinator.lost(self, why, COORDINATOR_KEEPALIVE_S if silent else self._clock.now - self._well_at)

    def fall_silent(self, heals):
        """Nothing gets through until `heals` (virtual time): each end gives up after its own keepalive, if that is
        sooner."""
        now = self._clock.now
        if self.local:
            return
        self._note()
        self.silent_until = max(self.silent_until, heals)
        if heals > now + AGENT_KEEPALIVE_S:
            why = "no answer within the keepalive time"
            self._clock.after(AGENT_KEEPALIVE_S, self._give_up, self.break_at_agent, why)
        if heals > now + COORDINATOR_KEEPALIVE_S:
            why = "silent for the keepalive time"
            self._clock.after(COORDINATOR_KEEPALIVE_S, self._give_up, self.break_at_coordinator, why)

    def _give_up(self, break_it, why):
        """By the timer of a program that is stopped itself: not before it goes on, and then it hears first."""
        end = self.agent.host if break_it == self.break_at_agent else self.coordinator.host
        if end.frozen_until > self._clock.now:
            self._clock.at(end.frozen_until + 0.01, self._give_up, break_it, why)
        elif self.silent_until > self._clock.now:
            break_it(why, True)

    def _note(self):
        """Beats may not get through from now on."""
        if self.healthy:
            self._well_at = self._clock.now

    @property
    def is_unheard(self):
        """Whether the agent may have left by now."""
        return not self.healthy and self._clock.now >= self._well_at + AGENT_KEEPALIVE_S

    @property
    def healthy(self):
        """Whether beats get through in both directions."""
        return self.open_at_agent and self.open_at_coordinator and self.silent_until <= self._clock.now
