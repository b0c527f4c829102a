"""ThreadedFinalize on a CPU, and on the caller's GPU with a stand-in for torch."""

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

    assert ThreadedFinalize(LONG, fn, (1, 2), {"three": 3})(STATE) is STATE
    assert ThreadedFinalize(timeout=LONG, fn=fn)(STATE) is STATE
    assert seen == [(1, 2), {"three": 3}, False, (), {}, False]


def test_a_function_that_does_not_return_is_a_timeout() -> None:
    over = threading.Event()
    with pytest.raises(exception.TimeoutError, match=r"Event\.wait"):
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
    assert isinstance(both, Finalize) and both(STATE) is STATE
    with pytest.raises(ZeroDivisionError):
        Compose(ThreadedFinalize(LONG, order.append, ("never",)), ThreadedFinalize(LONG, lambda: 1 / 0))(STATE)
    assert order == ["first", "second"]
