"""Initializers: called at the start of each iteration; may end the run."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nvrx_slurm.inprocess.checks import check_whole
from nvrx_slurm.inprocess.exception import RestartAbort
from nvrx_slurm.inprocess.state import FrozenState


class Initialize(ABC):
    """Base of all initializers. Called at the start of each iteration, including the first.

    An Exception starts another iteration; any other BaseException ends the wrapper on this rank.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Check or prepare this iteration; returns `state`."""


class RetryController(Initialize):
    """End the run after a number of iterations, or when too few ranks are left.

    `max_iterations`: largest number of calls of the function (None: no limit). `min_world_size`: least number of
    healthy ranks, active and spare; `min_active_world_size`: of active ranks. A call raises RestartAbort with the
    reason. The constructor raises TypeError unless they are ints, ValueError for one that is too low.
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
        for size, kind, least, name in (
            (state.world_size, "healthy", self.min_world_size, "min_world_size"),
            (state.active_world_size, "active", self.min_active_world_size, "min_active_world_size"),
        ):
            if size is not None and size < least:
                raise RestartAbort(f"not tried again: {size} {kind} ranks are left, {name}={least}")
        return state
