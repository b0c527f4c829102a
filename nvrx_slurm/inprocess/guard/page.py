"""The page of memory that a rank and its monitor process share.

Each word is one whole fact with one writer (see decision 006), so a sign of life costs no system call and cannot block.
Times are `time.monotonic_ns()`, 0 = never.
"""

from __future__ import annotations

import ctypes
import mmap
import time

PAGE_BYTES = 4096

AUTO = 0  # watchdog: the main thread was last seen to execute bytecode, or to wait inside the wrapper
ITERATION = 1  # main: its iteration (-1: at the initial barrier)
WATCHED = 2  # main: 1 while the soft timeout applies (the function and what is called before it)
WAITING = 3  # main: 1 while it waits inside the wrapper, with a bound of its own
UNPROTECTED = 4  # main: number of open blocks without hang protection
STOPPING = 5  # main, monitor thread: since when the rank ends its iteration, or assigns ranks (0 = it does not)
LEFT = 6  # main: 1 when it has left the wrapper, and need not be watched any more
LOST = 7  # monitor process, or the watchdog on its behalf: 1 when it cannot reach the store
SEEN = 8  # monitor process (own cache line): when it last checked its rank, 0 until it does
GONE = 9  # monitor process: 1 when the others have declared the rank gone, or it is being killed
MANUAL = 16  # main (own cache line): last ping, 0 until the first one of an iteration
COUNTED = 17  # main: 1 while the others count on the rank, so that its monitor has to report its end
_SEMAPHORE = 24  # from here on: a sem_t, at most 64 bytes


class RankPage:
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
        auto, manual = words[AUTO], words[MANUAL]
        return min(auto, manual) if manual and words[WATCHED] and not words[WAITING] else auto

    def idle_s(self) -> float:
        """Seconds without progress."""
        return (time.monotonic_ns() - self.progress_ns()) / 1e9
