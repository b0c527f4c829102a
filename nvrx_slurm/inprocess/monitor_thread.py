"""The thread of a rank that waits for the store, so that the main thread never does.

The main thread waits in Python, where signals reach it at once. While it runs the wrapped function, this thread learns
of a fault on any rank as soon as it is reported (the store's server pushes it), calls `abort`, and stops the function.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from nvrx_slurm.inprocess.watch.page import WAITING, Page
from nvrx_slurm.inprocess.watch.stopping import RankShouldRestart as RankShouldRestart  # a name of NVRx

_JOIN_S = 0.2


class Answer:
    """The result of a job. Taking it leaves it there: the exception of a signal handler may come just after the take,
    and the result can then be taken again."""

    def __init__(self) -> None:
        self._result: tuple[Any, BaseException | None] | None = None
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def give(self, value: Any, error: BaseException | None = None) -> None:
        """Set the result, or the exception of the job."""
        self._result = (value, error)
        self._bell.put(None)

    def take(self, timeout_s: float) -> Any:
        """The result; raises the exception of the job, or TimeoutError after `timeout_s` seconds."""
        if self._result is None:
            try:
                self._bell.get(timeout=timeout_s)
            except queue.Empty:
                pass
        if self._result is None:
            raise TimeoutError(f"nothing happened for {timeout_s:g} s")
        value, error = self._result
        if error is not None:
            raise error
        return value


class MonitorThread(threading.Thread):
    """Does one job after the other; each gives one answer."""

    def __init__(self, page: Page) -> None:
        super().__init__(name="nvrx-monitor-thread", daemon=True)
        self._page = page
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Answer] | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Until `stop`."""
        while (asked := self._jobs.get()) is not None:
            job, answer = asked
            try:
                answer.give(job())
            except BaseException as error:
                answer.give(None, error)
            del asked, job, answer

    def ask(self, job: Callable[[], Any]) -> Answer:
        """Queue a job; from the main thread."""
        answer = Answer()
        self._jobs.put((job, answer))
        return answer

    def answer(self, asked: Answer, timeout_s: float) -> Any:
        """Wait for an answer in the main thread; see `Answer.take`."""
        words = self._page.words
        words[WAITING] = 1
        try:
            return asked.take(timeout_s)
        finally:
            self._page.beat()
            words[WAITING] = 0

    def call(self, job: Callable[[], Any], timeout_s: float) -> Any:
        """`ask` and `answer`."""
        return self.answer(self.ask(job), timeout_s)

    def stop(self) -> None:
        """End the thread; a thread that is stuck in a call is abandoned, as a daemon."""
        self._jobs.put(None)
        self.join(_JOIN_S)
