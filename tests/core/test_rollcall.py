"""The verdict over what all ranks said at the barrier."""

from __future__ import annotations

from nvrx_slurm.core.inprocess.rollcall import Arrival, BarrierResult, Outcome, Status, call_roll

GONE = Arrival(Status.TERMINATED)


def ready(rank: int, size: int, stand: Status = Status.READY, before: tuple[int, int] = (-1, -1)) -> Arrival:
    return Arrival(stand, rank, size, *before)


def test_words_and_verdicts_survive_the_store() -> None:
    for word in (GONE, ready(3, 8), ready(0, 1, Status.FINISHED, (2, 4))):
        assert Arrival.parse(str(word)) == word
    verdict = BarrierResult(Outcome.NEXT, frozenset({1, 2, 3, 9}), frozenset({7}), True, "rank 7: why\nindeed")
    assert BarrierResult.from_text(verdict.to_text()) == verdict


def test_all_alive_go_on() -> None:
    assert call_roll({i: ready(i, 3) for i in range(3)}, ()) == BarrierResult(Outcome.NEXT)


def test_the_ranks_of_the_dead_are_found_by_elimination() -> None:
    """Initial ranks 1 and 5 are dead, whatever they had been assigned; 0 had left before."""
    words = {1: GONE, 2: ready(0, 4), 3: ready(3, 4), 5: GONE}
    assert call_roll(words, {0}) == BarrierResult(Outcome.NEXT, frozenset({1, 2}), frozenset({0, 1, 5}))


def test_a_rank_that_could_not_be_assigned_turns_all_back() -> None:
    words = {
        0: ready(0, 2, before=(0, 3)),
        1: GONE,
        2: ready(2, 3, Status.UNASSIGNED, before=(2, 3)),
    }
    assert call_roll(words, ()) == BarrierResult(Outcome.NEXT, frozenset({1}), frozenset({1}), again=True)


def test_nobody_is_left() -> None:
    assert call_roll({0: GONE, 1: GONE}, {2}, "why") == BarrierResult(
        Outcome.EMPTY, gone=frozenset({0, 1, 2}), why="why"
    )


def test_the_function_has_returned() -> None:
    words = {0: ready(0, 2, Status.FINISHED), 1: GONE}
    assert call_roll(words, ()).outcome is Outcome.FINISHED


def test_ranks_that_disagree_are_refused() -> None:
    sizes = call_roll({0: ready(0, 2), 1: ready(1, 3)}, ())
    assert sizes.outcome is Outcome.REFUSED and "world size ([2, 3])" in sizes.why
    twice = call_roll({0: ready(0, 2), 1: ready(0, 2)}, ())
    assert twice.outcome is Outcome.REFUSED and "do not agree" in twice.why
