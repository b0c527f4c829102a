"""ThreadedFinalize on a CPU, and on the right GPU where torch says there is one."""

from __future__ import annotations

import datetime
import sys
import threading
from types import SimpleNamespace

import pytest

from nvrx_slurm.inprocess import exception
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.plugins.finalize import Finalize, ThreadedFinalize
from nvrx_slurm.inprocess.state import State

STATE = State(rank=0, world_size=2).freeze()
LONG = datetime.timedelta(seconds=60)


def test_the_function_runs_in_another_thread_with_its_arguments() -> None:
    seen: list[object] = []

    def fn(*args: object, **kwargs: object) -> str:
        seen.extend((args, kwargs, threading.current_thread() is threading.main_thread()))
        return "ignored"

    finalize = ThreadedFinalize(LONG, fn, (1, 2), {"three": 3})
    assert isinstance(finalize, Finalize)
    assert finalize(STATE) is STATE
    assert ThreadedFinalize(timeout=LONG, fn=fn)(STATE) is STATE
    assert seen == [(1, 2), {"three": 3}, False, (), {}, False]


def test_what_the_function_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        ThreadedFinalize(LONG, lambda: 1 / 0)(STATE)


def test_a_function_that_does_not_return_is_a_timeout() -> None:
    over = threading.Event()
    with pytest.raises(exception.TimeoutError, match=r"Event\.wait did not return within 0\.05 s"):
        ThreadedFinalize(datetime.timedelta(seconds=0.05), over.wait)(STATE)
    (left,) = (thread for thread in threading.enumerate() if thread.name.startswith("nvrx finalize"))
    over.set()
    left.join(60)
    assert not left.is_alive()


def test_the_thread_has_the_callers_gpu(monkeypatch) -> None:
    devices: list[int] = []
    cuda = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 3, set_device=devices.append)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    ThreadedFinalize(LONG, lambda: devices.append(-1))(STATE)
    assert devices == [3, -1]


def test_several_in_a_row_stop_at_the_first_that_fails() -> None:
    order: list[str] = []
    both = Compose(ThreadedFinalize(LONG, order.append, ("second",)), ThreadedFinalize(LONG, order.append, ("first",)))
    assert isinstance(both, Finalize)
    assert both(STATE) is STATE
    assert order == ["first", "second"]
    with pytest.raises(ZeroDivisionError):
        Compose(ThreadedFinalize(LONG, order.append, ("never",)), ThreadedFinalize(LONG, lambda: 1 / 0))(STATE)
    assert order == ["first", "second"]


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than 0 s"):
        ThreadedFinalize(datetime.timedelta(0), print)
    with pytest.raises(TypeError, match="must be callable"):
        ThreadedFinalize(LONG, "print")  # type: ignore[arg-type]
