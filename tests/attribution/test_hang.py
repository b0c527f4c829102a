"""Which rank the others wait for, from what all ranks do at the moment of a hang."""

import time

import pytest

from nvrx_slurm.core.attribution.hang import compare
from nvrx_slurm.core.attribution.raised import failing_line
from nvrx_slurm.core.attribution.verdict import judge
from nvrx_slurm.declared import replace
from nvrx_slurm.types import Blame, Collective, Confidence, FaultKind, RankEvidence, RankFault

pytestmark = pytest.mark.fast


REDUCE = ("/v/site-packages/torch/distributed/distributed_c10d.py:2800 in all_reduce", "/w/train.py:40 in step")
BARRIER = ("/v/site-packages/torch/distributed/distributed_c10d.py:4700 in barrier", "/w/train.py:55 in save")
SLEEP = ("/w/train.py:33 in load",)
READ = ("/usr/lib/python3.11/codecs.py:322 in decode", "/w/data.py:12 in __next__")


def waits(rank, frames=REDUCE):
    return RankEvidence(rank, rank // 2, f"n{rank // 2}", "S", frames=frames, silent_s=3.0)


def job(count, *others):
    """`count` ranks that wait, but for those given."""
    given = {evidence.rank: evidence for evidence in others}
    others_wait = (Collective("0", 7, "nccl:all_reduce [[4]]", True),)
    return [given.get(rank) or replace(waits(rank), collectives=others_wait) for rank in range(count)]


def named(verdict):
    return [culprit.rank for culprit in verdict.culprits]


@pytest.mark.parametrize(
    ("culprit", "blame", "word"),
    [
        (replace(waits(5, SLEEP), moves=False), Blame.USER, "sleeps"),
        (replace(waits(5, SLEEP), state="R", moves=True), Blame.USER, "moves"),
        (replace(waits(5, READ), state="S"), Blame.USER, "/w/data.py:12"),
        (replace(waits(5), state="T"), Blame.UNKNOWN, "stopped"),
        (replace(waits(5), state="D", frames=()), Blame.STORAGE, "kernel"),
        (replace(waits(5), state="Z"), Blame.UNKNOWN, "dead"),
        (replace(waits(5), state="", frames=()), Blame.UNKNOWN, "does not answer"),
        (waits(5, BARRIER), Blame.USER, "/w/train.py:55"),  # it skipped a collective
        (replace(waits(5), collectives=(Collective("0", 6, "nccl:all_reduce [[4]]", False),)), Blame.USER, "number 7"),
        (
            replace(waits(5), collectives=(Collective("0", 7, "nccl:broadcast [[4]]", True),)),
            Blame.USER,
            "nccl:broadcast",
        ),
    ],
)
@pytest.mark.parametrize("count", [8, 16])
def test_one_rank_is_named(culprit, blame, word, count):
    verdict = compare(job(count, culprit))
    assert named(verdict) == [5] and verdict.node == ((2, "n2") if culprit.state else None)
    assert verdict.blame is blame and word in verdict.why


def test_one_rank_waits_and_several_wait():
    stopped = replace(waits(1), state="T")
    assert "; 1 rank waits for it" in compare(job(2, stopped)).why
    assert "; 2 ranks wait for it" in compare(job(3, stopped)).why


LATE = (Collective("0", 6, "nccl:all_reduce [[4]]", False), Collective("1", 2, "nccl:broadcast [[4]]", True))
LOADS = waits(2, SLEEP)  # in its own code
# The rank that is named, and those that do not wait as the others do.
NAMED = {
    "one that is absent": (5, LOADS, replace(waits(5), state="D", frames=())),
    "not one that has just shown life": (5, replace(LOADS, silent_s=0.1), waits(5, SLEEP)),
    "not a late one that waits in another group": (2, LOADS, replace(waits(3), collectives=LATE)),
    "not one that waits in a collective and reads a page": (2, LOADS, replace(waits(5), state="D")),
    "not one on a node that does not answer": (2, LOADS, replace(waits(5), state="", frames=())),
}


@pytest.mark.parametrize("case", NAMED)
def test_of_several_it_is(case):
    rank, *others = NAMED[case]
    assert named(compare(job(8, *others))) == [rank]


def test_a_rank_without_a_stack_whose_collective_is_open_waits():
    """The main thread of a rank with CUDA waits in the script, for example in `loss.item()`."""
    ranks = [replace(rank, frames=("/w/train.py:44 in step",)) for rank in job(8)]
    ranks[2] = LOADS
    assert named(compare(ranks)) == [2]


def test_with_two_ranks_the_one_outside_the_collective_is_named():
    verdict = compare(job(2, waits(1, SLEEP)))
    assert named(verdict) == [1] and verdict.confidence is Confidence.LIKELY


@pytest.mark.parametrize(
    "ranks",
    [
        job(8),  # all in one collective: the network
        [waits(rank, SLEEP) for rank in range(8)],  # all in their own code
        [waits(rank, REDUCE if rank % 2 else BARRIER) for rank in range(8)],  # each half waits for the other
        [],
    ],
)
def test_nothing_is_invented(ranks):
    verdict = compare(ranks)
    assert verdict.culprits == () and verdict.node is None and verdict.confidence is Confidence.GUESS


def test_culprits_on_several_nodes_name_no_node():
    verdict = compare(job(16, waits(2, SLEEP), waits(9, SLEEP)))
    assert named(verdict) == [2, 9] and verdict.node is None


def test_many_outliers_are_a_guess():
    slow = [waits(rank, SLEEP) for rank in range(6)]
    assert compare(job(8, *slow)).confidence is Confidence.GUESS


def test_10_000_ranks():
    """The target is a second with collection; this bound only catches what is quadratic."""
    ranks = job(10_000, waits(4711, SLEEP))
    began_s = time.monotonic()
    assert named(compare(ranks)) == [4711]
    assert time.monotonic() - began_s < 5.0


def test_ranks_in_several_groups_wait_for_each_other():
    ranks = [replace(waits(r), collectives=(Collective(str(r % 3), 1, "gloo:all_reduce", True),)) for r in range(6)]
    verdict = compare(ranks)
    assert verdict.culprits == () and "3 groups" in verdict.why


def test_the_culprit_is_the_first_cause_with_its_place_and_a_fingerprint():
    verdict = compare(job(8, replace(waits(5, SLEEP), local_rank=1, pid=77, log="/l/rank_5.err")))
    culprit = verdict.fault
    assert culprit is not None and (culprit.rank, culprit.pid, culprit.log) == (5, 77, "/l/rank_5.err")
    assert failing_line(culprit.traceback) == "/w/train.py:33"
    victim = RankFault(FaultKind.HANG, "n0", 0, 0, message="no heartbeat")
    judged = judge([culprit, victim], 4)
    assert judged is not None and judged.cause is culprit and judged.blame is Blame.USER
    assert culprit.finding is not None and len(culprit.finding.fingerprint) == 16
