"""What two looks at all ranks prove: no pause is taken for a hang."""

import pytest

from nvrx_slurm.core.account.rank_times import RankTimes
from nvrx_slurm.core.attribution.standstill import proven, where
from nvrx_slurm.core.rank.stalls import Stalls
from nvrx_slurm.declared import replace
from nvrx_slurm.types import RankEvidence

pytestmark = pytest.mark.fast

WAITS = ("/x/site-packages/torch/distributed/c10d.py:9 in all_reduce", "/w/train.py:4 in step")
BACKWARD = ("/x/site-packages/torch/autograd/graph.py:9 in _engine_run_backward", "/w/train.py:5 in step")
OWN = ("/w/train.py:7 in load",)
BETWEEN_S = 30.0


def seen(rank=1, frames=OWN, state="S", ticks=5, bytes_moved=9, sent=3):
    return RankEvidence(rank, 0, "n0", state, frames=frames, work=2 * (ticks, bytes_moved, sent))


ONE, OTHERS = seen(), (seen(7, WAITS), seen(8, WAITS))


def one(**second):
    """Two looks: how rank 1 is different at the second one, while two others wait."""
    return (ONE, *OTHERS), (seen(**second), *OTHERS)


def still(*ranks):
    return ranks, ranks


HANGS = {
    "one sleeps": one(),
    "a thread of it works a little": one(ticks=35),
    "a watchdog of it asks the store": one(sent=50_003),
    "one is stopped": still(seen(frames=(), state="T"), *OTHERS),
    "all wait": still(*OTHERS),
    "others wait in backward": still(ONE, seen(7, BACKWARD)),
    "one is traced, all compute": still(ONE, seen(2, (), "t")),
}
GO_ON = {
    "one computes": one(ticks=65),
    "one reads": one(bytes_moved=10),
    "one downloads": one(sent=100_003),
    "one is somewhere else": one(frames=("/w/train.py:8 in load",)),
    "one is blocked in the kernel": still(seen(state="D"), *OTHERS),
    "one has no stack": still(seen(frames=()), *OTHERS),
    "one was stopped": ((seen(state="T"), *OTHERS), (seen(frames=WAITS), *OTHERS)),
    "one sleeps below backward": still(seen(7, (*OWN, *BACKWARD))),
    "those that wait have gone on": ((ONE, OTHERS[0], seen(8, (*WAITS, "x:1 in y"))), (ONE, *OTHERS)),
    "all are in own code": still(ONE, seen(2)),
    "all wait on the processor": (OTHERS, (seen(7, WAITS, "R", 65), OTHERS[1])),
    "one did not answer": ((ONE, *OTHERS), OTHERS),
    "a node did not answer": one(frames=(), state=""),
    "nothing was seen": still(),
    "its work is not known": still(replace(ONE, work=()), *OTHERS),
}


@pytest.mark.parametrize("case", [*HANGS, *GO_ON])
def test_only_a_standstill_is_a_hang(case):
    assert proven(*(HANGS | GO_ON)[case], BETWEEN_S) is (case in HANGS)


def test_where_all_are_is_one_line():
    slow = seen(2, ("/w/save.py:1 in save",), "D")
    first, second = one(ticks=65)
    assert where((*first, slow), (*second, slow), BETWEEN_S) == (
        "rank 7 waits at /w/train.py:4 in step, as 1 more; rank 1 computes at /w/train.py:7 in load; "
        "rank 2 is blocked in the kernel at /w/save.py:1 in save"
    )


def test_a_limit_is_learned_and_doubles_until_the_next_step():
    stalls = Stalls(10.0, 600.0)

    def at(now_s, steps=50, longest_s=3.0, last_s=1000.0):
        times = RankTimes(0.0, now_s, last_s=last_s, beats=steps, longest_s=longest_s)
        return bool(stalls.judge(0, times))

    assert [*map(at, (1599.0, 1600.0, 1605.0, 2199.0, 2201.0))] == [False, True, False, False, True]
    assert [*map(at, (3401.0, 3402.0))] == [False, True]
    assert [at(4100.0, 51, last_s=3500.0), at(9000.0, 19), at(9000.0, longest_s=0.0)] == [True, False, False]
    assert [at(1600.0, 60, 61.0), at(1610.0, 60, 61.0)] == [False, True]
    stalls = Stalls(10.0, 0.0)
    assert not at(9000.0)
