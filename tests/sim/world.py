"""The simulated cluster: hosts, agents, one coordinator at a time, the training, and who watches them.

outcome = World(WorldSettings(nodes=80, min_nodes=76, seed=1)).run()
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from nvrx_slurm.core.agent.events import AgentSettings
from nvrx_slurm.core.coordinator.restarts import RestartLimits
from nvrx_slurm.core.election.quorum import peer_of
from nvrx_slurm.declared import replace
from nvrx_slurm.types import FaultKind, KindCount, RestartPolicy
from tests.core.samples import agent_settings, coordinator_settings, restart_limits

from . import faults
from .clock import Clock
from .invariants import Invariants
from .network import COORDINATOR_KEEPALIVE_S, Host, Split
from .processes import SimAgent, SimCoordinator
from .training import Training

POLICIES = (RestartPolicy.ANY_FAILED, RestartPolicy.ANY_FAILED, RestartPolicy.MIN_HEALTHY)
_BEGAN_S = 1.8e9  # Unix seconds
BOUND_S = 600.0  # after the last fault everybody must have left within this (virtual) time
_TOO_LATE = f"not over {BOUND_S:g} s after the last fault"


@dataclass(frozen=True)
class WorldSettings:
    """What a run depends on; equal settings give equal runs."""

    nodes: int = 80
    min_nodes: int = 76
    max_restarts: int = 3
    seed: int = 0
    nproc: int = 2
    work_s: float = 20.0
    checkpoint_s: float = 4.0
    faults: int = 4  # how many, of random kinds
    kinds: Sequence[str] = ()  # the kinds to choose from; () = all
    twice: float = 0.01  # share of messages that come twice
    record: bool = False  # keep the event logs
    agent: AgentSettings = field(default_factory=agent_settings)
    limits: RestartLimits = field(default_factory=restart_limits)
    tracks_progress: bool = False
    join_timeout_s: float = 60.0
    absent: Sequence[int] = ()  # infra ranks of nodes that never come up
    time_limit_s: float = 0.0  # of the allocation; the coordinator warns 10 s before it and stops 5 s before; 0 = none

    segment: int | None = None  # nodes of one domain that get group ranks together

    def domain_of(self, infra_rank):
        """The domains have two segments and a node more."""
        return f"domain {infra_rank // (2 * self.segment + 1)}" if self.segment else ""

    @property
    def min_healthy(self):
        """Whether faults are the in-process wrapper's business first."""
        return self.agent.policy is RestartPolicy.MIN_HEALTHY


