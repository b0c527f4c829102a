"""The thread of a rank that waits for the store, so that the main thread never does.

The main thread waits in Python, where signals reach it at once; and while it runs the wrapped function, this thread
learns of a fault anywhere the moment it is told (the store's server pushes it), calls `abort`, and stops the function.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from nvrx_slurm.inprocess.progress import WAITING, Page
from nvrx_slurm.inprocess.stopping import RankShouldRestart

__all__ = ["MonitorThread", "RankShouldRestart"]

_JOIN_S = 0.2


class MonitorThread(threading.Thread):
    """Does one job after the other; each gives one answer, or what it raised."""

    def __init__(self, page: Page) -> None:
        super().__init__(name="nvrx-monitor-thread", daemon=True)
        self._page = page
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.pending = 0  # answers that the main thread has not taken yet

    def run(self) -> None:
        """Until `stop`."""
        while (job := self._jobs.get()) is not None:
            try:
                answer: tuple[Any, BaseException | None] = (job(), None)
            except BaseException as error:
                answer = (None, error)
            self._answers.put(answer)
            del job, answer

    def ask(self, job: Callable[[], Any]) -> None:
        """From the main thread."""
        self.pending += 1
        self._jobs.put(job)

    def answer(self, timeout_s: float) -> Any:
        """The answer of the oldest job, in the main thread. Raises what the job raised; TimeoutError."""
        words = self._page.words
        words[WAITING] = 1
        try:
            value, error = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"nothing happened for {timeout_s:g} s") from None
        finally:
            self._page.beat()
            words[WAITING] = 0
        self.pending -= 1
        if error is not None:
            raise error
        return value

    def call(self, job: Callable[[], Any], timeout_s: float) -> Any:
        """`ask` and `answer`, after all that was asked before has been answered."""
        deadline_s = time.monotonic() + timeout_s
        self.ask(job)
        while self.pending > 1:
            self.answer(max(0.0, deadline_s - time.monotonic()))
        return self.answer(max(0.0, deadline_s - time.monotonic()))

    def answer_instead(self, error: BaseException) -> None:
        """From another thread, when this one is stuck: answer the pending job."""
        self._answers.put((None, error))

    def stop(self) -> None:
        """End it; if it is stuck in a call it is left behind, as a daemon."""
        self._jobs.put(None)
        self.join(_JOIN_S)
