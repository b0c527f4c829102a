"""NVLink: links, their errors since an earlier look, and the fabric."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from gpu_harness import Examiner, GpuNode, examiners
from hypothesis import given
from hypothesis import strategies as st
from recorded import Node

from nvrx_slurm.health import cache
from nvrx_slurm.health.check import Verdict
from nvrx_slurm.health.checks import counters
from nvrx_slurm.health.checks.nvlink import judge_links, learn_links

F, U, N, P = Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_APPLICABLE, Verdict.PASS


@pytest.fixture(scope="module")
def examiner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examiner]:
    yield from examiners(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def node(dgx: Node, examiner: Examiner) -> GpuNode:
    return GpuNode(dgx, examiner)


@pytest.mark.parametrize(
    ("facts", "expect", "verdict", "text"),
    [
        (["link.3.17 0"], {}, F, "GPU 3 (GPU-3000) has NVLink 17 down"),
        (["link.3.17 -1"], {}, P, "8 GPUs have their NVLinks up (143)"),
        (["link.3.17 -1"], {"nvlinks": 18}, F, "GPU 3 (GPU-3000) has 17 NVLinks up instead of 18"),
        (["link 0"], {}, P, "8 GPUs have their NVLinks up (0)"),  # no bridge
        (["link 0"], {"nvlinks": 18}, F, "has 0 NVLinks up instead of 18"),
        (["links 0"], {}, N, "no GPU of this process tells its NVLink"),
        (["nvmlDeviceGetNvLinkState.3.2 15"], {}, U, "GPU 3: GPU is lost"),
    ],
)
def test_links(node: GpuNode, facts: list[str], expect: dict[str, object], verdict: Verdict, text: str) -> None:
    node.say(*facts)
    said = node.found("nvlink", **expect)
    assert said[0] is verdict and text in said[1], said


@pytest.mark.parametrize(
    ("facts", "verdict", "text"),
    [
        (["fabric_state.3 2"], F, "GPU 3 (GPU-3000) is not registered with the NVLink fabric (in progress)"),
        (["fabric_state.3 9"], F, "(state 9)"),
        (["fabric_status.3 999"], F, "failed to register with the NVLink fabric (NVML error 999)"),
        (["fabric_health.3 0x1"], F, "has a degraded NVLink fabric (bandwidth)"),
        (["fabric_health.3 0x210"], F, "(route unhealthy, incorrect configuration)"),
        (["fabric_health 0x1AA"], P, "8 GPUs are registered"),  # everything is said to be well
        (["fabric_state 0"], N, "tells its fabric state"),
        (["nvmlDeviceGetGpuFabricInfoV 3"], N, "tells its fabric state"),
    ],
)
def test_the_fabric(node: GpuNode, facts: list[str], verdict: Verdict, text: str) -> None:
    node.say(*facts)
    said = node.found("nvlink-fabric")
    assert said[0] is verdict and text in said[1], said


def test_errors_count_from_the_first_look_on(node: GpuNode) -> None:
    node.say("field208 500")
    assert node.found("nvlink-errors") == (P, "0 errors lately")
    node.say("field208 500", "field208.3.5 1400", "field215.3.5 200", "field208.1.0 501")
    assert node.found("nvlink-errors") == (F, "GPU 3 NVLink 5 counted 1100 errors")
    assert node.found("nvlink-errors", nvlink_errors_max=1100) == (P, "1101 errors lately")
    assert node.found("nvlink-errors", nvlink_errors_max=0) == (
        F,
        "GPU 3 NVLink 5 counted 1100 errors, GPU 1 NVLink 0 counted 1 errors",
    )
    node.say("field208 500", "field208.3.5 7")  # the GPU was reset
    said = node.found("nvlink-errors", nvlink_errors_max=1100)
    assert said == (P, "1101 errors lately; GPU 1 NVLink 0, GPU 3 NVLink 5 began anew")
    node.say("field208 500", "field208.3.5 9")  # two more since
    assert node.found("nvlink-errors", nvlink_errors_max=1101) == (F, "GPU 3 NVLink 5 counted 1102 errors")
    node.node.write("/proc/sys/kernel/random/boot_id", "another\n")
    node.say("field208 90000")
    assert node.found("nvlink-errors", nvlink_errors_max=0) == (P, "0 errors lately")


def test_errors_of_older_gpus(node: GpuNode) -> None:
    """Ampere: replays and recoveries by fields of their own."""
    old = ["links 12", "result208 3", "result215 3"]
    node.say(*old, "field46 3", "field53 1")
    assert node.found("nvlink-errors") == (P, "0 errors lately")
    node.say(*old, "field46.2 9", "field53 1")
    assert node.found("nvlink-errors", nvlink_errors_max=5) == (F, "GPU 2 NVLink 0 counted 6 errors")
    node.say("result208 3", "result215 3")
    assert node.found("nvlink-errors") == (N, "no GPU of this process tells its NVLink errors")


def test_links_are_learned_if_all_have_as_many() -> None:
    up = {link: link < 4 for link in range(6)}
    assert learn_links({"GPU 0": up, "GPU 1": up}) == {"nvlinks": 4}
    assert learn_links({"GPU 0": up, "GPU 1": {0: True}}) == {}
    assert judge_links({"GPU 0": up}, {"nvlinks": 4})[0] is P


# --- counters, pure -------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**64), st.integers(0, 2**20), st.sampled_from([8, 16, 32, 64]))
def test_a_counter_that_wraps_rose_at_least_that_much(start: int, by: int, width: int) -> None:
    before = start % 2**width
    now = (before + by) % 2**width
    assert 0 <= (counters.increase(before, now) or 0) <= by
    if before + by < 2**width:
        assert counters.increase(before, now) == by


@pytest.mark.parametrize("width", [16, 32, 64])
def test_a_counter_that_wraps_near_its_end_rose(width: int) -> None:
    assert counters.increase(2**width - 3, 5) == 5
    assert counters.increase(2**width - 1, 0) == 0


@pytest.mark.parametrize(
    ("before", "now"), [(5000, 4999), (5000, 0), (1, 0), (65535, 65534), (2**32 - 1, 2**31), (2**64, 7)]
)
def test_a_counter_that_goes_back_begins_anew(before: int, now: int) -> None:
    assert counters.increase(before, now) is None


@given(st.integers(0, 2**40), st.integers(0, 2**20), st.integers(0, 2**20))
def test_a_counter_that_was_reset_rose_at_most_by_what_it_shows(before: int, lost: int, after: int) -> None:
    assert (counters.increase(before, after) or 0) <= lost + after or after >= before


LOOKS = st.lists(st.tuples(st.integers(1, 50), st.dictionaries(st.sampled_from("abc"), st.integers(0, 9))), max_size=30)


@given(LOOKS, st.integers(1, 200))
def test_rises_are_summed_within_the_window(looks: list[tuple[int, dict[str, int]]], window: int) -> None:
    """Against the definition; names come and go, counters go backwards."""
    kept, now_s = counters.NOTHING, 0
    seen: dict[str, int] = {}
    rises: list[tuple[int, str, int]] = []
    for apart, values in looks:
        now_s += apart
        kept = counters.advance(kept, values, now_s, window)
        rises += [(now_s, name, counters.increase(seen[name], n) or 0) for name, n in values.items() if name in seen]
        seen |= values
    expected = {name: sum(by for at, who, by in rises if who == name and now_s - at <= window) for name in "abc"}
    assert counters.risen(kept) == {name: by for name, by in expected.items() if by}


@given(st.integers(1, 600))
def test_what_is_kept_is_bounded_and_loses_nothing(looks: int) -> None:
    kept = counters.NOTHING
    for look in range(looks):
        kept = counters.advance(kept, {"a": look, "b": 2 * look}, float(look), 1e9)
    assert len(kept.rises) <= counters.MAX_RISES
    assert counters.parsed(counters.plain(kept)) == kept
    assert counters.risen(kept) == ({"a": looks - 1, "b": 2 * looks - 2} if looks > 1 else {})


def test_the_file_of_a_big_node_stays_within_its_limit() -> None:
    """8 GPUs with as many NVLinks as NVML knows, all of them with errors all the time."""
    names = [f"GPU {gpu} NVLink {link}" for gpu in range(8) for link in range(36)]
    kept = counters.NOTHING
    for look in range(5):
        kept = counters.advance(kept, {name: look * 10**6 for name in names}, 10.0**6 + look, 3600)
    assert len(json.dumps(counters.plain(kept))) < cache.MAX_FILE_BYTES - 200
