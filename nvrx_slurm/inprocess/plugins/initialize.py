"""The start of every iteration: may another one be tried?"""

from __future__ import annotations

from abc import ABC, abstractmethod

from nvrx_slurm.inprocess.checks import check_whole
from nvrx_slurm.inprocess.exception import RestartAbort
from nvrx_slurm.inprocess.state import FrozenState


class Initialize(ABC):
    """Called at the start of every iteration, the first one too.

    An Exception raised here starts another iteration; any other BaseException ends the wrapper.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Check or prepare this iteration; returns `state`."""


class RetryController(Initialize):
    """Ends the run when it was tried often enough, or when too few ranks are left.

    `max_iterations`: the function is called at most this many times (None: no limit). `min_world_size`: healthy
    ranks, active and reserve, that must be left; `min_active_world_size`: active ones. Raises RestartAbort with the
    reason; TypeError for what is no whole number, ValueError for one that is too low.
    """

    def __init__(
        self, max_iterations: int | None = None, min_world_size: int = 1, min_active_world_size: int = 1
    ) -> None:
        if max_iterations is not None:
            check_whole("RetryController: max_iterations", max_iterations, 1)
        check_whole("RetryController: min_world_size", min_world_size, 0)
        check_whole("RetryController: min_active_world_size", min_active_world_size, 0)
        self.max_iterations = max_iterations
        self.min_world_size = min_world_size
        self.min_active_world_size = min_active_world_size

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`."""
        if self.max_iterations is not None and state.iteration >= self.max_iterations:
            raise RestartAbort(f"not tried again: max_iterations={self.max_iterations} tries are used up")
        if state.world_size < self.min_world_size:
            raise RestartAbort(
                f"not tried again: {state.world_size} healthy ranks are left, min_world_size={self.min_world_size}"
            )
        active = state.active_world_size
        if active is not None and active < self.min_active_world_size:
            raise RestartAbort(
                f"not tried again: {active} active ranks are left, min_active_world_size={self.min_active_world_size}"
            )
        return state
