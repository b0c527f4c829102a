"""What happened in the job: every fault and restart, bounded, for the last lines and for result.json."""

from __future__ import annotations

from dataclasses import replace

from nvrx_slurm.core.job.restarts import headline
from nvrx_slurm.types import FaultKind, FaultRecord, History, JobReport, RankFault, RestartRecord

LISTED = 1000  # faults and restarts that are listed one by one
_MESSAGE_CHARS = 400


class ReportBuilder:
    """Collects while the job runs. Times are monotonic seconds; the report has seconds since `now`, the start."""

    def __init__(self, now: float) -> None:
        self._started_at = now
        self._cycles = 0
        self._faults: list[FaultRecord] = []
        self._not_listed = 0
        self._last: dict[RankFault, FaultRecord] = {}  # of the cycle of the latest fault, each once
        self._last_cycle = -1
        self._restarts: list[RestartRecord] = []
        self._open: RestartRecord | None = None  # the restart that is under way
        self._down_s = 0.0
        self._lost: dict[str, None] = {}
        self._promoted: dict[str, None] = {}

    def add_fault(self, fault: RankFault, cycle: int, now: float) -> None:
        """A fault has become known."""
        if cycle != self._last_cycle:
            self._last, self._last_cycle = {}, cycle
        if fault in self._last:
            return
        record = FaultRecord(
            at_s=now - self._started_at,
            cycle=cycle,
            kind=fault.kind,
            host=fault.host,
            infra_rank=fault.infra_rank,
            rank=fault.rank,
            local_rank=fault.local_rank,
            exit_code=fault.exit_code,
            message=headline(fault)[:_MESSAGE_CHARS],
        )
        if len(self._faults) < LISTED:
            self._faults.append(record)
        else:
            self._not_listed += 1
        if len(self._last) < LISTED:
            self._last[fault] = record
        if fault.kind is FaultKind.NODE_LOST and fault.host and len(self._lost) < LISTED:
            self._lost[fault.host] = None

    def cycle_failed(self, cycle: int, cause: RankFault, now: float) -> None:
        """A restart begins."""
        self._open = RestartRecord(cycle, now - self._started_at, 0.0, headline(cause)[:_MESSAGE_CHARS])

    def cycle_began(self, promoted: list[str], now: float) -> float | None:
        """A plan is sent: the restart, if one was under way, is over. `promoted`: hosts with a new group rank.

        Returns how long the restart took (seconds).
        """
        self._cycles += 1
        self._promoted.update(dict.fromkeys(promoted))
        return self._close(now)

    def _close(self, now: float) -> float | None:
        done, self._open = self._open, None
        if done is None:
            return None
        down_s = now - self._started_at - done.at_s
        self._down_s += down_s
        if len(self._restarts) < LISTED:
            self._restarts.append(replace(done, down_s=down_s))
        return down_s

    def build(self, history: History, now: float) -> JobReport:
        """The report, at the end of the job."""
        self._close(now)
        return JobReport(
            duration_s=now - self._started_at,
            cycles=self._cycles,
            restarts_used=history.restarts_used,
            restarts=tuple(self._restarts),
            faults=tuple(self._faults),
            faults_not_listed=self._not_listed,
            last_faults=tuple(self._last.values()),
            lost_nodes=tuple(self._lost),
            excluded_nodes=tuple(dict.fromkeys(key.partition("@")[2] for key in history.excluded)),
            spares_used=tuple(self._promoted),
            down_s=self._down_s,
        )
