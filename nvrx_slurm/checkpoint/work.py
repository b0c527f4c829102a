"""Work of the keeper in threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any


class Work:
    """`lock`: is held by the one thread that decides; so nothing that waits is done with it."""

    def __init__(self, threads: int, lock: AbstractContextManager[Any]) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._lock = lock

    def do(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Do `work` in a thread, and decide `then`, with its result or OSError."""

        def run() -> None:
            try:
                result = work()
            except OSError as error:
                result = error
            except Exception as error:  # a defect is told to the one that waits for the result
                result = OSError(repr(error))
            with self._lock:
                then(result)

        with suppress(RuntimeError):  # no thread can be made: the work waits for one that there is
            self._pool.submit(run)
