"""RetryController's limits, one by one and at their edges."""

from __future__ import annotations

import pytest

from nvrx_slurm.inprocess.exception import RestartAbort
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.plugins.initialize import Initialize, RetryController
from nvrx_slurm.inprocess.state import FrozenState, State


def state(iteration: int = 0, world_size: int = 4, active: int | None = 2) -> FrozenState:
    return State(rank=0, world_size=world_size, active_world_size=active, iteration=iteration).freeze()


def test_without_limits_nothing_ends() -> None:
    retry = RetryController()
    assert isinstance(retry, Initialize)
    for one in (state(iteration=10**6), state(world_size=1, active=1), state(active=None)):
        assert retry(one) is one


@pytest.mark.parametrize(
    ("limits", "good", "bad", "why"),
    [
        ({"max_iterations": 3}, state(iteration=2), state(iteration=3), "max_iterations=3 tries are used up"),
        ({"min_world_size": 4}, state(), state(world_size=3), "3 healthy ranks are left, min_world_size=4"),
        ({"min_active_world_size": 2}, state(), state(active=1), "1 active ranks are left, min_active_world_size=2"),
    ],
)
def test_each_limit_ends_the_run_with_its_reason(limits, good, bad, why) -> None:
    retry = RetryController(**limits)
    assert retry(good) is good
    with pytest.raises(RestartAbort, match=why):
        retry(bad)


def test_the_end_is_no_exception_that_would_restart() -> None:
    try:
        RetryController(max_iterations=1)(state(iteration=1))
    except BaseException as error:
        assert not isinstance(error, Exception)
    else:
        pytest.fail("nothing was raised")


def test_it_composes_with_other_initializers() -> None:
    class Count(Initialize):
        calls = 0

        def __call__(self, state: FrozenState) -> FrozenState:
            self.calls += 1
            return state

    count = Count()
    both = Compose(count, RetryController(max_iterations=1))
    assert isinstance(both, Initialize)
    both(state())
    with pytest.raises(RestartAbort):
        both(state(iteration=1))
    assert count.calls == 1


@pytest.mark.parametrize("limits", [{"max_iterations": 0}, {"min_world_size": -1}, {"min_active_world_size": -1}])
def test_limits_that_cannot_be_are_refused(limits) -> None:
    with pytest.raises(ValueError, match="RetryController"):
        RetryController(**limits)
