"""What the plug-ins are given, checked when they are made: one sentence that says which value is wrong, and why."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from nvrx_slurm.inprocess.plugins import rank_assignment as ra
from nvrx_slurm.inprocess.plugins.abort import AbortTorchDistributed
from nvrx_slurm.inprocess.plugins.finalize import ThreadedFinalize
from nvrx_slurm.inprocess.plugins.health_check import (
    ChainedGPUHealthCheck,
    CudaHealthCheck,
    FaultCounter,
)
from nvrx_slurm.inprocess.plugins.initialize import RetryController
from nvrx_slurm.inprocess.plugins.nested_restarter import NestedRestarterAborted

A_SECOND = timedelta(seconds=1)
NO_TIME = "must be a datetime.timedelta, not"
NO_NUMBER = "must be a whole number, not"

CASES: list[tuple[Callable[[Any], Any], Any, str]] = [
    (lambda bad: ThreadedFinalize(bad, print), 5, f"ThreadedFinalize: timeout {NO_TIME} 5"),
    (lambda bad: AbortTorchDistributed(timeout=bad), 3, f"AbortTorchDistributed: timeout {NO_TIME} 3"),
    (lambda bad: ra.Tree([ra.Layer()], timeout=bad), 3, f"timeout of a Tree {NO_TIME} 3"),
    (lambda bad: ra.FilterCountGroupedByKey("", bool, bad), None, f"timeout of .* {NO_TIME} None"),
    (lambda bad: RetryController(bad), True, f"RetryController: max_iterations {NO_NUMBER} True"),
    (lambda bad: FaultCounter(bad), False, f"FaultCounter: max_rank_faults {NO_NUMBER} False"),
    (lambda bad: ra.Tree(bad), ra.Layer(), r"Tree needs a list of at least one Layer, not Layer\("),
    (lambda bad: ThreadedFinalize(A_SECOND, print, bad), 3, r"args must be a tuple, as \(3,\), or None, not 3"),
    (lambda bad: ThreadedFinalize(A_SECOND, print, (), bad), 3, "kwargs must be a dict or None, not 3"),
    (lambda bad: ChainedGPUHealthCheck(bad), "0", f"ChainedGPUHealthCheck: device_index {NO_NUMBER} '0'"),
    (lambda bad: NestedRestarterAborted(bad), "0", f"NestedRestarterAborted: special_rank {NO_NUMBER} '0'"),
    (lambda bad: AbortTorchDistributed(bad), 3, "torch_fr_trace_path must be a path, not 3"),
]


@pytest.mark.parametrize(("make", "bad", "sentence"), CASES)
def test_a_wrong_type_is_told(make: Callable[[Any], Any], bad: Any, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        make(bad)


@pytest.mark.parametrize("make", [CudaHealthCheck, lambda bad: ra.Tree([ra.Layer()], timeout=bad)])
@pytest.mark.parametrize("bad", [timedelta(0), -A_SECOND])
def test_a_time_is_longer_than_nothing(make: Callable[[timedelta], Any], bad: timedelta) -> None:
    with pytest.raises(ValueError, match=f"must be longer than 0 s, not {bad}"):
        make(bad)


def test_what_thread_takes_is_fine() -> None:
    """NVRx gives `args` and `kwargs` to a Thread: lists and None are in use."""
    assert ThreadedFinalize(A_SECOND, print, None, None).args == ()
    assert ThreadedFinalize(A_SECOND, print, ["a", "b"], {"end": ""}).args == ("a", "b")
