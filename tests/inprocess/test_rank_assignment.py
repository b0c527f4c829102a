"""Rank assignments that every rank computes for itself, and what the wrapper makes of a composition."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.inprocess import rank_assignment as ra
from nvrx_slurm.inprocess.exception import InternalError, RestartAbort
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.state import Mode, State

pytestmark = pytest.mark.process


def after(assignment, states, died):
    """The states of those who are left, in the order they had; `died` counts ranks."""
    left = []
    for state in states:
        try:
            left.append(ra.assign(assignment, ra.RankAssignmentCtx(state, None, died)))
        except ra.RankDiscarded:
            assert state.rank in died
    return left


def world(size):
    return [State(rank=rank, world_size=size) for rank in range(size)]


def active(states):
    return [state.active_rank for state in states]


def test_spares_come_in_as_ranks_die():
    assignment = Compose(ra.ActiveWorldSizeDivisibleBy(2), ra.MaxActiveWorldSize(5), ra.ShiftRanks())
    states = after(assignment, world(8), set())
    assert active(states) == [0, 1, 2, 3, None, None, None, None]
    assert {state.mode for state in states[4:]} == {Mode.INACTIVE}
    states = after(assignment, states, {0, 2, 7})
    assert [(s.initial_rank, s.active_rank) for s in states] == [(1, 0), (3, 1), (4, 2), (5, 3), (6, None)]


@settings(max_examples=50)
@given(st.integers(1, 30), st.data(), st.integers(1, 5), st.none() | st.integers(1, 30))
def test_any_deaths(size, data, divisor, most):
    """Numbers are 0..n-1 exactly once, sizes agree, filters hold, whatever dies in three rounds."""
    renumber = data.draw(st.sampled_from([ra.ShiftRanks(), ra.FillGaps()]))
    filters = [ra.ActiveWorldSizeDivisibleBy(divisor), ra.MaxActiveWorldSize(most)]
    assignment = Compose(*filters, renumber)
    states = world(size)
    for _ in range(3):
        died = data.draw(st.sets(st.integers(0, len(states) - 1)))
        expected = min(len(states) - len(died), most or size) // divisor * divisor
        if expected == 0:
            survivors = [state for state in states if state.rank not in died]
            for state in survivors:
                with pytest.raises(RestartAbort, match="leaves no rank active"):
                    ra.assign(assignment, ra.RankAssignmentCtx(state, None, died))
            return
        order = [state.initial_rank for state in sorted(states, key=lambda s: s.rank) if state.rank not in died]
        states = after(assignment, states, died)
        assert sorted(state.rank for state in states) == list(range(len(order)))
        assert sorted(rank for rank in active(states) if rank is not None) == list(range(expected))
        assert {(state.world_size, state.active_world_size) for state in states} == {(len(order), expected)}
        if isinstance(renumber, ra.ShiftRanks):
            assert [s.initial_rank for s in sorted(states, key=lambda s: s.rank)] == order


def keyed():
    return ra.FilterCountGroupedByKey(key_or_fn="all", condition=bool)


@pytest.mark.parametrize(
    "members, sentence",
    [
        ((ra.ActivateAllRanks(), ra.MaxActiveWorldSize(2)), "cannot be combined"),
        ((ra.ShiftRanks(), ra.MaxActiveWorldSize(2)), r"list MaxActiveWorldSize\(2\) left"),
        ((ra.Tree([ra.Layer()]), ra.ShiftRanks()), "cannot be composed"),
        ((keyed(), ra.MaxActiveWorldSize(2)), "list ShiftRanks"),
        ((keyed(), ra.ShiftRanks()), "list ShiftRanks"),
    ],
)
def test_what_cannot_work_is_refused_when_the_wrapper_is_made(members, sentence):
    with pytest.raises(ValueError, match=sentence):
        ra.with_defaults(Compose(*members))


class Nothing(ra.RankAssignment):
    """A user's own that leaves it all to others."""

    activates = renumbers = False

    def __call__(self, ctx):
        return ctx


@pytest.mark.parametrize(
    "make, completed",
    [
        (keyed, "ActivateAllRanks, ShiftRanks, FilterCountGroupedByKey"),
        (
            lambda: Compose(ra.ActiveWorldSizeDivisibleBy(2), Compose(ra.MaxActiveWorldSize(4), keyed())),
            "ActiveWorldSizeDivisibleBy, MaxActiveWorldSize, ShiftRanks, FilterCountGroupedByKey",
        ),
        (Nothing, "ActivateAllRanks, ShiftRanks, Nothing"),
        (lambda: Compose(ra.ActivateAllRanks(), Nothing()), "ActivateAllRanks, ShiftRanks, Nothing"),
    ],
)
def test_what_a_composition_leaves_out_is_done_by_default(make, completed):
    made = ra.with_defaults(make())
    assert isinstance(made, Compose) and isinstance(made, ra.RankAssignment)
    assert ", ".join(type(member).__name__ for member in made.members()) == completed


def test_others_are_taken_as_they_are():
    complete = Compose(ra.MaxActiveWorldSize(2), ra.FillGaps()), ra.Tree([ra.Layer()]), Own(lambda ctx: ctx)
    assert all(ra.with_defaults(assignment) is assignment for assignment in complete)


class Own(ra.RankAssignment):
    def __init__(self, answer):
        self.answer = answer

    def __call__(self, ctx):
        return self.answer(ctx)


def changed(**fields):
    return Own(lambda ctx: replace(ctx, state=replace(ctx.state, **fields)))


@pytest.mark.parametrize(
    "assignment, error, sentence",
    [
        (Own(lambda ctx: None), InternalError, "returned None, not a RankAssignmentCtx"),
        (ra.ActivateAllRanks(), InternalError, "left 1 terminated ranks in the world of 3"),
        (changed(mode=Mode.TERMINATED, world_size=2), ra.RankDiscarded, "terminated rank 1"),
        (changed(mode=Mode.ACTIVE, world_size=2, active_world_size=1, active_rank=1), InternalError, "fit together"),
        (changed(mode=Mode.INACTIVE, world_size=2), InternalError, "fit together"),
        (changed(mode=Mode.INACTIVE, world_size=2, active_world_size=3), InternalError, "fit together"),
        (changed(mode=Mode.INACTIVE, world_size=2, active_world_size=0), RestartAbort, "of 2 healthy ranks"),
    ],
)
def test_results_that_no_iteration_can_begin_with(assignment, error, sentence):
    ctx = ra.RankAssignmentCtx(State(rank=1, world_size=3), None, {2})
    with pytest.raises(error, match=sentence):
        ra.assign(assignment, ctx)


@pytest.mark.parametrize(
    "assignment", [changed(world_size=2), changed(mode=Mode.ACTIVE, world_size=2), changed(active_rank=1, world_size=2)]
)
def test_a_rank_that_is_not_deactivated_is_active(assignment):
    """D19."""
    new = ra.assign(assignment, ra.RankAssignmentCtx(State(rank=1, world_size=3), None, {2}))
    assert (new.mode, new.active_rank, new.active_world_size) == (Mode.ACTIVE, 1, 2)


def test_the_assignment_sees_no_active_ranks_of_the_last_iteration():
    seen = []
    own = Own(lambda ctx: seen.append(ctx.state) or ra.ActivateAllRanks()(ctx))
    state = State(rank=0, world_size=1, active_rank=0, active_world_size=1, mode=Mode.ACTIVE)
    ra.assign(own, ra.RankAssignmentCtx(state, None, set()))
    assert (seen[0].active_rank, seen[0].active_world_size, seen[0].mode) == (None, None, Mode.ACTIVE)
    assert state.active_rank == 0
