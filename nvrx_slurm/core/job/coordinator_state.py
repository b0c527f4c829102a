"""What the coordinator knows, what a fault means to it, and how it ends. The table is in `core.job.coordinator`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from nvrx_slurm.core.job.assignment import Assignment
from nvrx_slurm.core.job.coordinator_events import AskTimeLeft, Done, Drop, ReadProgress, SendTo
from nvrx_slurm.core.job.inherited import Inherited
from nvrx_slurm.core.job.job_clock import Due, JobClock
from nvrx_slurm.core.job.members import READY, Members
from nvrx_slurm.core.job.restarts import Budget, RestartLimits, evidence, first_cause, headline
from nvrx_slurm.core.machine import Machine, Say, earliest
from nvrx_slurm.errors import ExitCode, signal_exit_code
from nvrx_slurm.types import (
    FaultKind,
    Finish,
    Node,
    RankFault,
    RanksGone,
    Refused,
    RestartPolicy,
    Stop,
    Warn,
    place_of,
)

_SIGTERM, _SIGUSR1 = 15, 10
_PROGRESS_S = 6.0  # the program gives the file system 5 s


class Phase(Enum):
    """States of the coordinator."""

    GATHERING = "waiting for enough nodes"
    RUNNING = "a cycle is running"
    STOPPING = "waiting until the workers of a failed cycle are gone"
    FINISHED = "the end is decided; waiting for the agents to leave"
    CLOSED = "done"


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
    tracks_progress: bool = False  # there is a checkpoint iteration file to read
    has_preflight: bool = (
        False  # agents check their nodes before every cycle; spares do when they are told to stop, too
    )
    join_timeout_s: float = 300.0  # how long to wait for min_nodes
    last_call_s: float = 1.0  # first cycle: how long to wait for the rest once min_nodes are here
    announce_s: float = 3.0  # first cycle: after how long to say who is missing
    stop_timeout_s: float = 60.0  # agents that still run workers this long after a stop are given up
    drain_timeout_s: float = 60.0  # how long the end waits for agents to leave
    return_grace_s: float = 3.0  # how long the end waits for a node whose stream has just broken to come and hear it
    time_limited: bool = False  # the allocation ends, and somebody knows when
    warn_before_end_s: float = 0.0  # how long before that ranks are warned; 0 = left to Slurm (--signal)
    stop_before_end_s: float = 0.0  # how long before that the job is stopped; 0 = left to Slurm (time limit)
    warning_signum: int = _SIGUSR1
    expected: tuple[str, ...] = ()  # host names by infra rank, to say who is missing


def lost(node: Node, why: str) -> RankFault:
    """A node that is gone, as a fault."""
    return RankFault(FaultKind.NODE_LOST, node.host, node.infra_rank, message=why)


class CoordinatorState(Machine):
    """The base of the coordinator's core."""

    def __init__(self, settings: CoordinatorSettings, now: float) -> None:
        super().__init__(Phase.GATHERING, now)
        self.settings = settings
        self.cycle = 0  # the running one, or the next one while GATHERING
        self.budget = Budget(settings.max_restarts, settings.limits)
        self.members = Members()
        self.assignment = Assignment()  # of the last plan
        self.faults: list[RankFault] = []  # of the current cycle
        self.last_faults: list[RankFault] = []  # of the one that was stopped before it
        self._pending: set[str] = set()  # node_ids that have yet to stop
        self._inherited = Inherited()
        self._fresh = True  # nothing has been planned, carried on or given up in this term
        self._excluded_seen = 0
        self._warning: Warn | None = None
        self._end: Finish | None = None
        self._away: dict[str, float] = {}  # node_id -> when an active node was lost
        self._clock = JobClock(settings.time_limited, settings.warn_before_end_s, settings.stop_before_end_s, now)
        self._started_at = now  # the current cycle
        self._join_by: float | None = now + settings.join_timeout_s
        self._announce_at: float | None = now + settings.announce_s
        self._last_call_at: float | None = None
        self._pause_until: float | None = None  # crash-loop back-off
        self._progress_by: float | None = None  # no plan before the last cycle is scored, or this
        self._end_unless_scored: Finish | None = None  # what the budget says, if progress does not say more
        self._stop_by: float | None = None
        self._last_ranks_by: float | None = None  # min-healthy: how long ranks of broken nodes may still take
        self._drain_by: float | None = None
        self._back_by: float | None = None  # nobody is left; how long one that was cut off may take to come back

    @property
    def restarts_used(self) -> int:
        """Over all terms."""
        return self.budget.history.restarts_used

    @property
    def min_healthy(self) -> bool:
        """Whether faults are tolerated while enough nodes are good."""
        return self.settings.policy is RestartPolicy.MIN_HEALTHY

    def deadline(self) -> float | None:
        """When the next Tick is due (monotonic seconds), or None."""
        if self.state is Phase.FINISHED:
            return earliest(self._drain_by, self._back_by)
        if self.state is Phase.GATHERING:
            mine = earliest(self._join_by, self._announce_at, self._last_call_at, self._pause_until, self._progress_by)
        else:
            mine = self._stop_by if self.state is Phase.STOPPING else self._last_ranks_by
        return earliest(mine, self._clock.deadline())

    def send_all(self, message: Finish | Warn) -> None:
        """To everybody who is connected, in infra order."""
        for node in self.members.in_order():
            self.emit(SendTo(node.node_id, message))

    # --- faults ------------------------------------------------------------------------------------------

    def node_failed(self, group_rank: int, faults: Sequence[RankFault], now: float, gone: bool = False) -> None:
        """Something happened to an active node of the running cycle; `gone`: nothing of it is left."""
        self.faults.extend(faults)
        if not self.min_healthy:
            self.cycle_failed(first_cause(self.faults), now)
            return
        assignment = self.assignment
        assignment.broken.add(group_rank)
        dead = tuple(fault.rank for fault in faults if fault.rank >= 0)
        if gone:
            assignment.gone.add(group_rank)
            assignment.succeeded.discard(group_rank)
            dead = assignment.slots[group_rank].ranks
        what = headline(faults[0])
        self._tell_wrappers(group_rank, dead, what)
        if assignment.good < self.settings.min_nodes:
            self.cycle_failed(faults[0], now)
        elif not self.finish_if_done(now):
            some = f"{assignment.good} of {assignment.planned} nodes are good, {self.settings.min_nodes} are needed"
            self.emit(Say(f"{what}; going on: {some}{evidence(faults[0])}"))

    def _tell_wrappers(self, group_rank: int, ranks: tuple[int, ...], why: str) -> None:
        """The in-process wrappers of the other nodes need not wait for a heartbeat to be late."""
        for other, slot in self.assignment.slots.items():
            if ranks and other != group_rank and slot.node_id in self.members:
                self.emit(SendTo(slot.node_id, RanksGone(self.cycle, ranks, why)))

    def cycle_failed(self, cause: RankFault | None, now: float) -> None:
        """The cycle cannot go on: stop everybody for the next one, or end the job."""
        assert cause is not None
        decision = self.budget.after(cause, now - self._started_at)
        told = "" if decision.restart else "the job ends: "  # its last lines tell the evidence
        self.emit(Say(told + decision.why + (evidence(cause) if decision.restart else "")))
        end = None if decision.restart else Finish(decision.code, decision.why)
        if self.settings.tracks_progress:  # its verdict comes first: "do not start it again" is more than "failed"
            self._end_unless_scored, self._progress_by = end, now + _PROGRESS_S
            self.emit(ReadProgress(self.cycle))
        elif end is not None:
            self.finish(end, now)
            return
        self.last_faults = self.faults
        self.state = Phase.STOPPING
        self._pause_until = now + decision.pause_s if decision.pause_s else None
        self._stop_by = now + self.settings.stop_timeout_s
        places = self.assignment.places.values()
        self._pending = {node_id for node_id in places if self._may_run(node_id)}
        for node_id in places:
            if node_id in self._pending:
                self.emit(SendTo(node_id, Stop(self.settings.term, self.cycle, decision.why)))
        self._check_spares()
        self.gather_if_stopped(now)

    def _check_spares(self) -> None:
        """They say whether they are fit, too; nobody waits for one that is not needed."""
        if not self.settings.has_preflight:
            return
        for node in self.members.ready_nodes():
            if self.assignment.group_rank(node.node_id) is None:
                self.members.set_busy(node.node_id, self.cycle)
                self.emit(SendTo(node.node_id, Stop(self.settings.term, self.cycle, "it may be needed")))

    def _may_run(self, node_id: str) -> bool:
        member = self.members.get(node_id)
        return member is not None and member.busy != READY

    def gather_if_stopped(self, now: float) -> None:
        """The next cycle can be planned once nothing of this one is left."""
        if self._pending or self.state is not Phase.STOPPING:
            return
        self.cycle += 1
        self.state = Phase.GATHERING
        self._stop_by = None
        self._join_by = self._announce_at = self._last_call_at = None
        self.try_plan(now)

    def try_plan(self, now: float) -> None:
        """In `core.job.gathering`."""
        raise NotImplementedError

    # --- nodes that are not taken ---------------------------------------------------------------------------

    def refuse(self, node_id: str, why: str) -> None:
        """Send a node away."""
        self.emit(SendTo(node_id, Refused(ExitCode.NODE_REFUSED, why)))
        self.emit(Drop(node_id))
        self.members.remove(node_id)

    def is_excluded(self, node: Node) -> bool:
        """Whether a rank has asked not to have this node again."""
        return place_of(node) in self.budget.history.excluded

    # --- time and warnings ------------------------------------------------------------------------------------

    def tell_time(self, due: Due, now: float) -> bool:
        """Do what the job's clock wants; whether that was something."""
        if due is Due.ASK:
            self.emit(AskTimeLeft())
        elif due is Due.WARN:
            left = f"less than {self.settings.warn_before_end_s:g} s of the allocation are left"
            self.warn(Warn(self.settings.warning_signum or _SIGUSR1, left))
        elif due is Due.STOP:
            left = f"less than {self.settings.stop_before_end_s:g} s of the allocation are left"
            self.finish(Finish(signal_exit_code(_SIGTERM), left), now)
        return due is not Due.NOTHING

    def warn(self, warning: Warn) -> None:
        """Tell everybody, now or when they come, that the job is about to end."""
        if self._warning is None:
            self._warning = warning
            self.emit(Say(f"warning all ranks: {warning.reason}"))
            self.send_all(warning)

    # --- the end ----------------------------------------------------------------------------------------------

    def finish_if_done(self, now: float) -> bool:
        """The end, if nobody has to be waited for any more. Ranks of broken nodes may be about to end well, too."""
        assignment = self.assignment
        enough = self.settings.min_nodes if self.min_healthy else len(assignment)
        if assignment.healthy or len(assignment.succeeded) < enough:
            return False
        if any(self._may_run(assignment.places[g]) for g in assignment.broken - assignment.gone):
            if self._last_ranks_by is None:
                self._last_ranks_by = now + self.settings.stop_timeout_s
            if now < self._last_ranks_by:
                return True
        if assignment.early:
            warning = self._warning
            signum = warning.signum if warning is not None else self.settings.warning_signum
            self.finish(Finish(signal_exit_code(signum), "the ranks were warned, saved their work and ended"), now)
        else:
            self.finish(Finish(ExitCode.OK, "all ranks finished"), now)
        return True

    def finish(self, end: Finish, now: float) -> None:
        """Decide the end and tell everybody."""
        self._end = end
        self.state = Phase.FINISHED
        self._drain_by = now + self.settings.drain_timeout_s
        self.send_all(end)
        self.close_if_alone(now)

    def close_if_alone(self, now: float) -> None:
        """The last one has left; a node that was cut off a moment ago may still come back, and should hear the end."""
        if len(self.members) or self._end is None:
            return
        back_by = max(self._away.values(), default=-inf) + self.settings.return_grace_s
        if now < back_by:
            self._back_by = back_by
            return
        self.state = Phase.CLOSED
        cause = None if self._end.code == ExitCode.OK else first_cause(self.faults)
        self.emit(Done(self._end.code, self._end.reason, cause))
