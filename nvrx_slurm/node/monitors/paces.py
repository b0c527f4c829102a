"""How far the ranks of this node are, as their pages say: told to the coordinator every few seconds, and at their end.

It only shows this, so this message goes past the cores and their event logs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nvrx_slurm.core.account.rank_times import RankTimes
from nvrx_slurm.core.rank.stalls import Stalls
from nvrx_slurm.core.rank.watch import STEP_SECTION
from nvrx_slurm.node.monitors.monitors import RankMonitor
from nvrx_slurm.node.monitors.times import times_of, waits_of
from nvrx_slurm.types import Pace, Plan, RankPace, Window

if TYPE_CHECKING:
    from nvrx_slurm.node.workers.worker_spec import StartedWorker, WorkerSpec

EVERY_S, _FIRST_S = 5.0, 1.0
_NODES_PER_S = 100  # that tell the coordinator


class Paces:
    """Reads the pages of `monitors`. `alive`: the living workers by local rank, kept by the caller.

    `tell(pace)` sends to the coordinator. `doubt(local_rank, sentence)`: a worker makes no steps.
    """

    def __init__(
        self,
        monitors: Sequence[RankMonitor],
        spec: WorkerSpec,
        alive: Mapping[int, StartedWorker],
        tell: Callable[[Pace | Window], None],
        doubt: Callable[[int, str], None],
    ) -> None:
        self._monitors = monitors
        self._alive = alive
        self._tell = tell
        self._doubt = doubt
        self._sections = spec.sections
        self._is_wait = spec.is_wait
        self._window_s = spec.straggler_window_s
        self._limits = spec.step_timeout_factor, spec.step_timeout_s
        self._window_at = 0.0  # when the next one is told
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._seen: dict[int, tuple[int, float, float]] = {}  # by rank: steps, when the last one was, and pace
        self._plan: Plan | None = None  # of the workers that run
        self._last: list[RankPace] = []  # of those that have ended

    def times(self, local_rank: int, released_s: float) -> RankTimes:
        """How a worker has spent its time until now."""
        words = self._monitors[local_rank].words() if self._monitors else None
        now_s = self._loop.time()
        if words is None:
            return RankTimes(released_s, now_s)
        return times_of(words, self._sections, released_s, now_s)

    def ended(self, local_rank: int, worker: StartedWorker) -> RankTimes:
        """How a worker has spent its time. With the last one the coordinator hears how far all have come."""
        times = self.times(local_rank, worker.released_s)
        if times.init_s:
            self._last.append(self._pace(worker.where.rank, times))
        if self._plan is not None and self._last and not self._alive:
            self._tell(Pace(self._plan.term, self._plan.cycle, tuple(self._last)))
        return times

    def begin(self, plan: Plan) -> None:
        """The workers of this plan have started."""
        self.end()
        self._plan = plan
        self._last = []
        self._seen, self._stalls = {}, Stalls(*self._limits)
        self._window_at = 0.0
        self._wake(plan, _FIRST_S)

    def end(self) -> None:
        """Tell no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self, plan: Plan, after_s: float) -> None:
        self._timer = self._loop.call_later(after_s, self._read_pages, plan)

    def _read_pages(self, plan: Plan) -> None:
        alive = dict(self._alive)
        found = [(one.where.rank, self.times(local_rank, one.released_s)) for local_rank, one in alive.items()]
        if paces := [self._pace(rank, times) for rank, times in found if times.init_s]:
            self._tell(Pace(plan.term, plan.cycle, tuple(paces)))
        self._tell_window(plan)
        for local_rank, (rank, times) in zip(alive, found, strict=True):
            if doubted := self._stalls.judge(rank, times):
                self._doubt(local_rank, doubted)
        if self._monitors and alive:
            every_s = min(EVERY_S, self._window_s or EVERY_S)
            self._wake(plan, max(every_s, plan.active_nodes / _NODES_PER_S))

    def _tell_window(self, plan: Plan) -> None:
        """How long ranks have waited for each other."""
        now = self._loop.time()
        if not self._window_s or not self._monitors or now < self._window_at:
            return
        self._window_at = now + 0.9 * self._window_s
        told = ((one.where.rank, self._monitors[local_rank].words()) for local_rank, one in self._alive.items())
        read = {rank: waits_of(words, self._sections, self._is_wait) for rank, words in told if words is not None}
        if found := {rank: one for rank, one in read.items() if one is not None}:
            columns = zip(*((one.waits, one.waited_s, one.until_s) for one in found.values()), strict=True)
            self._tell(Window(plan.term, plan.cycle, tuple(found), *columns))

    def _pace(self, rank: int, times: RankTimes) -> RankPace:
        steps = max(times.beats, *(one.times for one in times.sections if one.name == STEP_SECTION), 0)
        before, before_s, step_s = self._seen.get(rank, (0, 0.0, times.pace_s))
        at_s = times.last_s or times.turn_s
        if 0 < before < steps:
            step_s = max(0.0, at_s - before_s) / (steps - before)
        if steps > before:
            self._seen[rank] = steps, at_s, step_s
        open_s = times.until_s - times.since_s if times.section else 0.0
        still_s = times.until_s - at_s if steps else 0.0
        return RankPace(rank, steps, step_s, times.section, open_s, still_s)
