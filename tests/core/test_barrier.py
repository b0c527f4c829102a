"""The verdict over what all ranks said at the barrier."""

import pytest

from nvrx_slurm.core.inprocess.barrier import Arrival, BarrierResult, Outcome, Status, barrier_result

pytestmark = pytest.mark.fast


GONE = Arrival(Status.TERMINATED)


def ready(rank, size, stand=Status.READY):
    return Arrival(stand, rank, size)


def test_words_and_verdicts_survive_the_store():
    for word in (GONE, ready(3, 8), ready(0, 1, Status.FINISHED)):
        assert Arrival.parse(str(word)) == word
    verdict = BarrierResult(Outcome.NEXT, frozenset({1, 2, 3, 9}), frozenset({7}), "rank 7: why\nindeed")
    assert BarrierResult.from_text(verdict.to_text()) == verdict


@pytest.mark.parametrize(
    "words, left_before, verdict",
    [
        ({i: ready(i, 3) for i in range(3)}, set(), BarrierResult(Outcome.NEXT)),
        # The ranks of the dead, 1 and 5, are found by elimination; 0 had left before.
        (
            {1: GONE, 2: ready(0, 4), 3: ready(3, 4), 5: GONE},
            {0},
            BarrierResult(Outcome.NEXT, frozenset({1, 2}), frozenset({0, 1, 5})),
        ),
        ({0: GONE, 1: GONE}, {2}, BarrierResult(Outcome.EMPTY, gone=frozenset({0, 1, 2}), why="why")),
    ],
)
def test_verdicts(words, left_before, verdict):
    assert barrier_result(words, left_before, verdict.why) == verdict


def test_the_function_has_returned():
    assert barrier_result({0: ready(0, 2, Status.FINISHED), 1: GONE}, ()).outcome is Outcome.FINISHED


@pytest.mark.parametrize("other, why", [(ready(1, 3), "world size ([2, 3])"), (ready(0, 2), "do not agree")])
def test_ranks_that_disagree_are_refused(other, why):
    verdict = barrier_result({0: ready(0, 2), 1: other}, ())
    assert verdict.outcome is Outcome.REFUSED and why in verdict.why
