"""Work of the keeper in threads. One thread decides: what the others find is brought to it."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

_DECISION_S = 30.0
R = TypeVar("R")


class Work:
    """`woken`: a descriptor that can be read when `finish` has something to do."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self.woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._finished: deque[Callable[[], None]] = deque()

    def do(self, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        """Do `work` in a thread, and in the one that decides `then`, with its result or OSError."""

        def run() -> None:
            try:
                result = work()
            except OSError as error:
                result = error
            except Exception as error:  # a defect is told to the one that waits for the result
                result = OSError(repr(error))
            self._bring(partial(then, result))

        with suppress(RuntimeError):  # no thread can be made: the work waits for one that there is
            self._pool.submit(run)

    def decide(self, decision: Callable[[], R]) -> R:
        """From a thread: what the one that decides says. Raises OSError if that takes too long."""
        future: Future[R] = Future()

        def decided() -> None:
            try:
                future.set_result(decision())
            except Exception as error:  # the keeper lives on, with the memory of all ranks
                future.set_exception(error)

        self._bring(decided)
        if not wait([future], _DECISION_S).done:
            raise OSError("the keeper is too busy")
        return future.result()

    def finish(self) -> None:
        """What is brought to the thread that decides."""
        os.eventfd_read(self.woken)
        while self._finished:
            self._finished.popleft()()

    def _bring(self, what: Callable[[], None]) -> None:
        self._finished.append(what)
        os.eventfd_write(self.woken, 1)
