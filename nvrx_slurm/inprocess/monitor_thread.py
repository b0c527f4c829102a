"""The thread of a rank that waits for the store, so that the main thread never does.

The main thread waits in Python, where signals reach it at once; and while it runs the wrapped function, this thread
learns of a fault anywhere the moment it is told (the store's server pushes it), calls `abort`, and stops the function.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from nvrx_slurm.inprocess.progress import WAITING, OwnTime, Page, ReturnedInChild
from nvrx_slurm.inprocess.stopping import RankShouldRestart

__all__ = ["MonitorThread", "RankShouldRestart"]

_JOIN_S = 0.2
_LOOK_S = 5.0  # longest between two looks at how long something was waited for


def end_child_after(job: Callable[[], Any], page: Page) -> Any:
    """What `job` returns or raises. A child that `abort` has forked in it ends here, since it has no main thread to go
    on with: with 0 if it just came back, 1 if it raised, or the code of its SystemExit."""
    try:
        return job()
    except BaseException as error:
        if page.is_of_another:
            _end(error)
        raise


def _end(error: BaseException) -> NoReturn:
    code = 1
    if isinstance(error, ReturnedInChild):
        code = 0
    elif isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # none, or closed
            stream.flush()
    os._exit(code)


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
                answer: tuple[Any, BaseException | None] = (end_child_after(job, self._page), None)
            except BaseException as error:
                answer = (None, error)
            self._answers.put(answer)
            del job, answer

    def ask(self, job: Callable[[], Any]) -> None:
        """From the main thread."""
        self.pending += 1
        self._jobs.put(job)

    def answer(self, timeout_s: float) -> Any:
        """The answer of the oldest job, in the main thread. Raises what the job raised; TimeoutError, for which time
        does not count in which this process was stopped."""
        words = self._page.words
        words[WAITING] = 1
        try:
            value, error = self._take(timeout_s)
        finally:
            self._page.beat()
            words[WAITING] = 0
        self.pending -= 1
        if error is not None:
            raise error
        return value

    def _take(self, timeout_s: float) -> tuple[Any, BaseException | None]:
        look_s = min(timeout_s / 4, _LOOK_S)
        waited = OwnTime(look_s)
        while True:
            try:
                return self._answers.get(timeout=look_s)
            except queue.Empty:
                if waited.seconds() >= timeout_s:
                    raise TimeoutError(f"nothing happened for {timeout_s:g} s") from None

    def call(self, job: Callable[[], Any], timeout_s: float) -> Any:
        """`ask` and `answer`, after all that was asked before has been answered; each within the time."""
        self.ask(job)
        while self.pending > 1:
            self.answer(timeout_s)
        return self.answer(timeout_s)

    def answer_instead(self, error: BaseException) -> None:
        """From another thread, when this one is stuck: answer the pending job."""
        self._answers.put((None, error))

    def stop(self) -> None:
        """End it; if it is stuck in a call it is left behind, as a daemon."""
        self._jobs.put(None)
        self.join(_JOIN_S)
