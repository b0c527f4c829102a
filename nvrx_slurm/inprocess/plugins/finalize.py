"""Bringing the process into a state from which the wrapped function can be called again."""

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
    """Called after a fault, when process groups are gone and before the health check.

    Raising means that this process cannot be used again: the wrapper raises it on.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Clean up what the wrapped function left; returns `state`."""


class ThreadedFinalize(Finalize):
    """Calls `fn(*args, **kwargs)` in a thread, for at most `timeout`; works with and without CUDA.

    Where CUDA is in use the thread has the caller's current device. What `fn` raises is raised here. Raises
    exception.TimeoutError if it takes longer; its thread is left behind then. TypeError for arguments of other
    types, ValueError for a timeout of 0 or less.
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
            raise TypeError(f"ThreadedFinalize: fn must be callable, not {fn!r}")
        if args is not None and not isinstance(args, (tuple, list)):
            raise TypeError(f"ThreadedFinalize: args must be a tuple, as ({args!r},), or None, not {args!r}")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"ThreadedFinalize: kwargs must be a dict or None, not {kwargs!r}")
        self.timeout = timeout
        self.fn = fn
        self.args = tuple(args or ())
        self.kwargs = dict(kwargs or {})

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`."""
        on_same_device = _on_current_device(lambda: self.fn(*self.args, **self.kwargs))
        name = getattr(self.fn, "__qualname__", repr(self.fn))
        try:
            bounded.call(on_same_device, self.timeout.total_seconds(), f"nvrx finalize: {name}")
        except bounded.Overrun:
            raise exception.TimeoutError(
                f"finalize: {name} did not return within {self.timeout.total_seconds():g} s"
            ) from None
        return state


def _on_current_device(fn: Callable[[], Any]) -> Callable[[], Any]:
    """`fn` for another thread: CUDA's current device is a thread's own, and a new thread starts with device 0."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return fn
    device = torch.cuda.current_device()

    def run() -> Any:
        torch.cuda.set_device(device)
        return fn()

    return run
