"""The decorator around a training function."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.call import with_wrapper, wrapper_parameters
from nvrx_slurm.inprocess.exception import RestartAbort
from nvrx_slurm.inprocess.log import setup_logger
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.plugins.health_check import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    ChainedNVLHealthCheck,
    HealthCheck,
)
from nvrx_slurm.inprocess.resources import Resources
from nvrx_slurm.inprocess.runner import Runner

F = TypeVar("F", bound=Callable[..., Any])

logger = logging.getLogger(__name__)
_active = threading.Lock()  # held while a wrapped function is being called in this process


def _with_hint(init: F) -> F:
    @functools.wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        if "rank_filter" in given:  # a parameter of older NVRx
            raise TypeError(
                "inprocess.Wrapper has no argument rank_filter; make the filter part of rank_assignment"
            )
        init(self, *args, **given)

    return checked  # type: ignore[return-value]


class Wrapper(Arguments):
    """Calls the wrapped function again, in the same processes, after a fault on any rank, until it returns on all.

    All arguments are keyword-only, with NVRx's names and defaults. `store_factory(**store_kwargs)` makes a
    `torch.distributed.Store`; see `store.StoreMixin` for one of your own. Times are `datetime.timedelta`. In
    `monitor_process_logfile` and `monitor_process_pidfile` (absolute paths) `{rank}` is the initial rank. With
    `enabled=False` the function is returned unchanged.

    Raises TypeError for a value of the wrong type and ValueError for timeouts that contradict each other.
    """

    __init__ = _with_hint(Arguments.__init__)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.enabled:
            setup_logger()
            object.__setattr__(self, "restart_health_check", _with_hardware(self.health_check))

    def __call__(self, fn: F) -> F:
        """The wrapped function. Raises TypeError unless `fn` is a plain function."""
        _check_function(fn)
        if not self.enabled:
            return fn
        names = wrapper_parameters(fn)

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not _active.acquire(blocking=False):
                # not an Exception, which would only cause another restart
                raise RestartAbort(
                    "a wrapped function was called inside a wrapped function; only one may be wrapped"
                )
            try:
                _check_caller()
                _say_what_the_launcher_does()
                return _call(self, fn, names, args, kwargs)
            finally:
                _active.release()

        return wrapped  # type: ignore[return-value]


def _call(
    arguments: Arguments,
    fn: Callable[..., Any],
    names: list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    resources = Resources(arguments)
    gc.freeze()  # torch has a million objects: no collection at a restart shall go through them
    try:
        runner = Runner(arguments, resources)
        args, kwargs = with_wrapper(fn, names, runner.call_wrapper, args, kwargs)
        return runner.run(lambda: fn(*args, **kwargs))
    finally:
        gc.unfreeze()
        resources.close()


def _check_function(fn: Any) -> None:
    if not callable(fn) or inspect.isclass(fn):
        raise TypeError(f"inprocess.Wrapper wraps functions, not {fn!r}")
    kinds = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if any(is_kind(one) for is_kind in kinds for one in (fn, type(fn).__call__)):
        raise TypeError(
            f"{fn!r} is a generator or coroutine function; wrap a plain function that runs it to its end"
        )


def _check_caller() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "call the wrapped function in the main thread: signals and signs of life belong to it"
        )
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialized already; call init_process_group inside the wrapped function, since it"
            " has to be done anew in every iteration"
        )


@functools.cache  # once per process
def _say_what_the_launcher_does() -> None:
    """Under --restart-policy any-failed, in one rank of the first cycle. `node.workers` sets the variables."""
    if (os.environ.get("NVRX_CYCLE"), os.environ.get("RANK")) == (
        "0",
        "0",
    ) and "NVRX_BOARD" not in os.environ:
        logger.info(
            "exceptions and soft timeouts restart the function in process; a process that ends makes nvrx-run restart"
            " all ranks (with --restart-policy min-healthy and spare nodes the others would go on in process)"
        )


def _with_hardware(health_check: HealthCheck | None) -> HealthCheck | None:
    """Under a launcher (LOCAL_RANK is set) a restart also checks this rank's hardware; the user's check comes last."""
    local_rank = os.environ.get("LOCAL_RANK", "")
    if not local_rank.isdecimal():
        return health_check
    index = int(local_rank)
    hardware = (
        ChainedGPUHealthCheck(index),
        ChainedNVLHealthCheck(index),
        ChainedNicHealthCheck(index),
    )
    composed = Compose(*((health_check,) if health_check else ()), *hardware)
    assert isinstance(composed, HealthCheck)
    return composed
