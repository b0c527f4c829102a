"""Whether the main thread may be stopped at a place: with frames of the real library."""

import logging
import multiprocessing
import subprocess
import sys
import threading
import time

import pytest

from nvrx_slurm.inprocess.guard.stopping import Defer, Deferral

pytestmark = pytest.mark.process


class Manager:
    """Calls `ask` with the frame of each of its methods, or as a lock with that of its caller."""

    def __init__(self, ask):
        self._ask = ask

    def __enter__(self):
        self._ask(sys._getframe())

    def __exit__(self, *_):
        self._ask(sys._getframe())

    def __del__(self):
        self._ask(sys._getframe())

    def acquire(self):
        self._ask(sys._getframe(1))


def in_a_handler(ask):
    """It takes its lock."""
    handler = logging.NullHandler()
    lock = handler.lock = Manager(ask)
    handler.acquire()
    lock._ask = lambda frame: None
    return 1


def in_a_with_block(ask):
    with Manager(ask):
        pass
    return 3


def in_popen(ask):
    class Child(subprocess.Popen):
        def _execute_child(self, *_, **__):
            ask(sys._getframe())
            self.returncode = 0

    Child(["true"])
    return 1


def in_the_function_itself(ask):
    ask(sys._getframe())
    return 1


def in_a_fork(ask):
    class Forked(multiprocessing.get_context("fork").Process):
        @staticmethod
        def _Popen(process):
            ask(sys._getframe())
            raise InterruptedError

    with pytest.raises(InterruptedError):
        Forked().start()
    return 1


def answers(frame):
    """By the step, and by two signals."""
    deferral = Deferral()
    return [deferral.check(frame, by_signal) for by_signal in (False, True, True)]


@pytest.mark.parametrize(
    "place, deferred",
    [(in_a_handler, Defer.A_STEP), (in_a_with_block, Defer.A_WHILE), (in_popen, Defer.A_WHILE),
     (in_a_fork, Defer.A_WHILE), (in_the_function_itself, Defer.NOT)],
)  # fmt: skip
def test_a_stop_that_would_leave_something_half_done_is_deferred(place, deferred):
    said = []
    times = place(lambda frame: said.append(answers(frame)))
    assert said == [[deferred] * 3] * times


@pytest.mark.parametrize("place", [in_a_handler, in_a_with_block])
def test_no_stop_is_deferred_for_longer_than_a_second(monkeypatch, place):
    said = []
    deferral, now = Deferral(), [100.0]
    monkeypatch.setattr("nvrx_slurm.inprocess.guard.stopping.time.monotonic", lambda: now[0])

    def ask(frame):
        for now[0] in (100.0, 101.0, 101.1):
            said.append(deferral.check(frame, False))

    place(ask)
    assert Defer.NOT not in said[:2] and said[2] is Defer.NOT


def test_a_blocked_wait_is_stopped_by_the_second_signal():
    """The first may have come a step before it waits, or behind it."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(20,))
    thread.start()
    try:
        deadline_s = time.monotonic() + 20
        frame = sys._current_frames()[thread.ident or 0]
        while frame.f_code is not threading.Condition.wait.__code__ and time.monotonic() < deadline_s:
            frame = sys._current_frames()[thread.ident or 0]
        assert answers(frame) == [Defer.A_STEP, Defer.A_STEP, Defer.NOT]
    finally:
        done.set()
        thread.join()
