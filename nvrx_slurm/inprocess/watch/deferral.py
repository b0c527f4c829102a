"""Code in which the main thread is not stopped at once, since a half-done step would remain so for good.

- An exception between the acquisition of a lock and the `try` behind it leaves the lock held.
- An exception between `waitpid` and the line that stores its result loses the exit code of the child.
- An exception in a destructor is dropped; in `__enter__` or `__exit__` it leaves a lock held, or torch's autocast on.
- An exception between a fork and the line that stores its result leaves a child that no object refers to.
"""

from __future__ import annotations

import enum
import logging
import multiprocessing.popen_fork
import multiprocessing.process
import multiprocessing.util
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType

_LONGEST_S = 1.0
_MODULES = (
    threading,
    logging,
    weakref,
    sys.modules["_weakrefset"],
    subprocess,
    multiprocessing.popen_fork,
    multiprocessing.util,  # for its Finalize, which is a destructor, too
)
_LIBRARY = frozenset(module.__file__ for module in _MODULES)
# Functions of the library that block; an exception while they block does no harm.
_WAITS = frozenset({"wait", "join", "_wait_for_tstate_lock", "poll", "_try_wait", "communicate", "_communicate"})
_NAMES = ("__del__", "__enter__", "__exit__")
_STARTS = frozenset(start.__code__ for start in (multiprocessing.process.BaseProcess.start, subprocess.Popen.__init__))
_OURS = ("stopping.py", "deferral.py")


class Defer(enum.Enum):
    """For how long a stop is deferred."""

    NOT = enum.auto()
    A_STEP = enum.auto()  # of the interpreter: lock-heavy code may be at the same line on every look
    A_WHILE = enum.auto()


class Deferral:
    """Defers one stop, for `_LONGEST_S` at most.

    The main thread looks at one of its steps, or when a signal arrives. A signal may also arrive where it is blocked,
    and then finds it at the same step again. That is how a blocked call of the library is recognised; it is stopped.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None  # the first deferral
        self._place: tuple[FrameType, int] | None = None  # at the last signal
        self._step: tuple[FrameType, int] | None = None

    def look(self, frame: FrameType | None, by_signal: bool) -> Defer:
        """Whether to defer the stop in the middle of `frame`, which may be ours."""
        now_s = time.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s > _LONGEST_S:
            return Defer.NOT
        if self._step is not None and not by_signal and self._step == (frame, frame and frame.f_lasti):
            return Defer.A_STEP  # asked again before the step was made
        users = list(_users(frame))
        if not users:
            return Defer.NOT
        blocked = by_signal and self._is_blocked(users[0])
        codes = [one.f_code for one in users]
        changes = any(code.co_name in _NAMES or code in _STARTS for code in codes)
        if codes[0].co_filename in _LIBRARY and (changes or not blocked or codes[0].co_name not in _WAITS):
            self._step = frame and (frame, frame.f_lasti)
            return Defer.A_STEP
        return Defer.A_WHILE if changes else Defer.NOT

    def _is_blocked(self, frame: FrameType) -> bool:
        here, before = (frame, frame.f_lasti), self._place
        self._place = here
        return here == before


def _users(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the function's calls, innermost first."""
    while frame is not None:
        if frame.f_globals.get("__package__") != __package__ or not frame.f_code.co_filename.endswith(_OURS):
            yield frame
        elif frame.f_code.co_name == "run":
            return
        frame = frame.f_back
