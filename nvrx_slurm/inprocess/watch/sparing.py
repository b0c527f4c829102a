"""Where the main thread is not stopped at once, since what it is in the middle of would stay half done for good."""

from __future__ import annotations

import enum
import functools
import logging
import multiprocessing.popen_fork
import multiprocessing.process
import multiprocessing.util
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

_LONGEST_S = 1.0
# An exception between taking a lock and the `try` behind it leaves the lock taken, for good; one between `waitpid` and
# the line that keeps its result loses the child's exit code, so that it is waited for for ever.
_MODULES = (
    threading,
    logging,
    weakref,
    sys.modules["_weakrefset"],
    subprocess,
    multiprocessing.popen_fork,
    multiprocessing.util,  # its Finalize is a destructor, too
)
_LIBRARY = frozenset(module.__file__ for module in _MODULES)
# Where these are blocked, whatever ends that does no harm.
_WAITS = frozenset({"wait", "join", "_wait_for_tstate_lock", "poll", "_try_wait", "communicate", "_communicate"})
# A destructor drops what is raised in it; half of an `__enter__` or `__exit__` leaves a lock, or torch's autocast, on.
_NAMES = ("__del__", "__enter__", "__exit__")
_STARTS = frozenset(  # between the fork and the line that keeps its result there is a child that nobody knows
    start.__code__ for start in (multiprocessing.process.BaseProcess.start, subprocess.Popen.__init__)
)
_OURS = ("stopping.py", "sparing.py")


class PutOff(enum.Enum):
    """For how long."""

    NOT = enum.auto()
    A_STEP = enum.auto()  # of the interpreter; who locks much may be at the same place whenever asked from outside
    A_WHILE = enum.auto()


class Sparing:
    """In one stop: puts it off for `_LONGEST_S` at most.

    The main thread is asked at one of its steps, or by a signal; this may also come where it is blocked, and then comes
    to the same step again. So it is known to wait, in the library, where it may be stopped, and has to be.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None  # when it was put off first
        self._place: tuple[FrameType, int] | None = None  # of the last signal
        self._step: tuple[FrameType, int] | None = None

    def look(self, frame: FrameType | None, by_signal: bool) -> PutOff:
        """Whether to put it off in the middle of `frame`, which may be ours."""
        now_s = time.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s > _LONGEST_S:
            return PutOff.NOT
        if self._step is not None and not by_signal and self._step == (frame, frame and frame.f_lasti):
            return PutOff.A_STEP  # asked again before the step was made
        users = list(_users(frame))
        if not users:
            return PutOff.NOT
        blocked = by_signal and self._is_blocked(users[0])
        codes = [one.f_code for one in users]
        changes = any(code.co_name in _NAMES or code in _STARTS or code in self._handlers for code in codes)
        if codes[0].co_filename in _LIBRARY and (changes or not blocked or codes[0].co_name not in _WAITS):
            self._step = frame and (frame, frame.f_lasti)
            return PutOff.A_STEP
        return PutOff.A_WHILE if changes else PutOff.NOT

    def _is_blocked(self, frame: FrameType) -> bool:
        here, before = (frame, frame.f_lasti), self._place
        self._place = here
        return here == before

    @functools.cached_property
    def _handlers(self) -> set[CodeType]:
        """What the user's signal handlers are made of."""
        codes = set()
        for signum in signal.valid_signals():
            handler: Any = signal.getsignal(signum)
            while isinstance(handler, functools.partial):
                handler = handler.func
            for one in (handler, getattr(handler, "__call__", None)):  # noqa: B004 - an object's
                if isinstance(code := getattr(one, "__code__", None), CodeType):
                    codes.add(code)
        return codes


def _users(frame: FrameType | None) -> Iterator[FrameType]:
    """What the function has called, innermost first."""
    while frame is not None:
        if frame.f_globals.get("__package__") != __package__ or not frame.f_code.co_filename.endswith(_OURS):
            yield frame
        elif frame.f_code.co_name == "run":
            return
        frame = frame.f_back
