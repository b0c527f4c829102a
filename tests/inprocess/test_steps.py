"""ThreadedFinalize, RetryController's limits, and the arguments of all plug-ins."""

import sys
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest

from nvrx_slurm.inprocess import exception
from nvrx_slurm.inprocess import rank_assignment as ra
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.plugins.health_check import ChainedGPUHealthCheck, CudaHealthCheck, FaultCounter
from nvrx_slurm.inprocess.plugins.nested_restarter import NestedRestarterAborted
from nvrx_slurm.inprocess.plugins.steps import Initialize, RetryController, ThreadedFinalize
from nvrx_slurm.inprocess.state import State

pytestmark = pytest.mark.process


A_SECOND, LONG = timedelta(seconds=1), timedelta(seconds=60)


def state(iteration=0, world_size=4, active=2):
    return State(rank=0, world_size=world_size, active_world_size=active, iteration=iteration).freeze()


def test_the_function_runs_in_another_thread_with_its_arguments_and_gpu(monkeypatch):
    seen = []

    def fn(*args, **kwargs):
        seen.extend((args, kwargs, threading.current_thread() is threading.main_thread()))
        return "ignored"

    here = state()
    assert ThreadedFinalize(LONG, fn, (1, 2), {"three": 3})(here) is here
    assert ThreadedFinalize(timeout=LONG, fn=fn, args=None, kwargs=None)(here) is here
    cuda = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 3, set_device=seen.append)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    ThreadedFinalize(LONG, seen.append, ["a list"])(here)
    assert seen == [(1, 2), {"three": 3}, False, (), {}, False, 3, "a list"]


def test_a_function_that_does_not_return_is_a_timeout():
    over = threading.Event()
    with pytest.raises(exception.TimeoutError, match=r"Event\.wait"):
        ThreadedFinalize(timedelta(seconds=0.05), over.wait)(state())
    (left,) = (thread for thread in threading.enumerate() if thread.name.startswith("nvrx finalize"))
    over.set()
    left.join(60)
    assert not left.is_alive()


@pytest.mark.parametrize(
    "limits, good, bad, why",
    [
        ({"max_iterations": 3}, state(iteration=2), state(iteration=3), "max_iterations=3"),
        ({"min_world_size": 4}, state(), state(world_size=3), "3 healthy .* min_world_size=4"),
        ({"min_active_world_size": 2}, state(), state(active=1), "1 active .* min_active_world_size=2"),
    ],
)
def test_each_limit_ends_the_run_with_its_reason(limits, good, bad, why):
    """With an exception that is no Exception, which would restart; also in a composition."""
    retry, later = RetryController(**limits), RetryController()
    assert retry(good) is good and later(bad) is bad
    for one in (retry, Compose(later, retry)):
        assert isinstance(one, Initialize)
        with pytest.raises(exception.RestartAbort, match=why) as raised:
            one(bad)
        assert not isinstance(raised.value, Exception)


NO_TIME, NO_NUMBER = "must be a datetime.timedelta, not", "must be a whole number, not"
CASES = [
    (lambda bad: CudaHealthCheck(bad), 30, f"CudaHealthCheck: timeout {NO_TIME} 30"),
    (lambda bad: ThreadedFinalize(bad, print), 5, f"ThreadedFinalize: timeout {NO_TIME} 5"),
    (lambda bad: ra.FilterCountGroupedByKey("", bool, bad), None, f"timeout of .* {NO_TIME} None"),
    (lambda bad: RetryController(bad), True, f"RetryController: max_iterations {NO_NUMBER} True"),
    (lambda bad: FaultCounter(bad), False, f"FaultCounter: max_rank_faults {NO_NUMBER} False"),
    (lambda bad: ra.Tree(bad), ["root"], "Tree needs a list of at least one Layer"),
    (lambda bad: ra.Layer(bad), None, f"min_ranks of a Layer {NO_NUMBER} None"),
    (lambda bad: ThreadedFinalize(A_SECOND, print, bad), "3", r"args must be a tuple, as \('3',\), or None, not '3'"),
    (lambda bad: ChainedGPUHealthCheck(bad), "0", f"ChainedGPUHealthCheck: device_index {NO_NUMBER} '0'"),
    (lambda bad: NestedRestarterAborted(bad), "0", f"NestedRestarterAborted: special_rank {NO_NUMBER} '0'"),
]


def test_a_wrong_type_is_told():
    for make, bad, sentence in CASES:
        with pytest.raises(TypeError, match=sentence):
            make(bad)


def test_a_value_that_cannot_be_is_told():
    for make, why in (
        (lambda: CudaHealthCheck(timedelta(0)), "must be longer than 0 s, not 0:00:00"),
        (lambda: ra.MaxActiveWorldSize(0), "max_active_world_size"),
        (lambda: ra.ActiveWorldSizeDivisibleBy(0), "divisor"),
        (lambda: ra.Layer(min_ranks=-1), "min_ranks"),
        (lambda: ra.Layer(min_ranks=3, max_ranks=2), "max_ranks"),
        (lambda: ra.Layer(min_ranks=0, max_ranks=0), "max_ranks"),
        (lambda: RetryController(min_world_size=-1), "RetryController: min_world_size"),
    ):
        with pytest.raises(ValueError, match=why):
            make()
