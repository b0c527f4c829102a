"""The monitor thread's answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from nvrx_slurm.inprocess.monitor_thread import MonitorThread
from nvrx_slurm.inprocess.watch.page import Page

WAIT_S = 30.0


@pytest.fixture
def thread() -> Iterator[MonitorThread]:
    one = MonitorThread(Page())
    one.start()
    yield one
    one.stop()


def test_an_answer_can_be_taken_again(thread: MonitorThread) -> None:
    """By who was interrupted by a signal's exception when it had just taken it."""
    asked = thread.ask(lambda: 42)
    assert [thread.answer(asked, WAIT_S) for _ in range(2)] == [42, 42]

    def fail() -> None:
        raise ValueError("wanted")

    failed = thread.ask(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="wanted"):
            thread.answer(failed, WAIT_S)


def test_an_answer_that_nobody_has_taken_is_no_other_ones(thread: MonitorThread) -> None:
    thread.ask(lambda: "first")
    assert thread.call(lambda: "second", WAIT_S) == "second"


def test_when_the_thread_is_stuck_another_one_answers(thread: MonitorThread) -> None:
    free = threading.Event()
    asked = thread.ask(lambda: free.wait(WAIT_S))
    with pytest.raises(TimeoutError, match="nothing happened for 0.1 s"):
        thread.answer(asked, 0.1)
    thread.answer_instead(ConnectionError("lost"))
    for one in (asked, thread.ask(lambda: "too late")):
        with pytest.raises(ConnectionError, match="lost"):
            thread.answer(one, WAIT_S)
    free.set()
