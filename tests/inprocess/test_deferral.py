"""Where the main thread is, and whether it may be stopped there: with frames of the real library."""

from __future__ import annotations

import logging
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from nvrx_slurm.inprocess.watch.stopping import Defer, Deferral


class Lock:
    """Says where it is asked for."""

    def __init__(self, look: Callable[[FrameType], None]) -> None:
        self._look = look

    def acquire(self, *_: object) -> bool:
        self._look(sys._getframe(1))
        return True

    def release(self) -> None:
        """Nobody has it."""

    __exit__ = lambda self, *_: None  # noqa: E731

    def __enter__(self) -> Lock:
        self._look(sys._getframe(1))
        return self


def looks(deferral: Deferral, frame: FrameType) -> list[Defer]:
    """By the bell, and by two signals."""
    return [deferral.look(frame, by_signal) for by_signal in (False, True, True)]


STEPS = [Defer.A_STEP] * 3


def test_a_handler_takes_its_lock() -> None:
    said: list[list[Defer]] = []
    handler = logging.NullHandler()
    handler.lock = Lock(lambda frame: said.append(looks(Deferral(), frame)))  # type: ignore[assignment]
    handler.acquire()
    assert said == [STEPS]


def test_who_makes_no_step_is_stopped_all_the_same() -> None:
    """Or asks of one and the same step would go on for ever."""

    def ask(frame: FrameType) -> None:
        deferral = Deferral()
        while deferral.look(frame, by_signal=False) is not Defer.NOT:
            asks.append(time.monotonic())

    asks: list[float] = []
    handler = logging.NullHandler()
    handler.lock = Lock(ask)  # type: ignore[assignment]
    handler.acquire()
    assert len(asks) > 1 and asks[-1] - asks[0] < 10


def test_who_waits_is_stopped_by_the_second_signal() -> None:
    """The first may have come a step before it waits, or behind it."""
    entered, frames = threading.Event(), []

    def waits() -> None:
        frames.append(sys._getframe())
        entered.set()
        done.wait(20)

    done = threading.Event()
    thread = threading.Thread(target=waits)
    thread.start()
    assert entered.wait(20)
    try:
        seen = _until_blocked(thread)
        assert looks(Deferral(), seen) == [Defer.A_STEP, Defer.A_STEP, Defer.NOT]
    finally:
        done.set()
        thread.join()


def _until_blocked(thread: threading.Thread) -> FrameType:
    """The frame of Condition.wait."""
    while True:
        frame = sys._current_frames()[thread.ident or 0]
        if frame.f_code is threading.Condition.wait.__code__:
            return frame


class Manager:
    """Says what it is told in the middle of both."""

    def __init__(self, look: Callable[[FrameType], None]) -> None:
        self._look = look

    def __enter__(self) -> None:
        self._look(sys._getframe())

    def __exit__(self, *_: object) -> None:
        self._look(sys._getframe())

    def __del__(self) -> None:
        self._look(sys._getframe())


def in_a_with_block(look: Callable[[FrameType], None]) -> int:
    with Manager(look):
        pass
    return 3


class Child(subprocess.Popen):  # type: ignore[type-arg]
    """Is never started."""

    look: Callable[[FrameType], None]

    def _execute_child(self, *_: Any, **__: Any) -> None:
        type(self).look(sys._getframe())
        self.returncode = 0


def in_popen(look: Callable[[FrameType], None]) -> int:
    Child.look = staticmethod(look)
    Child(["true"])
    return 1


class Forked(multiprocessing.get_context("fork").Process):  # type: ignore[name-defined,misc]
    """Is never forked."""

    look: Callable[[FrameType], None]

    @staticmethod
    def _Popen(process: Any) -> Any:
        Forked.look(sys._getframe())
        raise InterruptedError


def in_a_fork(look: Callable[[FrameType], None]) -> int:
    Forked.look = staticmethod(look)
    with pytest.raises(InterruptedError):
        Forked().start()
    return 1


@pytest.mark.parametrize("place", [in_a_with_block, in_popen, in_a_fork])
def test_what_would_stay_half_done_is_put_off(place: Callable[[Callable[[FrameType], None]], int]) -> None:
    said: list[list[Defer]] = []
    times = place(lambda frame: said.append(looks(Deferral(), frame)))
    assert said == [[Defer.A_WHILE] * 3] * times


def test_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a second after the first time."""
    said: list[Defer] = []
    deferral, times = Deferral(), iter([100.0, 101.0, 101.1])
    monkeypatch.setattr("nvrx_slurm.inprocess.watch.stopping.time.monotonic", lambda: next(times))

    def look(frame: FrameType) -> None:
        said.append(deferral.look(frame, False))

    with Manager(look):
        pass
    assert said == [Defer.A_WHILE, Defer.A_WHILE, Defer.NOT]


def test_the_function_s_own_steps_are_not_put_off() -> None:
    assert looks(Deferral(), sys._getframe()) == [Defer.NOT] * 3
