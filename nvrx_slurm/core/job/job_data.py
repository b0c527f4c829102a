"""What the parts of the coordinator share: states, settings and the data of the job."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from nvrx_slurm.core import machine
from nvrx_slurm.core.job.advice import Advice
from nvrx_slurm.core.job.assignment import Assignment
from nvrx_slurm.core.job.inherited import Inherited
from nvrx_slurm.core.job.job_clock import JobClock
from nvrx_slurm.core.job.members import Members
from nvrx_slurm.core.job.placement import is_possible
from nvrx_slurm.core.job.quorum import Quorum
from nvrx_slurm.core.job.report import ReportBuilder
from nvrx_slurm.core.job.restarts import Budget, RestartLimits
from nvrx_slurm.core.machine import Follows
from nvrx_slurm.types import FaultKind, Finish, History, Node, Peer, Plan, RankFault, RestartPolicy, Warn

SIGUSR1 = 10
_MAX_FAULTS = 10_000  # of one cycle that are kept in full


class Phase(Enum):
    """States of the coordinator."""

    ELECTING = "this node stands for coordinator; waiting for a majority of the nodes"
    JOINING = "waiting for enough nodes"
    LAST_CALL = "enough nodes are here; waiting a moment for the others"
    TAKEOVER = "nodes run a cycle of an older term; waiting a moment for the rest of them"
    PAUSED = "ranks die at their start again and again; waiting before the next cycle"
    RUNNING = "a cycle is running"
    LAST_RANKS = "enough nodes are done; waiting for the last ranks of nodes with a fault"
    STOPPING = "waiting until the workers of a failed cycle are gone"
    SCORING = "the workers are gone; waiting for the progress that their cycle made"
    FINISHED = "the end is decided; waiting for the agents to leave"
    RETURNING = "all agents have left; waiting a moment for one that was cut off"
    CLOSED = "done"


STOPPING = (Phase.STOPPING, Phase.SCORING)
CYCLE = (Phase.RUNNING, Phase.LAST_RANKS, *STOPPING)  # of which workers may be left
OVER = (Phase.FINISHED, Phase.RETURNING, Phase.CLOSED)  # CLOSED at once: no agent is here to be told
LIVE = tuple(phase for phase in Phase if phase not in (Phase.ELECTING, *OVER))
_FAILED = (*STOPPING, Phase.JOINING, Phase.PAUSED)
FOLLOWS: Follows = {
    Phase.ELECTING: (*(phase for phase in LIVE if phase is not Phase.PAUSED), *OVER),
    Phase.JOINING: (Phase.LAST_CALL, Phase.TAKEOVER, Phase.RUNNING, *STOPPING, *OVER),
    Phase.LAST_CALL: (Phase.JOINING, Phase.TAKEOVER, Phase.RUNNING, *STOPPING, *OVER),
    Phase.TAKEOVER: (Phase.JOINING, Phase.LAST_CALL, Phase.RUNNING, Phase.LAST_RANKS, *STOPPING, *OVER),
    Phase.PAUSED: (Phase.JOINING, Phase.LAST_CALL, Phase.RUNNING, *OVER),
    Phase.RUNNING: (Phase.LAST_RANKS, *_FAILED, *OVER),
    Phase.LAST_RANKS: (*_FAILED, *OVER),
    Phase.STOPPING: (Phase.SCORING, Phase.JOINING, Phase.LAST_CALL, Phase.PAUSED, Phase.RUNNING, *OVER),
    Phase.SCORING: (Phase.JOINING, Phase.LAST_CALL, Phase.PAUSED, Phase.RUNNING, *OVER),
    Phase.FINISHED: (Phase.RETURNING, Phase.CLOSED),
    Phase.RETURNING: (Phase.FINISHED, Phase.CLOSED),
}
ANY = (*LIVE, *OVER)
rows = partial(machine.rows, follows=FOLLOWS)


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """What the coordinator is told once. All times in seconds."""

    term: int = 1
    min_nodes: int = 1  # any-failed: active nodes of every cycle; min-healthy: fewest good ones; >= 1
    max_nodes: int = 1  # how many are expected at the start; waiting for more makes no sense
    max_restarts: int = 0  # per job
    policy: RestartPolicy = RestartPolicy.ANY_FAILED
    limits: RestartLimits = RestartLimits()
    max_active: int = 0  # min-healthy: most active nodes of a cycle, the others are spares; 0 = all are active
    segment: int | None = None  # group ranks go in segments of so many nodes of one domain; None: domains do not matter
    hang_collect_s: float = 0.0  # how long nodes may take to look at their ranks when one hangs; 0 = they do not
    hang_exclude: bool = False  # the node of the rank that the others wait for leaves the job
    attributes: bool = False  # there is an attribution service to tell of cycles
    stops_on_advice: bool = False  # its STOP ends the job
    tracks_progress: bool = False  # there is a checkpoint iteration file to read
    has_preflight: bool = False  # agents check their nodes before every cycle, spares when they are told to stop
    join_timeout_s: float = 300.0  # how long to wait for min_nodes
    last_call_s: float = 1.0  # first cycle: how long to wait for the rest once min_nodes are here
    announce_s: float = 3.0  # after how long to say which nodes are missing, where some are still being checked
    stop_timeout_s: float = 60.0  # agents that still run workers this long after a stop are taken out of the job
    drain_timeout_s: float = 60.0  # how long the end waits for agents to leave
    return_grace_s: float = 3.0  # how long the end waits for a node whose stream has just broken to hear of it
    time_limited: bool = False  # the allocation ends, and Slurm knows when
    warn_before_end_s: float = 0.0  # how long before that ranks are warned; 0 = left to Slurm (--signal)
    stop_before_end_s: float = 0.0  # how long before that the job is stopped; 0 = left to Slurm (time limit)
    warning_signum: int = SIGUSR1
    expected: tuple[str, ...] = ()  # host names by infra rank, to name the missing ones
    peer: Peer | None = None  # where this coordinator listens; None where the job elects no coordinator
    electors: int = 0  # nodes of the job, of which most must be members; 0 = no quorum is needed
    known: tuple[Peer, ...] = ()  # where other nodes may listen, before the first plan
    last_leader: str = ""  # key of the coordinator before this one
    fence_s: float = 0.0  # how long ranks may run on nodes that did not register, from the election on
    leader_fence_s: float = 0.0  # the same where only the last coordinator's node is missing
    quorum_timeout_s: float = (
        0.0  # how long this node stands without a quorum; then its voters end with 94; 0 = for ever
    )
    began_s: float = 0.0  # when this coordinator began (Unix seconds)
    lease_s: float = 10.0  # how long ranks may run on a node whose stream broke
    prove_s: float = 2.0  # without a quorum: how long to wait for a proof of death before resigning


@dataclass
class JobData:
    """The data of the job. Times are monotonic seconds."""

    settings: CoordinatorSettings
    budget: Budget
    clock: JobClock  # the end of the allocation
    report: ReportBuilder
    members: Members = field(default_factory=Members)
    assignment: Assignment = field(default_factory=Assignment)  # of the last plan
    inherited: Inherited = field(default_factory=Inherited)  # what agents tell of earlier terms
    fresh: bool = True  # nothing has been planned, carried on or given up in this term
    cycle: int = -1  # the last one that was planned, in any term; -1 = none
    cycle_started_at: float = 0.0
    faults: dict[RankFault, None] = field(default_factory=dict)  # of the last cycle, in order of arrival, each once
    cause: RankFault | None = None  # why the last cycle failed
    pause_until: float = 0.0  # no cycle starts before
    lost_at: dict[str, float] = field(default_factory=dict)  # node_id -> when an active node was lost
    quorum: Quorum = field(default_factory=lambda: Quorum(0))
    advice: Advice = field(default_factory=Advice)
    warning: Warn | None = None  # that the job is about to end
    end: Finish | None = None

    @classmethod
    def at_start(cls, settings: CoordinatorSettings, now: float) -> JobData:
        """Nothing has happened yet."""
        s = settings
        clock = JobClock(s.time_limited, s.warn_before_end_s, s.stop_before_end_s, now)
        return cls(
            s,
            Budget(s.max_restarts, s.limits),
            clock,
            ReportBuilder(now, s.began_s),
            cycle_started_at=now,
            quorum=Quorum(s.electors),
        )

    @property
    def min_healthy(self) -> bool:
        """Whether faults are tolerated while enough nodes are good."""
        return self.settings.policy is RestartPolicy.MIN_HEALTHY

    @property
    def history(self) -> History:
        """What a plan tells."""
        return self.report.add_to(self.budget.history)

    @property
    def nodes_left(self) -> int:
        """How many nodes may still come at most: those that were expected, without the excluded ones."""
        return self.settings.max_nodes - len(self.budget.history.excluded)

    def inherit(self, plan: Plan) -> tuple[list[str], bool]:
        """Note what an agent's plan tells of earlier terms.

        Returns the runners of a cycle that turns out not to be the last one, and whether further nodes are excluded.
        """
        self.report.inherit(plan.history)
        excludes, overtaken = self.budget.inherit(plan.history), self.inherited.learn(plan)
        if self.fresh:
            self.cycle = max(self.cycle, self.inherited.last_cycle)
        return overtaken, excludes

    def may_exclude_by_rule(self, node: Node) -> bool:
        """Whether enough nodes are left, and at most 5 % of them are excluded: else the rule itself is doubtful."""
        excluded, nodes = len(self.budget.history.excluded), self.settings.max_nodes
        others = [member.node for member in self.members.values() if member.node is not node]
        if self.settings.segment and not is_possible(others, self.settings.min_nodes, self.settings.segment):
            return False
        return self.nodes_left > self.settings.min_nodes and excluded < max(1, nodes // 20)

    def add_faults(self, faults: Iterable[RankFault], now: float) -> bool:
        """Note faults of the last cycle; whether one is new. A fault, and the hang of a rank, counts once."""
        known = len(self.faults)
        for fault in faults:
            if fault not in self.faults and not self._hangs(fault) and len(self.faults) < _MAX_FAULTS:
                self.faults[fault] = None
                self.report.add_fault(fault, self.cycle, now)
        return len(self.faults) > known

    def _hangs(self, fault: RankFault) -> bool:
        """Whether the fault tells of the rank that the others wait for, which is known already."""
        first = next(iter(self.faults), fault)
        return (
            first is not fault and fault.kind is FaultKind.HANG and (first.kind, first.rank) == (fault.kind, fault.rank)
        )
