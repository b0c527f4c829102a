"""NVRx's straggler detection, by its names: each rank times sections, and a report compares the medians of all ranks.

    from nvrx_slurm.attribution import straggler

    straggler.Detector.initialize()
    for batch in loader:
        with straggler.Detector.detection_section("forward"):
            ...
        report = straggler.Detector.generate_report_if_interval_elapsed()
        if report is not None:
            print(report.identify_stragglers())
    straggler.Detector.shutdown()

A section whose name the launcher knows (`--ft-waiting-sections`, `--ft-rank-section-timeouts`) is also one of the
process's RankMonitorClient: the launcher's own rule, which uses no collective, then sees it, too. GPU scores need
CUPTI: those containers are empty here. Imports no torch: it uses the one that the script has imported.
"""

from __future__ import annotations

import inspect
import json
import math
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise
from statistics import fmean, median_low, stdev
from time import monotonic, perf_counter_ns, sleep
from typing import Any, NoReturn

from nvrx_slurm.monitor import distributed
from nvrx_slurm.monitor.client import RankMonitorClient, current_client
from nvrx_slurm.monitor.transport import RankMonitorClientError

__all__ = ["CallableId", "Detector", "Report", "Statistic", "StragglerId"]

RELATIVE, INDIVIDUAL = "relative_perf_scores", "individual_perf_scores"
_MOST_TIMES = 8192  # of a section between two reports
_SETTLE_S = 0.05
_TIMED_STEPS = 16  # from whose median the number of steps between two reports follows

Scores = Mapping[str, Mapping[int, float]]  # by section, by rank


class Statistic(Enum):
    """The keys of a summary."""

    MIN = auto()
    MAX = auto()
    MED = auto()
    AVG = auto()
    STD = auto()
    NUM = auto()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class StragglerId:
    """A slow rank."""

    rank: int
    node: str


@dataclass(frozen=True)
class CallableId:
    """A function for `Detector.wrap_callables`: `name` of a module, class or object. The rest has no effect."""

    obj: object
    name: str
    arg_filter_fn: Callable[[inspect.BoundArguments], bool] | None = None
    extra_args_fn: Callable[[inspect.BoundArguments], dict[str, Any]] | None = None
    ignored_args: tuple[str, ...] | None = None

    def __str__(self) -> str:
        of = self.obj
        owner = (
            f"{of.__module__}.{of.__name__}"
            if inspect.isclass(of)
            else getattr(of, "__name__", type(of).__name__)
        )
        return f"{owner}.{self.name}"


@dataclass(frozen=True)
class Report:
    """Scores from 0 to 1: the reference's median time, divided by that of the rank.

    Relative scores refer to the fastest rank, individual ones to the fastest median that this rank has ever had. NaN:
    this rank has not timed that section. With `gather_on_rank0`, the one report has all ranks, else each its own.
    Times are in milliseconds.
    """

    gpu_relative_perf_scores: Mapping[int, float]
    section_relative_perf_scores: Scores
    gpu_individual_perf_scores: Mapping[int, float]
    section_individual_perf_scores: Scores
    rank_to_node: Mapping[int, str]
    local_section_summaries: Mapping[str, Mapping[Statistic, float]]
    local_kernel_summaries: Mapping[str, Any]
    generate_report_elapsed_time: float
    gather_on_rank0: bool
    rank: int | None

    def identify_stragglers(
        self,
        gpu_rel_threshold: float = 0.75,
        section_rel_threshold: float = 0.75,
        gpu_indiv_threshold: float = 0.75,
        section_indiv_threshold: float = 0.75,
    ) -> dict[str, Any]:
        """The ranks whose score is below a threshold, as sets of StragglerId; those of sections by section."""

        def below(scores: Mapping[int, float], threshold: float) -> set[StragglerId]:
            return {
                StragglerId(rank, self.rank_to_node[rank])
                for rank, one in scores.items()
                if one < threshold
            }

        def by_section(scores: Scores, threshold: float) -> dict[str, set[StragglerId]]:
            found = {name: below(of_ranks, threshold) for name, of_ranks in scores.items()}
            return {name: slow for name, slow in found.items() if slow}

        return {
            "straggler_gpus_relative": below(self.gpu_relative_perf_scores, gpu_rel_threshold),
            "straggler_gpus_individual": below(
                self.gpu_individual_perf_scores, gpu_indiv_threshold
            ),
            "straggler_sections_relative": by_section(
                self.section_relative_perf_scores, section_rel_threshold
            ),
            "straggler_sections_individual": by_section(
                self.section_individual_perf_scores, section_indiv_threshold
            ),
        }


