"""Faults to inject into ranks, for tests of a training's recovery.

    from nvrx_slurm.testing import inject_fault

    inject_fault.inject_fault((inject_fault.Fault.SIGKILL,), num_faults=1, keep_alive=1, delay=5.0, seed=0)

All ranks call this with the same arguments; the seed decides which ranks are hit, without communication.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from enum import Enum, auto
from types import FrameType
from typing import Any

from nvrx_slurm.errors import UsageError

logger = logging.getLogger(__name__)

Callback = Callable[[], Any] | None
Handler = Callable[[float, Callback], Any]

_FOREVER_S = 1 << 30
_WEDGED_CYCLES = 1 << 62


class Fault(Enum):
    """Kinds of faults."""

    GPU_ERROR = auto()  # a kernel fails: the CUDA context is lost
    GPU_SLEEP = auto()  # a kernel that does not end
    # an InjectedException where the workload calls maybe_raise_workload_exception()
    WORKLOAD_EXC = auto()
    ASYNC_EXC = auto()  # an InjectedException anywhere in the main thread
    SIGNAL_EXC = auto()  # the same, out of a handler of SIGUSR1: it interrupts system calls too
    OS_ABORT = auto()
    LOCK_GIL = auto()  # no thread of this process can run Python any more
    SEGFAULT = auto()
    SIGINT = auto()
    SIGKILL = auto()
    SIGTERM = auto()
    SIGSTOP = auto()


class InjectedException(Exception):
    """The type of injected exceptions."""


def inject_fault(
    faults: Sequence[Fault | str],
    num_faults: int | tuple[int, int],
    keep_alive: int,
    delay: float | tuple[float, float],
    seed: int,
    callback: Callback = None,
) -> tuple[int, ...]:
    """Inject one of `faults` into `num_faults` ranks after `delay` seconds; both may be a range (least, most).

    Call it on all ranks alike. RANK and WORLD_SIZE (default 0 and 1) identify this rank. Ranks below `keep_alive` are
    never hit. `callback` is called on a rank just before its fault. Returns the ranks that are hit. Raises UsageError
    for impossible numbers or an unknown fault.
    """
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    fewest, most = num_faults if isinstance(num_faults, tuple) else (num_faults, num_faults)
    soonest, latest = delay if isinstance(delay, tuple) else (delay, delay)
    if not faults:
        raise UsageError("inject_fault: faults is empty; give at least one")
    if not 0 <= fewest <= most or keep_alive < 0 or not 0 <= soonest <= latest:
        raise UsageError(
            f"inject_fault: num_faults={num_faults}, keep_alive={keep_alive}, delay={delay}: "
            "none may be negative, and of two numbers the first is the lower one"
        )
    for fault in faults:
        _handler(fault)
    generator = random.Random(seed)
    delay_s = generator.uniform(soonest, latest)
    targets = range(min(keep_alive, world_size), world_size)
    hit = tuple(
        sorted(generator.sample(targets, min(generator.randint(fewest, most), len(targets))))
    )
    fault = generator.choice(list(faults))
    if rank in hit:
        dispatch_fault_injection(fault, delay_s, callback)
    return hit


def register_fault(fault_name_or_enum: Fault | str, handler: Handler) -> Fault | str:
    """Add a fault under a new name, or replace the handler of a `Fault`; returns the name for later calls.

    `handler(delay, callback)` must return at once; after `delay` seconds it calls `callback()`, if that is not None,
    and injects the fault, for example with `threading.Timer`.
    """
    _handlers[_name(fault_name_or_enum)] = handler
    return Fault.__members__.get(_name(fault_name_or_enum), fault_name_or_enum)


def dispatch_fault_injection(fault: Fault | str, delay: float, callback: Callback) -> None:
    """Inject `fault` into this process after `delay` seconds; calls `callback` just before."""
    logger.critical("injecting %s in %.3f s", _name(fault), delay)
    _handler(fault)(delay, callback)


def maybe_raise_workload_exception() -> None:
    """Raise InjectedException, once, if a WORKLOAD_EXC is due; for the workload's loop."""
    if _workload_exception_due.is_set():
        _workload_exception_due.clear()
        raise InjectedException("injected into the workload")


def clear_workload_exception() -> None:
    """Forget a WORKLOAD_EXC that is due."""
    _workload_exception_due.clear()


_workload_exception_due = threading.Event()


def _name(fault: Fault | str) -> str:
    return fault.name if isinstance(fault, Fault) else fault


def _handler(fault: Fault | str) -> Handler:
    try:
        return _handlers[_name(fault)]
    except KeyError:
        raise UsageError(
            f"no fault is called {_name(fault)!r}; there are {', '.join(_handlers)}"
        ) from None


def _later(deed: Callable[[], Any], prepare: Callable[[], Any] | None = None) -> Handler:
    """A handler that calls `deed` in a thread of its own, and `prepare` at once."""

    def handler(delay: float, callback: Callback) -> None:
        if prepare is not None:
            prepare()

        def strike() -> None:
            if callback is not None:
                callback()
            deed()

        timer = threading.Timer(delay, strike)
        timer.daemon = True
        timer.start()

    return handler


def _async_exception() -> None:
    main_thread = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main_thread, ctypes.py_object(InjectedException))


def _prepare_signal_exception() -> None:
    before = signal.getsignal(signal.SIGUSR1)

    def raise_here(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGUSR1, before)
        if not sys.is_finalizing():
            raise InjectedException("injected by a signal handler")

    signal.signal(signal.SIGUSR1, raise_here)  # raises ValueError if this is not the main thread


def _lock_gil() -> None:
    # no handler may interrupt the sleep
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ctypes.PyDLL(None).sleep(_FOREVER_S)  # PyDLL: without releasing the GIL


def _sends(signum: signal.Signals, prepare: Callable[[], Any] | None = None) -> Handler:
    return _later(lambda: os.kill(os.getpid(), signum), prepare)


def _gpu(deed: Callable[[Any], Any]) -> Handler:
    """A handler for a deed on the caller's current GPU: a new thread starts on GPU 0."""

    def handler(delay: float, callback: Callback) -> None:
        import torch

        if not torch.cuda.is_available():
            raise UsageError("GPU_ERROR and GPU_SLEEP need a GPU, and torch sees none here")
        device = torch.cuda.current_device()

        def strike() -> None:
            with torch.cuda.device(device):
                deed(torch)

        _later(strike)(delay, callback)

    return handler


def _gpu_error(torch: Any) -> None:
    short = torch.zeros(1, device="cuda")
    # an index outside: the kernel asserts
    short[torch.ones(1, dtype=torch.int64, device="cuda")] = 0


_handlers: dict[str, Handler] = {
    "GPU_ERROR": _gpu(_gpu_error),
    "GPU_SLEEP": _gpu(lambda torch: torch.cuda._sleep(_WEDGED_CYCLES)),
    "WORKLOAD_EXC": _later(_workload_exception_due.set),
    "ASYNC_EXC": _later(_async_exception),
    "SIGNAL_EXC": _sends(signal.SIGUSR1, _prepare_signal_exception),
    "OS_ABORT": _later(os.abort),
    "LOCK_GIL": _later(_lock_gil),
    "SEGFAULT": _later(lambda: ctypes.string_at(1)),
    **{name: _sends(signal.Signals[name]) for name in ("SIGINT", "SIGKILL", "SIGTERM", "SIGSTOP")},
}