def random_settings(seed, nodes):
    """A job of `nodes` nodes whose shape, budget and number of faults follow from the seed."""
    rng = random.Random(seed)
    settings = _random_settings(rng, seed, nodes)
    if seed % 5 != 4 or nodes < 2:
        return settings
    segment = rng.randint(1, min(4, nodes // 2))
    agent = replace(settings.agent, policy=RestartPolicy.ANY_FAILED, hang_collect_s=1.5)
    least = max(segment, (settings.min_nodes - nodes // 10) // segment * segment)
    return replace(settings, segment=segment, min_nodes=least, agent=agent)


def _random_settings(rng, seed, nodes):
    spares = rng.choice((0, 2, 4, 8)) if nodes > 20 else rng.randrange(nodes)
    return WorldSettings(
        nodes=nodes,
        min_nodes=nodes - spares,
        max_restarts=rng.choice((0, 2, 4, 8)),
        seed=seed,
        nproc=rng.choice((1, 2)),
        faults=rng.randint(0, 8),
        agent=_agent(rng),
        limits=restart_limits(
            by_kind=(KindCount(FaultKind.EXIT, 1),) if rng.random() < 0.3 else (),
            max_no_progress_cycles=(most := rng.choice((0, 0, 1, 2))),
        ),
        tracks_progress=most > 0,
        time_limit_s=rng.choice((0.0, 0.0, 0.0, rng.uniform(6.0, 60.0))),
    )


def _agent(rng):
    in_step, policy = rng.random() < 0.5, rng.choice(POLICIES)
    hang_collect_s = 1.5 if policy is RestartPolicy.ANY_FAILED else 0.0
    return agent_settings(in_step=in_step, policy=policy, hang_collect_s=hang_collect_s)


@dataclass
class Outcome:
    """How a run ended."""

    code: int  # of the job: the coordinator's, or that of the agents when they lost it
    reason: str
    took_s: float
    exits: Counter[int]  # exit codes of agents
    fired: Counter[str]  # faults by kind


class World:
    """One run. A subclass may have other programs, or another training (scripts/lib/replay_world.py)."""

    agent_class, coordinator_class, judge_class = SimAgent, SimCoordinator, Invariants
    validates = True  # each core after each step

    def __init__(self, settings, story=None):
        """`story` is told what happens (scripts/lib/sim_story.py)."""
        self.settings = settings
        self.clock = Clock()
        self.rng = random.Random(settings.seed)
        self.ports = itertools.cycle(range(20000, 60000))
        self.fired = Counter()
        self.training = self.make_training()
        self.story = story
        self.split = Split()
        self.invariants = self.judge_class(self)
        self.hosts = [Host(i, settings.nproc) for i in range(settings.nodes)]
        self.agents = []
        self.coordinators = []
        self._left = 0
        self._lives = itertools.count()
        self._busy_until = 0.0  # faults (and what heals) may still come before that
        self._boot()

    @property
    def coordinator(self):
        return next((c for c in reversed(self.coordinators) if c.leads), None)

    @property
    def elects(self):
        """A job of one node has one coordinator."""
        return self.settings.nodes > 1

    @property
    def over(self):
        return self._left == len(self.agents) and not any(c.alive for c in self.coordinators)

    def living_agents(self):
        """Agents that run, in the order of their births."""
        return [agent for agent in self.agents if agent.alive]

    def make_training(self):
        s = self.settings
        return Training(self.clock, self.rng, s.work_s, s.checkpoint_s, s.min_healthy)

    # --- births ----------------------------------------------------------------------------------------

    def _boot(self):
        for host in self.hosts:
            if host.infra_rank in self.settings.absent:
                continue
            late = self.settings.faults > 0 and self.rng.random() < 0.02
            self.clock.after(self.rng.uniform(0.0, 15.0 if late else 0.5), self.start_agent, host)
        at = 0.0
        for _ in range(self.settings.faults):  # faults love company: every other one comes right after another
            soon = self.rng.random() < 0.5
            at = at + self.rng.uniform(0.0, 2.0) if soon else self.rng.uniform(0.0, 1.5 * self.settings.work_s)
            self.clock.at(at, faults.strike, self)
            self.busy_until(at)

    def busy_until(self, when):
        """The world is not quiet before `when`."""
        self._busy_until = max(self._busy_until, when)

    def start_agent(self, host):
        """A new agent on a host that has none (unless the job is over)."""
        if (host.agent is None or not host.agent.alive) and not (self.agents and self.over):
            host.off = False
            host.frozen_until = 0.0
            host.agent = self.agent_class(self, host, next(self._lives) + 1, self.settings.agent)
            self.agents.append(host.agent)
            host.agent.start()

    def start_later(self, host, soonest_s, latest_s):
        """The same after a while; returns after how many seconds."""
        delay_s = self.rng.uniform(soonest_s, latest_s)
        self.clock.after(delay_s, self.start_agent, host)
        self.busy_until(self.clock.now + delay_s)
        return delay_s

    def new_coordinator(self, agent, stand, before):
        """A node stands for coordinator."""
        s = self.settings
        names = tuple(host.name for host in self.hosts)
        settings = coordinator_settings(
            term=stand.term,
            min_nodes=s.min_nodes,
            max_nodes=s.nodes,
            max_restarts=s.max_restarts,
            policy=s.agent.policy,
            limits=s.limits,
            segment=s.segment,
            hang_collect_s=s.agent.hang_collect_s,
            hang_exclude=s.seed % 2 > 0,
            tracks_progress=s.tracks_progress,
            time_limited=s.time_limit_s > 0.0,
            warn_before_end_s=10.0,
            stop_before_end_s=5.0,
            join_timeout_s=s.join_timeout_s,
            expected=names,
            peer=peer_of(agent.core.node),
            electors=s.nodes if self.elects else 0,
            last_leader=before.key if before is not None else "",
            lease_s=COORDINATOR_KEEPALIVE_S,
            began_s=_BEGAN_S + self.clock.now,
            quorum_timeout_s=0.8 * (s.agent.join_timeout_s if before is None else s.agent.reconnect_timeout_s),
        )
        self.coordinators.append(self.coordinator_class(self, settings, agent))
        return self.coordinators[-1]

    def left(self, agent):
        """An agent's life has ended."""
        self._left += 1
        self.invariants.left(agent)

    # --- watching --------------------------------------------------------------------------------------

    def stepped(self, process, event, commands):
        if isinstance(process, SimAgent):
            self.invariants.agent_stepped(process, event, commands)
        elif isinstance(process, SimCoordinator):
            self.invariants.coordinator_stepped(process, event, commands)
        if self.story is not None:
            self.story.stepped(self.clock.now, process, commands)

    def happens(self, kind, sentence):
        self.fired[kind] += 1
        if self.story is not None:
            self.story.tell_at_mark(self.clock.now, "FAULT", sentence)

    # --- running ---------------------------------------------------------------------------------------

    def run(self):
        """Until nobody is left. Raises Violation when an invariant breaks, or when they never leave."""
        started = False
        while not (started and self.over) and not self.invariants.forgotten:
            more = self.clock.step()
            started = started or bool(self.agents)
            self.invariants.check(more, "nothing is due any more, but somebody is left")
            self.invariants.check(self.clock.now <= self._busy_until + BOUND_S, _TOO_LATE)
        if not self.invariants.forgotten:
            self.invariants.at_the_end()
        exits = Counter(agent.exit.code for agent in self.agents if agent.exit is not None)
        end = self.invariants.end
        code, reason = (end.code, end.reason) if end is not None else (max(exits, default=0), "no coordinator is left")
        return Outcome(code, reason, self.clock.now, exits, self.fired)