@dataclass
class _TimedSection:
    entries: int = 0
    best_ms: float = math.inf  # the smallest median so far
    times_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_MOST_TIMES))


class Detector:
    """Times sections of this rank. One per process: all methods are of the class."""

    initialized = False
    scores_to_compute: Sequence[str] = ()
    gather_on_rank0 = True
    profiling_interval = 1
    report_time_interval = 60.0
    _node = ""
    _group: Any = None
    _sections: dict[str, _TimedSection] = {}
    _wrapped: list[tuple[object, str, Any]] = []
    _steps, _steps_between = 0, 0  # 0 = not known yet
    _has_shared = False
    _step_ends: list[float] = []

    def __new__(cls) -> NoReturn:
        raise RuntimeError("Detector is not instantiated: call its class methods")

    @classmethod
    def initialize(
        cls,
        scores_to_compute: Sequence[str] | str = "all",
        gather_on_rank0: bool = True,
        profiling_interval: int = 1,
        report_time_interval: float = 60,
        node_name: str | None = None,
        process_group: Any = None,
    ) -> None:
        """Begin. `profiling_interval`: time only each n-th entry of a section; `process_group`: None = the default one.

        Raises RuntimeError if it has begun already.
        """
        if cls.initialized:
            raise RuntimeError("Detector is initialized already")
        cls.scores_to_compute = (
            (RELATIVE, INDIVIDUAL) if scores_to_compute == "all" else scores_to_compute
        )
        cls.gather_on_rank0, cls.profiling_interval = gather_on_rank0, profiling_interval
        cls.report_time_interval, cls._group = report_time_interval, process_group
        cls._node = node_name or socket.gethostname()
        cls._sections, cls._wrapped, cls._step_ends, cls._steps, cls._steps_between = (
            {},
            [],
            [],
            0,
            0,
        )
        cls.initialized, cls._has_shared = True, False

    @classmethod
    def shutdown(cls) -> None:
        """End, and restore wrapped callables. Takes 0.05 s after a report that ranks have shared."""
        cls.restore_original_callables()
        if cls._has_shared:
            # Threads of gloo need the GIL to free what was sent. If the process group is destroyed now, while DDP holds
            # it, torch 2.13 waits for them with the GIL held: for ever.
            sleep(_SETTLE_S)
        cls.initialized = False

    @classmethod
    @contextmanager
    def detection_section(
        cls, name: str | None = None, profile_cuda: bool = True
    ) -> Iterator[None]:
        """Time what is inside. Without a name, it is FILE:LINE of the `with`. `profile_cuda` has no effect.

        What ends with an exception does not count. Raises RuntimeError before initialize().
        """
        cls._need_begin()
        if name is None:
            caller = sys._getframe(2)  # the one between is contextlib's
            name = f"{caller.f_code.co_filename}:{caller.f_lineno}"
        section = cls._sections.setdefault(name, _TimedSection())
        is_timed = section.entries % cls.profiling_interval == 0
        section.entries += 1
        monitor = _begin_monitored(name)
        began_ns = perf_counter_ns()
        try:
            yield
            if is_timed:
                section.times_ms.append((perf_counter_ns() - began_ns) / 1e6)
        finally:
            if monitor is not None:
                with suppress(RankMonitorClientError):  # it was shut down inside
                    monitor.end_section(name)

    @classmethod
    def wrap_callables(cls, callable_ids: Sequence[CallableId], profile_cuda: bool = True) -> None:
        """Make each call of these a section, called str(callable_id), until shutdown()."""
        for one in callable_ids:
            original = getattr(one.obj, one.name)
            cls._wrapped.append((one.obj, one.name, original))
            setattr(one.obj, one.name, cls.detection_section(str(one))(original))

    @classmethod
    def restore_original_callables(cls) -> None:
        """Undo wrap_callables()."""
        while cls._wrapped:
            setattr(*cls._wrapped.pop())

    @classmethod
    def generate_report(cls) -> Report | None:
        """Compare, and begin anew. With `gather_on_rank0`, the other ranks get None.

        A collective call of all ranks, unless only individual scores are computed and nothing is gathered.
        """
        cls._need_begin()
        began_ns = perf_counter_ns()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # what the sections have launched belongs to their steps
        timed = {name: section for name, section in cls._sections.items() if section.times_ms}
        summaries = {name: _summary(section.times_ms) for name, section in timed.items()}
        medians = {name: summary[Statistic.MED] for name, summary in summaries.items()}
        for name, section in timed.items():
            section.best_ms = min(section.best_ms, medians[name])
            section.times_ms.clear()
        rank, others = distributed.place(cls._group)
        mine = rank, cls._node, medians, {name: section.best_ms for name, section in timed.items()}
        told = [mine]
        if others and (RELATIVE in cls.scores_to_compute or cls.gather_on_rank0):
            cls._has_shared = True
            told = [
                json.loads(one) for one in distributed.texts_of_all(json.dumps(mine), cls._group)
            ]
        if cls.gather_on_rank0 and rank:
            return None
        shown = told if cls.gather_on_rank0 else [mine]
        names = dict.fromkeys(name for _, _, times_ms, _ in shown for name in times_ms)
        fastest = {
            name: min(times_ms.get(name, math.inf) for _, _, times_ms, _ in told) for name in names
        }
        relative = {
            name: {who: _score(fastest, times_ms, name) for who, _, times_ms, _ in shown}
            for name in names
        }
        individual = {
            name: {who: _score(best, times_ms, name) for who, _, times_ms, best in shown}
            for name in names
        }
        return Report(
            gpu_relative_perf_scores={},
            section_relative_perf_scores=relative if RELATIVE in cls.scores_to_compute else {},
            gpu_individual_perf_scores={},
            section_individual_perf_scores=individual
            if INDIVIDUAL in cls.scores_to_compute
            else {},
            rank_to_node={who: node for who, node, _, _ in shown},
            local_section_summaries=summaries,
            local_kernel_summaries={},
            generate_report_elapsed_time=(perf_counter_ns() - began_ns) / 1e6,
            gather_on_rank0=cls.gather_on_rank0,
            rank=rank,
        )

    @classmethod
    def generate_report_if_interval_elapsed(cls) -> Report | None:
        """generate_report() after about each `report_time_interval`, on all ranks in the same step; else None.

        Call it in each step on all ranks. Of the first 17 steps follows how many steps the interval has.
        """
        cls._need_begin()
        cls._steps += 1
        if not cls._steps_between:
            cls._step_ends.append(monotonic())
            if len(cls._step_ends) > _TIMED_STEPS:
                step_s = median_low([end - begin for begin, end in pairwise(cls._step_ends)])
                steps = [int(cls.report_time_interval / max(step_s, 1e-6))]
                most = (
                    distributed.largest(steps, cls._group)
                    if distributed.place(cls._group)[1]
                    else steps
                )
                cls._steps_between = max(*most, cls.profiling_interval, 1)
        return cls.generate_report() if cls.is_interval_elapsed() else None

    @classmethod
    def is_interval_elapsed(cls) -> bool:
        """Whether the last generate_report_if_interval_elapsed() made a report, on whichever rank."""
        return cls._steps_between > 0 and cls._steps % cls._steps_between == 0

    @classmethod
    def _need_begin(cls) -> None:
        if not cls.initialized:
            raise RuntimeError("Detector is not initialized: call Detector.initialize() first")


def _begin_monitored(name: str) -> RankMonitorClient | None:
    """The launcher sees this section, too. None: there is no monitor, or the section is open already."""
    client = current_client()
    if client is not None:
        try:
            client.start_section(name)
        except RankMonitorClientError:
            return None
    return client


def _score(reference: Mapping[str, float], times_ms: Mapping[str, float], name: str) -> float:
    took_ms = times_ms.get(name, math.nan)
    return reference.get(name, math.nan) / took_ms if took_ms else 1.0


def _summary(times_ms: Sequence[float]) -> dict[Statistic, float]:
    return {
        Statistic.MIN: min(times_ms),
        Statistic.MAX: max(times_ms),
        Statistic.MED: median_low(times_ms),
        Statistic.AVG: fmean(times_ms),
        Statistic.STD: stdev(times_ms) if len(times_ms) > 1 else math.nan,
        Statistic.NUM: len(times_ms),
    }
