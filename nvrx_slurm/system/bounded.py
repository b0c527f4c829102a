"""A call that may never return, with a bound: drivers, collective libraries, functions of users."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

# So often a caller that waits executes a step of Python, by which the in-process wrapper sees that it does not hang:
# the call has a bound of its own.
_SIGN_OF_LIFE_S = 0.05


class Overrun(Exception):
    """The call did not return in time. Its thread is left behind, as a daemon: nothing can end it from outside."""


class _Outcome(Generic[T]):
    """Where the thread puts what the call returned or raised; `value` is a list so that None is a result too."""

    def __init__(self) -> None:
        self.value: list[T] = []
        self.error: BaseException | None = None


def call(fn: Callable[[], T], timeout_s: float, name: str, more_s: Callable[[], float] = lambda: 0.0) -> T:
    """What `fn` returns or raises, run in a daemon thread called `name`. Raises Overrun after `timeout_s` seconds, and
    as many more as `more_s`, asked once then, gives it.
    """
    outcome: _Outcome[T] = _Outcome()

    def run() -> None:
        try:
            outcome.value.append(fn())
        except BaseException as error:
            outcome.error = error

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    deadline_s = time.monotonic() + timeout_s
    _join(thread, deadline_s)
    if thread.is_alive():
        _join(thread, time.monotonic() + more_s())
    if outcome.error is not None:
        try:
            raise outcome.error
        finally:
            outcome.error = None  # its traceback holds `outcome`: no reference cycle is left
    if not outcome.value:
        raise Overrun(f"{name} did not return within {timeout_s:g} s")
    return outcome.value[0]


def _join(thread: threading.Thread, deadline_s: float) -> None:
    while thread.is_alive() and (left_s := deadline_s - time.monotonic()) > 0:
        thread.join(min(left_s, _SIGN_OF_LIFE_S))
