"""Initializers, finalizers, completions and terminations: the user's steps around the wrapped function."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Mapping
from typing import Any

from nvrx_slurm.inprocess import exception
from nvrx_slurm.inprocess.checks import check_time, check_whole
from nvrx_slurm.inprocess.plugins.compose import PlugIn
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.system import bounded


class Initialize(PlugIn):
    """Base of all initializers. Called at the start of each iteration, including the first.

    An Exception starts another iteration; any other BaseException ends the wrapper on this rank.
    """


class RetryController(Initialize):
    """End the run after a number of iterations, or when too few ranks are left.

    `max_iterations`: largest number of calls of the function (None: no limit). `min_world_size`: least number of
    healthy ranks, active and spare; `min_active_world_size`: of active ranks. A call raises RestartAbort with the
    reason. The constructor raises TypeError unless they are ints, ValueError for one that is too low.
    """

    def __init__(
        self,
        max_iterations: int | None = None,
        min_world_size: int = 1,
        min_active_world_size: int = 1,
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
            raise exception.RestartAbort(
                f"not tried again: max_iterations={self.max_iterations} tries are used up"
            )
        for size, kind, least, name in (
            (state.world_size, "healthy", self.min_world_size, "min_world_size"),
            (
                state.active_world_size,
                "active",
                self.min_active_world_size,
                "min_active_world_size",
            ),
        ):
            if size is not None and size < least:
                raise exception.RestartAbort(
                    f"not tried again: {size} {kind} ranks are left, {name}={least}"
                )
        return state


class Finalize(PlugIn):
    """Base of all finalizers. Called after a fault: after the abort and before the health check.

    An exception means that this process cannot continue: the wrapper raises it, and the rank leaves.
    """


class ThreadedFinalize(Finalize):
    """Call `fn(*args, **kwargs)` in a thread, for at most `timeout`; works with and without CUDA.

    If CUDA is in use, the thread has the caller's current device. Raises the exceptions of `fn`, and
    exception.TimeoutError after `timeout`; the thread is then abandoned. The constructor raises TypeError for arguments
    of other types, ValueError for a timeout of 0 or less.
    """

    def __init__(
        self,
        timeout: datetime.timedelta,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] | None = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        check_time("ThreadedFinalize: timeout", timeout)
        if not callable(fn):
            raise TypeError(f"ThreadedFinalize: fn must be a function, not {fn!r}")
        if isinstance(args, str):
            raise TypeError(
                f"ThreadedFinalize: args must be a tuple, as ({args!r},), or None, not {args!r}"
            )
        self.timeout = timeout
        self.fn = fn
        self.args = tuple(args or ())
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`."""
        torch = sys.modules.get("torch")
        # CUDA's current device belongs to a thread; a new thread starts with device 0.
        device = (
            torch.cuda.current_device()
            if torch is not None and torch.cuda.is_initialized()
            else None
        )

        def run() -> None:
            if torch is not None and device is not None:
                torch.cuda.set_device(device)
            self.fn(*self.args, **self.kwargs)

        name, timeout_s = (
            getattr(self.fn, "__qualname__", repr(self.fn)),
            self.timeout.total_seconds(),
        )
        try:
            bounded.call(run, timeout_s, f"nvrx finalize: {name}")
        except bounded.Overrun:
            raise exception.TimeoutError(
                f"finalize: {name} did not return within {timeout_s:g} s"
            ) from None
        return state


class Completion(PlugIn):
    """Base of all completions. Called once on each rank, before the wrapper returns."""


class Terminate(PlugIn):
    """Base of all terminations. Called once on a rank that leaves, just before the wrapper raises its exception."""
