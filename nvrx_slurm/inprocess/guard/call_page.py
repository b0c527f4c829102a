"""The page of memory that a rank and its monitor process share, and the thread that writes the automatic sign of life.

Each word is one whole fact with one writer (see decision 006), so a sign of life costs no system call and cannot block.
Times are `time.monotonic_ns()`, 0 = never.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Callable

from nvrx_slurm.core.rank.watch import LATE_S

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096

# watchdog: the main thread was last seen to execute bytecode, or to wait inside the wrapper
AUTO = 0
ITERATION = 1  # main: its iteration (-1: at the initial barrier)
WATCHED = 2  # main: 1 while the soft timeout applies (the function and what is called before it)
WAITING = 3  # main: 1 while it waits inside the wrapper, with a bound of its own
UNPROTECTED = 4  # main: number of open blocks without hang protection
# main, monitor thread: since when the rank ends its iteration, or assigns ranks (0 = it does not)
STOPPING = 5
LEFT = 6  # main: 1 when it has left the wrapper, and need not be watched any more
LOST = 7  # monitor process, or the watchdog on its behalf: 1 when it cannot reach the store
SEEN = 8  # monitor process (own cache line): when it last checked its rank, 0 until it does
GONE = 9  # monitor process: 1 when the others have declared the rank gone, or it is being killed
MANUAL = 16  # main (own cache line): last ping, 0 until the first one of an iteration
# main: 1 while the others count on the rank, so that its monitor has to report its end
COUNTED = 17
_SEMAPHORE = 24  # from here on: a sem_t, at most 64 bytes


class CallPage:
    """The page, shared with every process that is forked after it was made."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, PAGE_BYTES)
        self.words = memoryview(self._map).cast("q")
        self.semaphore = ctypes.addressof(ctypes.c_char.from_buffer(self._map)) + 8 * _SEMAPHORE
        self.words[AUTO] = time.monotonic_ns()
        self.words[ITERATION] = -1

    def beat(self) -> None:
        """The main thread is known to be alive now."""
        self.words[AUTO] = time.monotonic_ns()

    def progress_ns(self) -> int:
        """The last progress by the active method that has seen none for longer."""
        words = self.words
        auto = words[AUTO]
        manual = words[MANUAL]
        return min(auto, manual) if manual and words[WATCHED] and not words[WAITING] else auto


class Stall:
    """Tells how long a counter has not moved, to an observer that reads it about every `interval_s` seconds.

    An observer that reads late was itself suspended (scontrol suspend, a paused machine), and its count starts anew.
    """

    def __init__(self, interval_s: float) -> None:
        self._late_s = 2 * interval_s + LATE_S
        self._value = -1
        self._since_s = 0.0
        self._read_s = 0.0

    def seconds(self, value: int) -> float:
        """Return the seconds; to be called every interval with the counter's value."""
        now_s = time.monotonic()
        if value != self._value or now_s - self._read_s > self._late_s:
            self._value = value
            self._since_s = now_s
        self._read_s = now_s
        return now_s - self._since_s


class _Beats:
    """Asks the interpreter's main thread to count, in C, at its next bytecode.

    A Python function as the pending call could be hit by an exception of a signal handler. `sem_post` is a C function
    of the right signature that nothing can interrupt.
    """

    def __init__(self, page: CallPage) -> None:
        self._libc = ctypes.CDLL(None)
        self._semaphore = ctypes.c_void_p(page.semaphore)
        self._libc.sem_init(self._semaphore, 1, 0)
        self._post = ctypes.cast(self._libc.sem_post, ctypes.c_void_p)
        self._asked = 0
        self._add = ctypes.pythonapi.Py_AddPendingCall
        self._add.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._value = ctypes.c_int()

    def answered(self) -> bool:
        """Whether the main thread has made all calls that were asked for."""
        self._libc.sem_getvalue(self._semaphore, ctypes.byref(self._value))
        return self._value.value == self._asked

    def ask(self) -> None:
        """Ask once more; the interpreter's queue has room for 32 calls, and at most one of ours is in it."""
        if self._add(self._post, self._semaphore) == 0:
            self._asked += 1


class ProgressWatchdog(threading.Thread):
    """Writes the automatic sign of life and calls `checks` once per interval.

    A check that raises is logged, and the thread goes on: without signs of life the rank would be killed.
    """

    def __init__(
        self, page: CallPage, interval_s: float, checks: tuple[Callable[[], None], ...] = ()
    ) -> None:
        super().__init__(name="nvrx-progress-watchdog", daemon=True)
        self._page = page
        self._interval_s = interval_s
        self._checks = checks
        self._over = threading.Event()

    def run(self) -> None:
        """Until `stop`."""
        beats = _Beats(self._page)
        words = self._page.words
        while not self._over.wait(self._interval_s):
            if beats.answered():
                self._page.beat()
                beats.ask()
            elif words[
                WAITING
            ]:  # blocked inside the wrapper; that this thread runs shows that the process does
                self._page.beat()
            for check in self._checks:
                try:
                    check()
                except Exception:
                    logger.exception("a check of the progress watchdog failed")

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._over.set()
        self.join(5.0)
