"""The one way to write what people read: a file system, a collector or Slurm that hangs costs one thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from nvrx_slurm.node.output.console import once
from nvrx_slurm.system import bounded

HANGS_S = 5.0  # a piece of work that takes longer is said to hang


class Writer:
    """Does pieces of work one after the other, in a thread of its own that lives while there is work.

    `most` pieces wait at most, a new one replaces the oldest. With 1 only the newest counts. Make it on the event loop.
    Each problem is said once: "cannot `verb` <what>: <why>".
    """

    def __init__(self, say: Callable[[str], None], verb: str = "write", most: int = 1) -> None:
        self._loop = asyncio.get_running_loop()
        self._say = once(say)
        self._verb = verb
        self._lock = threading.Lock()  # guards the next three
        self._waiting: deque[tuple[object, Callable[[], None]]] = deque(maxlen=most)
        self._thread: threading.Thread | None = None
        self._under_way: tuple[object, float] | None = None  # what, and since when (monotonic seconds)

    def put(self, what: object, work: Callable[[], None]) -> None:
        """Have `work()` write `what`. Never blocks; any thread may call it."""
        with self._lock:
            self._waiting.append((what, work))
        self._go_on()

    async def close(self, within_s: float) -> None:
        """Wait until all is written, at most `within_s` seconds. What hangs is said, and left alone."""
        self._go_on()
        thread = self._thread
        if thread is None:
            self._work_off()  # Only where no thread can be made is something left: it is written here.
        else:
            await bounded.call_or_none(thread.join, within_s, "writer")
            self._say_what_hangs(HANGS_S - within_s)

    def _go_on(self) -> None:
        """Have a thread where there is work. If none can be made, the next call tries again."""
        with self._lock:
            if self._waiting and self._thread is None:
                self._thread = bounded.begin(self._work_off, "writer")
        self._say_what_hangs(HANGS_S)

    def _say_what_hangs(self, after_s: float) -> None:
        under_way = self._under_way
        if under_way is not None and time.monotonic() >= under_way[1] + after_s:
            self._complain(under_way[0], f"it did not return within {HANGS_S:g} s")

    def _complain(self, what: object, why: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the program has ended
            self._loop.call_soon_threadsafe(self._say, f"cannot {self._verb} {what}: {why}")

    # --- the thread -----------------------------------------------------------------------------------------

    def _work_off(self) -> None:
        while (work := self._next()) is not None:
            what, write = work
            try:
                write()
            except Exception as error:  # A defect, too, costs the readers of this writer alone.
                self._complain(what, getattr(error, "strerror", None) or error)

    def _next(self) -> tuple[object, Callable[[], None]] | None:
        with self._lock:
            if not self._waiting:
                self._thread = None
                self._under_way = None
                return None
            work = self._waiting.popleft()
            self._under_way = work[0], time.monotonic()
            return work
