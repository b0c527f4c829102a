"""Is the rank alive? What it and its monitor process share about that, and who writes it.

They share a page of memory of which each word is one whole fact with one writer (see decision 006), so a sign of life
costs no syscall and cannot block. Times are `time.monotonic_ns()`, 0 = never.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096

AUTO = 0  # watchdog: the main thread was last seen to execute bytecode, or to wait inside the wrapper
ROUND = 1  # main: its iteration (-1: at the initial barrier)
WATCHED = 2  # main: 1 while the soft timeout applies (the function and what is called before it)
WAITING = 3  # main: 1 while it waits inside the wrapper, with a bound of its own
SUSPENDED = 4  # main: 1 while hang protection is switched off
STOPPING = 5  # main, monitor thread: since when the rank ends its iteration, or assigns ranks (0 = it does not)
LEFT = 6  # main: 1 when it has left the wrapper, and need not be watched any more
LOST = 7  # monitor process, or the watchdog on its behalf: 1 when it cannot reach the store
SEEN = 8  # monitor process (own cache line): when it last looked after its rank, 0 until it does
GONE = 9  # monitor process: 1 when the others have declared the rank gone
MANUAL = 16  # main (own cache line): last ping, 0 until the first one of an iteration
COUNTED = 17  # main: 1 while the others count on the rank, so that somebody has to say its word if it leaves
_SEMAPHORE = 24  # from here on: a sem_t, at most 64 bytes


def seconds_since(then_ns: int) -> float:
    """Of a time in the page."""
    return (time.monotonic_ns() - then_ns) / 1e9


class Page:
    """The page, shared with every process that is forked after it was made."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, PAGE_BYTES)
        self._maker = os.getpid()
        self.words = memoryview(self._map).cast("q")
        self.semaphore = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + 8 * _SEMAPHORE
        self.words[AUTO] = time.monotonic_ns()
        self.words[ROUND] = -1

    @property
    def is_of_another(self) -> bool:
        """Whether this process is no rank: the user's own code, called by the wrapper, has forked it, and comes back to
        the wrapper in it. It shares the page, the store's connections and the channel with its rank, and uses none."""
        return os.getpid() != self._maker

    def still_the_rank(self, value: Any = None) -> None:
        """To be asked whenever the user's code has returned. Raises ReturnedInChild in a child that it has forked."""
        if self.is_of_another:
            raise ReturnedInChild(value)

    def beat(self) -> None:
        """The main thread is known to be alive now."""
        self.words[AUTO] = time.monotonic_ns()

    def idle_s(self) -> float:
        """Seconds without progress, by whichever active method has seen none for longer."""
        words = self.words
        auto, manual = words[AUTO], words[MANUAL]
        oldest = min(auto, manual) if manual and words[WATCHED] and not words[WAITING] else auto
        return seconds_since(oldest)


class ReturnedInChild(BaseException):
    """In a child that the user's code has forked, which must not go on as the rank: the function returns `args[0]`."""


class OwnTime:
    """How long others have been waited for, by the clock of who waits and looks at it about every `look_s` seconds:
    between two looks no more than that is counted. If more has passed, this process was stopped, or its machine was,
    perhaps with all others (scontrol suspend), and nobody is to blame for that time."""

    def __init__(self, look_s: float) -> None:
        self._look_s = look_s
        self._seconds, self._looked_s = 0.0, time.monotonic()

    def seconds(self) -> float:
        """Since it was made."""
        now_s = time.monotonic()
        self._seconds += min(now_s - self._looked_s, self._look_s)
        self._looked_s = now_s
        return self._seconds


class StandsStill:
    """For how long something that counts has not moved, by the clock of who looks at it about every `interval_s`.
    Who has not looked (this process was stopped, or its machine was) blames nobody."""

    def __init__(self, interval_s: float) -> None:
        self._missed_s = 2 * interval_s + 1.0
        self._value, self._since_s, self._looked_s = -1, 0.0, 0.0

    def seconds(self, value: int) -> float:
        """To be called every interval."""
        now_s = time.monotonic()
        if value != self._value or now_s - self._looked_s > self._missed_s:
            self._value, self._since_s = value, now_s
        self._looked_s = now_s
        return now_s - self._since_s


class _Beats:
    """Asks the interpreter's main thread to count, in C, at its next bytecode.

    A Python function as the pending call could be hit by what a signal's handler raises. `sem_post` is a C function of
    the right shape that nothing can interrupt.
    """

    def __init__(self, page: Page) -> None:
        self._libc = ctypes.CDLL(None)
        self._semaphore = ctypes.c_void_p(page.semaphore)
        self._libc.sem_init(self._semaphore, 1, 0)
        self._post = ctypes.cast(self._libc.sem_post, ctypes.c_void_p)
        self._asked = 0
        self._add = ctypes.pythonapi.Py_AddPendingCall
        self._add.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._value = ctypes.c_int()

    def answered(self) -> bool:
        """Whether the main thread has done all that it was asked for."""
        self._libc.sem_getvalue(self._semaphore, ctypes.byref(self._value))
        return self._value.value == self._asked

    def ask(self) -> None:
        """Ask once more; the interpreter's queue has room for 32, and we never have more than one in it."""
        if self._add(self._post, self._semaphore) == 0:
            self._asked += 1


class ProgressWatchdog(threading.Thread):
    """Writes the automatic sign of life, and looks after what must not go unnoticed.

    `looks` are called once per interval; one that raises is told, and the thread goes on.
    """

    def __init__(self, page: Page, interval_s: float, looks: tuple[Callable[[], None], ...] = ()) -> None:
        super().__init__(name="nvrx-progress-watchdog", daemon=True)
        self._page = page
        self._interval_s = interval_s
        self._looks = looks
        self._over = threading.Event()

    def run(self) -> None:
        """Until `stop`."""
        beats, words = _Beats(self._page), self._page.words
        while not self._over.wait(self._interval_s):
            if beats.answered():
                self._page.beat()
                beats.ask()
            elif words[WAITING]:  # blocked where the wrapper put it; that we run shows that the process does
                self._page.beat()
            for look in self._looks:
                try:
                    look()
                except Exception:  # without signs of life the rank would be killed
                    logger.exception("the watchdog could not look after everything")

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._over.set()
        self.join(5.0)
