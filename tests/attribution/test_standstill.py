"""What two looks at all ranks prove: no pause is taken for a hang."""

from __future__ import annotations

import pytest

from nvrx_slurm.core.account.rank_times import RankTimes
from nvrx_slurm.core.attribution.standstill import proven, where
from nvrx_slurm.core.rank.stalls import Stalls
from nvrx_slurm.types import RankEvidence

pytestmark = pytest.mark.fast

WAITS = ("/x/site-packages/torch/distributed/c10d.py:9 in all_reduce", "/w/train.py:4 in step")
BACKWARD = ("/x/site-packages/torch/autograd/graph.py:9 in _engine_run_backward", "/w/train.py:5 in step")
OWN = ("/w/train.py:7 in load",)
BETWEEN_S = 30.0


def seen(
    rank: int, frames: tuple[str, ...] = WAITS, state: str = "S", work: tuple[int, ...] = (5, 9, 3, 5, 9, 3)
) -> RankEvidence:
    return RankEvidence(rank, 0, "n0", state, frames=frames, work=work)


def others(*ranks: RankEvidence) -> list[RankEvidence]:
    """With two that wait."""
    return [seen(7), *ranks, seen(8)]


BUSY, BYTES, AT_WORK = (5 + 60, 9, 3, 65, 9, 3), (5, 10, 3, 5, 10, 3), (35, 9, 3, 35, 9, 3)
ASKS, DOWNLOADS = (5, 9, 50_003, 5, 9, 50_003), (5, 9, 100_003, 5, 9, 100_003)
# Name: the first look, the second one, whether they prove a hang.
CASES = {
    "one sleeps": (others(seen(1, OWN)), others(seen(1, OWN)), True),
    "a thread of it works a little": (others(seen(1, OWN)), others(seen(1, OWN, "S", AT_WORK)), True),
    "all wait": (others(), others(), True),
    "others wait in backward": ([seen(1, OWN), seen(7, BACKWARD)], [seen(1, OWN), seen(7, BACKWARD)], True),
    "one sleeps below backward": ([seen(7, (*OWN, *BACKWARD))] * 2, [seen(7, (*OWN, *BACKWARD))] * 2, False),
    "one is stopped": (others(seen(1, (), "T")), others(seen(1, (), "T")), True),
    "one is traced, all compute": ([seen(1, OWN), seen(2, (), "t")], [seen(1, OWN), seen(2, (), "t")], True),
    "one computes": (others(seen(1, OWN)), others(seen(1, OWN, "S", BUSY)), False),
    "one reads": (others(seen(1, OWN)), others(seen(1, OWN, "S", BYTES)), False),
    "one downloads": (others(seen(1, OWN)), others(seen(1, OWN, "S", DOWNLOADS)), False),
    "a watchdog of it asks the store": (others(seen(1, OWN)), others(seen(1, OWN, "S", ASKS)), True),
    "one is somewhere else": (others(seen(1, OWN)), others(seen(1, ("/w/train.py:8 in load",))), False),
    "one is blocked in the kernel": (others(seen(1, OWN, "D")), others(seen(1, OWN, "D")), False),
    "those that wait have gone on": (
        [*others(seen(1, OWN)), seen(9, (*WAITS, "x:1 in y"))],
        [*others(seen(1, OWN)), seen(9)],
        False,
    ),
    "all are in own code": ([seen(1, OWN), seen(2, OWN)], [seen(1, OWN), seen(2, OWN)], False),
    "all wait on the processor": (others(), [seen(7, WAITS, "R", BUSY), seen(8)], False),
    "one has no stack": (others(seen(1, ())), others(seen(1, ())), False),
    "one was stopped": (others(seen(1, OWN, "T")), others(seen(1, WAITS)), False),
    "one did not answer": (others(seen(1, OWN)), others(), False),
    "a node did not answer": (others(seen(1, OWN)), others(seen(1, (), "")), False),
    "nothing was seen": ([], [], False),
    "its work is not known": (others(seen(1, OWN, "S", ())), others(seen(1, OWN, "S", ())), False),
}


@pytest.mark.parametrize("case", CASES)
def test_only_a_standstill_is_a_hang(case: str) -> None:
    first, second, is_hang = CASES[case]
    assert proven(first, second, BETWEEN_S) is is_hang


def test_where_all_are_is_one_line() -> None:
    second = [*others(seen(1, OWN, "S", BUSY)), seen(2, ("/w/save.py:1 in save",), "D")]
    said = where([*others(seen(1, OWN)), seen(2, ("/w/save.py:1 in save",), "D")], second, BETWEEN_S)
    assert said == (
        "rank 7 waits at /w/train.py:4 in step, as 1 more; rank 1 computes at /w/train.py:7 in load; "
        "rank 2 is blocked in the kernel at /w/save.py:1 in save"
    )


def test_a_limit_is_learned_and_doubles_until_the_next_step() -> None:
    stalls = Stalls(10.0, 600.0)

    def at(now_s: float, steps: int = 50, longest_s: float = 3.0, last_s: float = 1000.0) -> bool:
        times = RankTimes(0.0, now_s, last_s=last_s, beats=steps, longest_s=longest_s)
        return bool(stalls.judge(0, times))

    assert [at(1599.0), at(1600.0), at(1605.0), at(2199.0), at(2201.0)] == [False, True, False, False, True]
    assert [at(3401.0), at(3402.0)] == [False, True]
    assert [at(4100.0, 51, last_s=3500.0), at(9000.0, 19), at(9000.0, longest_s=0.0)] == [True, False, False]
    assert [at(1600.0, 60, 61.0), at(1610.0, 60, 61.0)] == [False, True]
    assert not Stalls(10.0, 0.0).judge(0, RankTimes(0.0, 9000.0, last_s=1.0, beats=50, longest_s=1.0))
