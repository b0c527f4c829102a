"""The thread of a rank that waits for the store, so that the main thread never does.

The main thread waits in Python, where signals reach it at once. While it runs the wrapped function, this thread learns
of a fault on any rank as soon as it is reported (the store's server pushes it), calls `abort`, and stops the function.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.exception import RankDiscarded
from nvrx_slurm.inprocess.guard.call_page import STOPPING, WAITING, CallPage

# a name of NVRx
from nvrx_slurm.inprocess.guard.stopping import RankShouldRestart as RankShouldRestart
from nvrx_slurm.inprocess.guard.stopping import Stopper
from nvrx_slurm.inprocess.plugins.abort import cut_again
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.inprocess.store.barriers import Iteration
from nvrx_slurm.inprocess.store.stores import StoreLost

logger = logging.getLogger(__name__)

# for a function whose collective `abort` has ended: longest clean-up that is not interrupted
_UNWIND_S = 0.2


def await_end(
    arguments: Arguments, page: CallPage, this: Iteration, state: FrozenState, stopper: Stopper
) -> bool:
    """Wait in the monitor thread until the iteration ends; True if the function has returned on all active ranks.

    After a fault, also of the store, it calls `abort` and stops the function. Raises StoreLost and RankDiscarded.
    """
    lost: StoreLost | RankDiscarded | None = None
    try:
        if this.await_end():
            return True
    except (StoreLost, RankDiscarded) as error:
        lost = error
    page.words[STOPPING] = time.monotonic_ns()
    wait_s = arguments.last_call_wait.total_seconds()
    if lost is None and wait_s:  # a sleep of 0 s would hand the GIL to a function that computes
        time.sleep(wait_s)
    stopper.begin()
    was_initialized = dist.is_initialized()
    # a collective, so the function may end
    breaks = arguments.abort is not None and was_initialized
    _abort(arguments, state)
    stopper.stop(arguments.soft_timeout.total_seconds(), _UNWIND_S if breaks else 0.0, cut_again)
    # `init_process_group` has ended between the two
    if dist.is_initialized() and not was_initialized:
        _abort(arguments, state)
    if lost is not None:
        raise lost
    return False


def _abort(arguments: Arguments, state: FrozenState) -> None:
    if arguments.abort is not None:
        try:
            arguments.abort(state)
        except Exception:
            logger.exception("abort failed")


_JOIN_S = 0.2
# Longest wait of the main thread in one piece. A signal may arrive after Python's last check for one and before the
# thread blocks, or be delivered to another thread. Its handler runs when this piece ends.
_PIECE_S = 0.5


class JobResult:
    """The result of a job. `take` does not remove it: a signal handler may raise right after it, and the caller then
    calls `take` again."""

    def __init__(self) -> None:
        self._result: tuple[Any, BaseException | None] | None = None
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def give(self, value: Any, error: BaseException | None = None) -> None:
        """Set the result, or the exception of the job."""
        self._result = (value, error)
        self._bell.put(None)

    def take(self, timeout_s: float) -> Any:
        """The result; raises the exception of the job, or TimeoutError after `timeout_s` seconds."""
        deadline_s = time.monotonic() + timeout_s
        while self._result is None and (left_s := deadline_s - time.monotonic()) > 0:
            try:
                self._bell.get(timeout=min(left_s, _PIECE_S))
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

    def __init__(self, page: CallPage) -> None:
        super().__init__(name="nvrx-monitor-thread", daemon=True)
        self._page = page
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], JobResult] | None] = (
            queue.SimpleQueue()
        )

    def run(self) -> None:
        """Until `stop`."""
        while (asked := self._jobs.get()) is not None:
            job, answer = asked
            try:
                answer.give(job())
            except BaseException as error:
                answer.give(None, error)
            del asked, job, answer

    def ask(self, job: Callable[[], Any]) -> JobResult:
        """Queue a job; from the main thread."""
        answer = JobResult()
        self._jobs.put((job, answer))
        return answer

    def answer(self, asked: JobResult, timeout_s: float) -> Any:
        """Wait for an answer in the main thread; see `JobResult.take`."""
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
