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
    for one in (state(iteration=10**6), state(world_size=1, active=1), state(active=None)):
        assert RetryController()(one) is one


@pytest.mark.parametrize(
    ("limits", "good", "bad", "why"),
    [
        ({"max_iterations": 3}, state(iteration=2), state(iteration=3), "max_iterations=3"),
        ({"min_world_size": 4}, state(), state(world_size=3), "3 healthy .* min_world_size=4"),
        ({"min_active_world_size": 2}, state(), state(active=1), "1 active .* min_active_world_size=2"),
    ],
)
def test_each_limit_ends_the_run_with_its_reason(limits, good, bad, why) -> None:
    """With an exception that is no Exception, which would restart; also in a composition."""
    retry, later = RetryController(**limits), RetryController()
    assert retry(good) is good
    for one in (retry, Compose(later, retry)):
        assert isinstance(one, Initialize)
        with pytest.raises(RestartAbort, match=why) as raised:
            one(bad)
        assert not isinstance(raised.value, Exception)


@pytest.mark.parametrize("limits", [{"max_iterations": 0}, {"min_world_size": -1}, {"min_active_world_size": -1}])
def test_limits_that_cannot_be_are_refused(limits) -> None:
    with pytest.raises(ValueError, match="RetryController"):
        RetryController(**limits)
