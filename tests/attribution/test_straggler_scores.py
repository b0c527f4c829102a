"""NVRx's straggler detection by its names, in one process; tests/node/test_agent_stragglers.py has several ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from time import perf_counter

import pytest

from nvrx_slurm.attribution import straggler
from nvrx_slurm.attribution.straggler import CallableId, Detector, Statistic, StragglerId
from nvrx_slurm.fault_tolerance import RankMonitorClient
from nvrx_slurm.monitor.page import TIMES
from nvrx_slurm.testing import standalone_monitor

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    Detector.shutdown()


def work(took_ms: float) -> None:
    until_s = perf_counter() + took_ms / 1000
    while perf_counter() < until_s:
        pass


def test_scores_refer_to_the_fastest_median_so_far() -> None:
    Detector.initialize(node_name="here")
    reports = []
    for took_ms in (4.0, 40.0):
        for _ in range(3):
            with Detector.detection_section("a", profile_cuda=False):
                work(took_ms)
        reports.append(Detector.generate_report())
    first, second = reports
    assert first is not None and second is not None
    assert first.section_individual_perf_scores == first.section_relative_perf_scores == {"a": {0: 1.0}}
    assert not any(first.identify_stragglers().values())
    assert second.section_individual_perf_scores["a"][0] < 0.5 and second.rank_to_node == {0: "here"}
    found = second.identify_stragglers()
    assert found.pop("straggler_sections_individual") == {"a": {StragglerId(0, "here")}}
    assert not any(found.values()) and not any(second.identify_stragglers(section_indiv_threshold=0.0).values())
    summary = second.local_section_summaries["a"]
    assert summary[Statistic.NUM] == 3 and 40.0 <= summary[Statistic.MIN] <= summary[Statistic.MED]
    assert (second.gpu_relative_perf_scores, second.local_kernel_summaries) == ({}, {})


def test_what_counts_as_an_entry() -> None:
    """Every second one here, none that raises; without a name it is that of the place."""
    Detector.initialize(["individual_perf_scores"], gather_on_rank0=False, profiling_interval=2)
    for number in range(6):
        with Detector.detection_section():
            work(0.01)
        with pytest.raises(KeyError), Detector.detection_section("raises"):
            raise KeyError(number)
    report = Detector.generate_report()
    assert report is not None and report.section_relative_perf_scores == {}
    ((name, summary),) = report.local_section_summaries.items()
    assert summary[Statistic.NUM] == 3 and name.startswith(f"{__file__}:")
    empty = Detector.generate_report()
    assert empty is not None and empty.local_section_summaries == {}


def test_callables_are_sections_until_the_end() -> None:
    class Model:
        def forward(self, x: int) -> int:
            return x + 1

    model, original = Model(), Model.forward
    Detector.initialize()
    Detector.wrap_callables([CallableId(Model, "forward", ignored_args=("self",))])
    Detector.wrap_callables([CallableId(model, "forward"), CallableId(math, "sqrt")])
    assert (model.forward(1), math.sqrt(4.0)) == (2, 2.0)
    report = Detector.generate_report()
    assert report is not None
    assert set(report.local_section_summaries) == {f"{__name__}.Model.forward", "Model.forward", "math.sqrt"}
    Detector.shutdown()
    assert Model.forward is original and math.sqrt.__name__ == "sqrt" and not hasattr(math.sqrt, "__wrapped__")


def test_a_report_after_each_interval() -> None:
    """The first 17 steps show how many steps that is."""
    Detector.initialize(report_time_interval=0.02)
    reported = []
    for _ in range(60):
        work(2.0)
        report = Detector.generate_report_if_interval_elapsed()
        assert (report is not None) is Detector.is_interval_elapsed()
        reported.append(report is not None)
    assert not any(reported[:16]) and any(reported[16:])


def test_wrong_order_and_instances_are_refused() -> None:
    with pytest.raises(RuntimeError):
        Detector()
    for call in (Detector.generate_report, Detector.detection_section("a").__enter__):
        with pytest.raises(RuntimeError, match="initialize"):
            call()
    Detector.initialize()
    with pytest.raises(RuntimeError, match="already"):
        Detector.initialize()
    assert {*straggler.__all__} == {"CallableId", "Detector", "Report", "Statistic", "StragglerId"}


def test_the_launcher_sees_the_sections_that_it_knows() -> None:
    """Also one that the program has opened by itself, which stays its own."""
    with standalone_monitor(rank_section_timeouts={"backward": 60.0}):
        client = RankMonitorClient()
        client.init_workload_monitoring()
        Detector.initialize()
        for name in ("backward", "unknown", "backward"):
            with Detector.detection_section(name):
                pass
        assert client._words[TIMES] == 2
        client.start_section("backward")
        with Detector.detection_section("backward"):
            pass
        client.end_section("backward")
        assert client._words[TIMES] == 3
        with Detector.detection_section("backward"):
            client.shutdown_workload_monitoring()
