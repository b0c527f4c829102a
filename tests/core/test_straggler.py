"""The detector of slow ranks on synthetic windows; seeded. benchmarks/stragglers.py is the long version."""

import pytest

from benchmarks.stragglers import Trace
from nvrx_slurm.core.straggler.detector import Detector, Reading, Seat, Where

pytestmark = pytest.mark.fast


NOISE = {"steps": (0.05 / 30**0.5, 0.01), "windows": (0.05, 0.0)}  # per window, and lasting


@pytest.mark.parametrize("noise", NOISE.values(), ids=NOISE)
def test_a_slow_rank_is_found_and_no_other(noise):
    """512 ranks with 5 % spread: nothing in 100 windows; 15 % slow: named, alone, within 6 windows."""
    assert not any(Trace(512, *noise, seed=1).windows(100))
    found = [[one for one in Trace(512, *noise, {100: 1.15}, seed).windows(6) if one] for seed in range(10)]
    named = [one.ranks for run in found for one in run]
    assert sum(ranks == (100,) for ranks in named) >= 0.95 * len(named)
    assert sum(bool(run) for run in found) >= 7


def test_noise_is_not_slowness():
    """With 8 % spread, many ranks are 10 % above the median in 3 of 4 windows by chance."""
    assert not any(Trace(512, 0.08, 0.0, seed=1).windows(60))


@pytest.mark.parametrize(
    "slow, where",
    [
        ([9], Where.RANK),
        (range(8, 16), Where.NODE),
        (range(16, 32), Where.SWITCH),
        (range(8, 24), Where.STAGE),  # two nodes of two switches
        (range(3, 64, 8), Where.STAGE),  # the same place on each node
        (range(32), Where.STAGE),
    ],
)
def test_where_it_is(slow, where):
    """Eight nodes with eight ranks, two for each switch."""
    last = list(Trace(64, 0.01, 0.0, dict.fromkeys(slow, 1.3), per_switch=2).windows(6))[-1]
    assert (last.where, last.ranks) == (where, tuple(slow))


def test_all_together():
    """The job becomes slower, and no rank more than the others."""
    trace = Trace(16, 0.01, 0.0)
    assert not any(trace.windows(20))
    trace.factor = 1.3
    found = [one for one in trace.windows(5) if one]
    assert {one.where for one in found} == {Where.ALL} and not found[-1].ranks


def test_what_is_no_reading_says_nothing():
    """Ranks can write anything; too few peers; one that begins anew."""
    detector = Detector([Seat("a", (0, 1, 2))], 1.0, 0.0)
    for now, one in enumerate(
        [Reading(5, 1.0, 2.0), Reading(50, 99.0, 3.0), Reading(1, 0.0, 9e9), Reading(9, -1.0, 0.0)]
    ):
        detector.told({0: one, 1: one, 7: one}, now * 2.0)
        assert detector.close(now * 2.0) is None and detector.windows == 0
