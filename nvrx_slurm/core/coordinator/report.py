"""What happened in the job: every fault and restart, bounded, for the last lines and for result.json; and whether the
answer of an attribution service still holds when it comes: it may be minutes late."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from nvrx_slurm.core.attribution.named_node import JobNode, placed
from nvrx_slurm.core.attribution.said import headline
from nvrx_slurm.core.attribution.verdict import JudgedCause, first_cause
from nvrx_slurm.declared import replace
from nvrx_slurm.types import (
    FaultKind,
    FaultRecord,
    History,
    JobReport,
    Loaded,
    RankFault,
    RestartRecord,
    StragglerRecord,
)

Entry = TypeVar("Entry", FaultRecord, RestartRecord, StragglerRecord)
LISTED = 1000  # faults and restarts that are listed one by one
_MESSAGE_CHARS = 400
_MAX_FAULTS = 10_000  # of one cycle that are kept in full
_DETAILS = re.compile(r"0x[0-9a-f]+|[0-9]+", re.IGNORECASE)
_COMPARED = 32  # restarts
_TOLD_RESTARTS, _TOLD_HOSTS = 8, 64  # that a plan carries to the next coordinator


@dataclass
class Advice:
    """The row of equal failures that the job has just behind it.

    An answer about one of them holds until a cycle has got past the point of that failure, or has failed otherwise.
    """

    first: int = -1  # cycle with which the row began; -1 = none has failed
    last: int = -1
    lasted_s: float = 0.0  # the longest of them
    alike: tuple[FaultKind, int, str] | None = None

    def failed(self, cycle: int, cause: RankFault, lasted_s: float) -> None:
        """A cycle has failed after `lasted_s` seconds."""
        alike = (cause.kind, cause.exit_code, _DETAILS.sub("#", cause.message[:_MESSAGE_CHARS]))
        if alike != self.alike:
            self.first = cycle
            self.lasted_s = 0.0
            self.alike = alike
        self.last, self.lasted_s = cycle, max(self.lasted_s, lasted_s)

    def why_void(self, cycle: int, running_s: float | None) -> str:
        """Why an answer about `cycle` does not hold; "" if it does. `running_s`: of the cycle that runs, or None."""
        if not 0 <= self.first <= cycle <= self.last:
            return (
                "the job has failed otherwise since then"
                if 0 <= cycle < self.first
                else "that cycle has not failed"
            )
        if running_s is not None and running_s > self.lasted_s:
            return "the job has got further since then"
        return ""


class Ledger:
    """Collects while the job runs. Times are monotonic seconds; the report has seconds since the job began.

    `now`: when this coordinator began, `began_s` in Unix seconds. What earlier ones went through comes by `inherit`.
    `job_began_s`: when the job began; 0 = with its first coordinator.
    `marks`: the last cycle that has failed, when, and when its first cause gave its last sign of life. `stragglers`: at
    most 32, kept by `Suspects`; the last one may go on.
    """

    def __init__(
        self,
        now: float,
        began_s: float = 0.0,
        stragglers: Sequence[StragglerRecord] = (),
        job_began_s: float = 0.0,
    ) -> None:
        self.started_at = now
        self._nodes: Callable[[], Sequence[JobNode]] = tuple
        self.marks: tuple[int, float, float] | None = None
        self.faults: dict[RankFault, None] = {}  # of the last cycle, in order of arrival, each once
        self.cause: RankFault | None = None  # why the last cycle failed
        # iterations of the training and of its last checkpoint; -1 = not known
        self.reached = self.checkpoint = -1
        self.advice = Advice()
        self._stragglers = stragglers
        self._began_s = began_s
        self._job_began_s = job_began_s
        self._past = History()
        self._faults: list[FaultRecord] = []
        self._not_listed = 0
        self._last: dict[RankFault, FaultRecord] = {}  # of the cycle of the latest fault, each once
        self._last_cycle = -1
        self._restarts: list[RestartRecord] = []
        self._open: RestartRecord | None = None  # the restart that is under way
        self._down_s = 0.0
        self._lost: dict[str, None] = {}
        self._spares_lost: dict[str, None] = {}  # that have not come back
        self._promoted: list[str] = []

    def ask_nodes(self, nodes: Callable[[], Sequence[JobNode]]) -> None:
        """Whom to ask for the nodes of the job, where a line names one."""
        self._nodes = nodes

    def inherit(self, history: History) -> None:
        """What an agent knows of earlier terms, where it is more than others know."""
        mine = self._past
        if _amount(history) > _amount(mine):
            self._past = history

    def complete(self, history: History) -> History:
        """`history` with what this report tells to the next coordinator."""
        return replace(
            self._summed(history), restarts=self._last_restarts(_TOLD_RESTARTS)[-_TOLD_RESTARTS:]
        )

    def _summed(self, history: History) -> History:
        past = self._past
        return replace(
            history,
            began_s=past.began_s or self._job_began_s or self._began_s,
            down_s=past.down_s + self._down_s,
            lost=tuple(dict.fromkeys((*past.lost, *self._lost, *self._spares_lost)))[:_TOLD_HOSTS],
            promoted=(*past.promoted, *self._promoted)[:_TOLD_HOSTS],
        )

    def at_s(self, at: float) -> float:
        """Seconds from the job's beginning to `at`."""
        return at - self.started_at + self._before_s

    @property
    def _before_s(self) -> float:
        """Between the job's beginning and that of this coordinator."""
        job_began_s = self._past.began_s or self._job_began_s
        return max(0.0, self._began_s - job_began_s) if job_began_s else 0.0

    @property
    def restarts(self) -> tuple[RestartRecord, ...]:
        """Those that are over: all of this term, and the last ones of earlier terms."""
        return self._last_restarts(LISTED)

    @property
    def failures(self) -> tuple[RestartRecord, ...]:
        """The last restarts, with the one that is under way."""
        under_way = [] if self._open is None else [self._open]
        return (*self.restarts, *self._in_job_time(under_way))[-_COMPARED:]

    def _last_restarts(self, most: int) -> tuple[RestartRecord, ...]:
        """The last `most` (>= 1) of them, and those of earlier terms."""
        return (*self._past.restarts, *self._in_job_time(self._restarts[-most:]))

    def _in_job_time(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        return (replace(one, at_s=self.at_s(one.at_s)) for one in entries)

    def add(self, faults: Iterable[RankFault], cycle: int, now: float) -> bool:
        """Note faults of the last cycle; whether one is new. A fault, and the hang of a rank, counts once."""
        known = len(self.faults)
        for told in faults:
            fault = self._placed(told)
            if (
                fault not in self.faults
                and not self._is_known_hang(fault)
                and len(self.faults) < _MAX_FAULTS
            ):
                self.faults[fault] = None
                self.add_fault(fault, cycle, now)
        return len(self.faults) > known

    def _placed(self, fault: RankFault) -> RankFault:
        """With the node that its line means, where that names one."""
        if fault.finding is None or not fault.finding.node:
            return fault
        gone = map(JobNode, self._lost)
        return placed(fault, [*self._nodes(), *gone])

    def _is_known_hang(self, fault: RankFault) -> bool:
        """Whether the fault tells of the rank that the others wait for, which is known already."""
        first = next(iter(self.faults), fault)
        same = (first.kind, first.rank) == (FaultKind.HANG, fault.rank)
        return first is not fault and fault.kind is FaultKind.HANG and same

    def add_fault(self, fault: RankFault, cycle: int, now: float) -> None:
        """A fault has become known."""
        if cycle != self._last_cycle:
            self._last, self._last_cycle = {}, cycle
        if fault in self._last:
            return
        record = FaultRecord(
            at_s=now,
            cycle=cycle,
            kind=fault.kind,
            host=fault.host,
            infra_rank=fault.infra_rank,
            rank=fault.rank,
            local_rank=fault.local_rank,
            exit_code=fault.exit_code,
            message=headline(fault)[:_MESSAGE_CHARS],
            rule=fault.finding.rule if fault.finding is not None else "",
        )
        if len(self._faults) < LISTED:
            self._faults.append(record)
        else:
            self._not_listed += 1
        if len(self._last) < LISTED:
            self._last[fault] = record
        if fault.kind is FaultKind.NODE_LOST and fault.host and len(self._lost) < LISTED:
            self._lost[fault.host] = None

    def spare_lost(self, host: str) -> None:
        """A node without ranks has left."""
        if len(self._spares_lost) < LISTED:
            self._spares_lost[host] = None

    def spare_is_back(self, host: str) -> None:
        """If it had left."""
        self._spares_lost.pop(host, None)

    def blame(self, cause: RankFault | None = None) -> None:
        """The last cycle is to be stopped for this fault; None: for the first of those that are known."""
        self.cause = cause or first_cause(self.faults)

    def got_to(self, iteration: int) -> None:
        """The training has reached this iteration in the last cycle."""
        self.reached = iteration

    def saved(self, iteration: int | None) -> None:
        """The last checkpoint is of this iteration; None = it is not known."""
        self.checkpoint = -1 if iteration is None else iteration

    def failed(self, cycle: int, lasted_s: float, restarts: bool, now: float) -> None:
        """A cycle has failed for `cause`; with `restarts` a restart begins."""
        assert self.cause is not None
        self.advice.failed(cycle, self.cause, lasted_s)
        if restarts:
            first = self._last.get(self.cause) if cycle == self._last_cycle else None
            at_s, told = (
                (now, headline(self.cause)) if first is None else (first.at_s, first.message)
            )
            self._open = RestartRecord(cycle, at_s, 0.0, told[:_MESSAGE_CHARS], ran_s=lasted_s)
        self._mark(self.cause, cycle, now)

    def _mark(self, cause: RankFault, cycle: int, now: float) -> None:
        """When the last cycle failed, and when the node of its first cause gave the last sign of life: a check that
        fails after a hang does not tell that, the hang does."""
        known = self._last if cycle == self._last_cycle else {}
        first_at = min((one.at_s for one in known.values()), default=now)
        signs = [
            one.at_s - max(0.0, fault.silent_s)
            for fault, one in known.items()
            if _place(fault) == _place(cause)
        ]
        sign_at = min(signs, default=first_at - max(0.0, cause.silent_s))
        self.marks = (cycle, first_at, sign_at)
        if self._open is not None:
            self._open = replace(self._open, detect_s=max(0.0, first_at - sign_at))

    def cause_known(self, verdict: JudgedCause, elsewhere: bool, restarts: bool) -> None:
        """All faults of the cycle are here: this one caused the restart that is under way, perhaps on other nodes. Not
        `restarts`: none follows."""
        cause = verdict.cause
        self.cause, self._open = cause, self._open if restarts else None
        if self._open is not None:
            self._open = replace(
                self._open,
                cause=headline(cause)[:_MESSAGE_CHARS],
                rank=cause.rank,
                fingerprint=verdict.fingerprint,
                host=cause.host,
                infra_rank=cause.infra_rank,
                exit_code=cause.exit_code,
                iteration=self.reached,
                checkpoint=self.checkpoint,
                elsewhere=elsewhere,
                alone=verdict.alone,
                alike=verdict.alike,
            )
            self._mark(cause, self._open.cycle, self._open.at_s)

    def moved(self, hosts: tuple[str, ...]) -> None:
        """These nodes of the restart that is under way have lost their places."""
        if self._open is not None:
            self._open = replace(self._open, elsewhere=True, replaced=hosts)

    def cycle_began(
        self, history: History, promoted: list[str], now: float, memory: int = -1
    ) -> tuple[History, str]:
        """A plan is sent: the history that it carries, and how long the restart took, to end a sentence. `promoted`:
        hosts with a new group rank. `memory`: iteration that all ranks have there; -1 = none."""
        self._promoted = (self._promoted + promoted)[:_TOLD_HOSTS]
        self.faults = {}
        self.reached = -1
        if self._open is not None:
            self._open = replace(self._open, memory=memory)
        took = self._close(now)
        return self.complete(history), took

    def loaded(self, told: Loaded) -> bool:
        """What the ranks of the cycle after the last restart have loaded; whether that is worth a sentence."""
        last = self._restarts[-1] if self._restarts else None
        if last is not None and last.cycle == told.cycle - 1:
            self._restarts[-1] = replace(
                last,
                memory=told.iteration,
                source=told.source,
                resumed=told.message,
            )
        return bool(told.message)

    def _close(self, now: float) -> str:
        """The restart that is under way, if there is one, is over."""
        done, self._open = self._open, None
        if done is None:
            return ""
        down_s = now - done.at_s
        self._down_s += down_s
        if len(self._restarts) < LISTED:
            self._restarts.append(replace(done, down_s=down_s))
        return f"; {down_s:.2f} s after the fault"

    def build(self, history: History, cycle: int, now: float) -> JobReport:
        """The report, at the end of the job, whose last cycle was `cycle`, without account."""
        self._close(now)
        return self.so_far(history, cycle, now, LISTED)

    def so_far(self, history: History, cycle: int, now: float, most: int) -> JobReport:
        """The report of a job that runs, without account: the last `most` (>= 1) entries of each list. A restart under
        way counts. O(most)."""
        history = self._summed(history)
        last = list(self._last.values())[-most:]
        under_way = (
            () if self._open is None else (replace(self._open, down_s=now - self._open.at_s),)
        )
        return JobReport(
            duration_s=self.at_s(now),
            cycles=cycle + 1,
            restarts_used=history.restarts_used,
            restarts=(*self._last_restarts(most), *self._in_job_time(under_way)),
            faults=tuple(self._in_job_time(self._faults[-most:])),
            faults_not_listed=self._not_listed,
            last_faults=tuple(self._in_job_time(last)),
            lost_nodes=history.lost,
            excluded_nodes=tuple(dict.fromkeys(key.partition("@")[2] for key in history.excluded)),
            spares_used=history.promoted,
            down_s=history.down_s,
            stragglers=tuple(self._in_job_time(self._stragglers)),
        )


def _place(fault: RankFault) -> tuple[int, str]:
    return fault.infra_rank, fault.host


def _amount(history: History) -> tuple[float, ...]:
    """Which of two histories of a job tells more."""
    return len(history.restarts), history.down_s, history.began_s
