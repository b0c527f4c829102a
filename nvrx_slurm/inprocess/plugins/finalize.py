"""Finalizers: bring the process into a state in which the wrapped function can be called again."""

from __future__ import annotations

import datetime
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from nvrx_slurm.inprocess import exception
from nvrx_slurm.inprocess.checks import check_time
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.system import bounded


class Finalize(ABC):
    """Base of all finalizers. Called after a fault: after the abort and before the health check.

    An exception means that this process cannot continue: the wrapper raises it, and the rank leaves.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Clean up after the wrapped function; returns `state`."""


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
            raise TypeError(f"ThreadedFinalize: args must be a tuple, as ({args!r},), or None, not {args!r}")
        self.timeout = timeout
        self.fn = fn
        self.args = tuple(args or ())
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`."""
        torch = sys.modules.get("torch")
        # CUDA's current device belongs to a thread; a new thread starts with device 0.
        device = torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else None

        def run() -> None:
            if torch is not None and device is not None:
                torch.cuda.set_device(device)
            self.fn(*self.args, **self.kwargs)

        name, timeout_s = getattr(self.fn, "__qualname__", repr(self.fn)), self.timeout.total_seconds()
        try:
            bounded.call(run, timeout_s, f"nvrx finalize: {name}")
        except bounded.Overrun:
            raise exception.TimeoutError(f"finalize: {name} did not return within {timeout_s:g} s") from None
        return state
