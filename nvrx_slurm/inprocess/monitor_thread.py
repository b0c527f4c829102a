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

from nvrx_slurm.inprocess.watch.progress import WAITING, OwnTime, Page, ReturnedInChild
from nvrx_slurm.inprocess.watch.stopping import RankShouldRestart

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


class Answer:
    """What a job will have returned or raised. Taking it leaves it there: a signal's exception, which may come between
    any two steps of the main thread, makes nobody wait for what has been taken already."""

    def __init__(self) -> None:
        self._said: tuple[Any, BaseException | None] | None = None
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def give(self, value: Any, error: BaseException | None = None) -> None:
        """The first counts."""
        if self._said is None:
            self._said = (value, error)
            self._bell.put(None)

    def take(self, timeout_s: float) -> Any:
        """Raises what the job raised; TimeoutError, for which time does not count in which this process was stopped."""
        look_s = min(timeout_s / 4, _LOOK_S)
        waited = OwnTime(look_s)
        while self._said is None:
            try:
                self._bell.get(timeout=look_s)
            except queue.Empty:
                if waited.seconds() >= timeout_s:
                    raise TimeoutError(f"nothing happened for {timeout_s:g} s") from None
        value, error = self._said
        if error is not None:
            raise error
        return value


class MonitorThread(threading.Thread):
    """Does one job after the other; each gives one answer, or what it raised."""

    def __init__(self, page: Page) -> None:
        super().__init__(name="nvrx-monitor-thread", daemon=True)
        self._page = page
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Answer] | None] = queue.SimpleQueue()
        self._asked = Answer()  # the last one
        self._instead: BaseException | None = None

    def run(self) -> None:
        """Until `stop`."""
        while (asked := self._jobs.get()) is not None:
            job, answer = asked
            try:
                answer.give(end_child_after(job, self._page))
            except BaseException as error:
                answer.give(None, error)
            del asked, job, answer

    def ask(self, job: Callable[[], Any]) -> Answer:
        """From the main thread."""
        answer = self._asked = Answer()
        self._jobs.put((job, answer))
        if self._instead is not None:
            answer.give(None, self._instead)
        return answer

    def answer(self, asked: Answer, timeout_s: float) -> Any:
        """What `asked` says, in the main thread; see there."""
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

    def answer_instead(self, error: BaseException) -> None:
        """From another thread, when this one is stuck for good: this is the answer from now on."""
        self._instead = error
        self._asked.give(None, error)

    def stop(self) -> None:
        """End it; if it is stuck in a call it is left behind, as a daemon."""
        self._jobs.put(None)
        self.join(_JOIN_S)
