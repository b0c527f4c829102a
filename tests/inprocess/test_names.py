"""Names, parameters and defaults of NVRx's inprocess package: what its users write works here as it is.

What is not here is in docs/how-to/migrate-from-nvrx.md, with the reason.
"""

from __future__ import annotations

import importlib
import inspect
from datetime import timedelta
from typing import Any

import pytest

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import exception

PACKAGE = "nvrx_slurm.inprocess"
REQUIRED = inspect.Parameter.empty
NOBODY: dict[str, Any] = {}

# Positional parameters, in order, with their defaults.
CALLS: dict[str, dict[str, Any]] = {
    "rank_assignment.RankAssignmentCtx": dict.fromkeys(("state", "store", "terminated_ranks"), REQUIRED),
    "rank_assignment.ActivateAllRanks": NOBODY,
    "rank_assignment.MaxActiveWorldSize": {"max_active_world_size": None},
    "rank_assignment.ActiveWorldSizeDivisibleBy": {"divisor": 1},
    "rank_assignment.ShiftRanks": NOBODY,
    "rank_assignment.FillGaps": NOBODY,
    "rank_assignment.FilterCountGroupedByKey": {
        "key_or_fn": REQUIRED,
        "condition": REQUIRED,
        "timeout": timedelta(seconds=60),
    },
    "rank_assignment.Layer": {"min_ranks": 1, "max_ranks": None, "key_or_fn": "", "flag": None},
    "rank_assignment.Tree": {"layers": REQUIRED, "world_size_filter": None},
    "initialize.RetryController": {"max_iterations": None, "min_world_size": 1, "min_active_world_size": 1},
    "abort.AbortTorchDistributed": {"torch_fr_trace_path": None},
    "abort.AbortTransformerEngine": NOBODY,
    "abort.AbortPersistentCheckpointProcesses": NOBODY,
    "finalize.ThreadedFinalize": {"timeout": REQUIRED, "fn": REQUIRED, "args": (), "kwargs": None},
    "health_check.CudaHealthCheck": {"timeout": timedelta(seconds=30)},
    "health_check.FaultCounter": {"max_rank_faults": None},
    "health_check.ChainedGPUHealthCheck": {"device_index": None},
    "health_check.ChainedNVLHealthCheck": {"device_index": None},
    "health_check.ChainedNicHealthCheck": {"device_index": None},
    "nested_restarter.NestedRestarterLogger": NOBODY,
    "nested_restarter.NestedRestarterHandlingCompleted": {"special_rank": 0},
    "nested_restarter.NestedRestarterHandlingStarting": {"special_rank": 0},
    "nested_restarter.NestedRestarterFinalized": {"special_rank": 0},
    "nested_restarter.NestedRestarterAborted": {"special_rank": 0},
    "attribution.InterruptionRecord": {"rank": REQUIRED, "interruption": REQUIRED},
    "store.TCPStore": {
        "host_name": None,
        "port": None,
        "world_size": None,
        "timeout": timedelta(seconds=300),
        "wait_for_workers": True,
        "multi_tenant": False,
        "use_libuv": True,
    },
    "store.PrefixStore": {"iteration": REQUIRED, "store": REQUIRED},
    "store.StoreView.barrier": {
        "self": REQUIRED,
        "ranks": REQUIRED,
        "group_name": REQUIRED,
        "rendezvous_count": REQUIRED,
        "timeout": REQUIRED,
        "timeout_chunk": None,
    },
    "state.State": {
        "rank": REQUIRED,
        "world_size": REQUIRED,
        "active_rank": None,
        "active_world_size": None,
        "initial_rank": None,
        "initial_world_size": None,
        "iteration": 0,
        "mode": inprocess.Mode.INITIALIZED,
        "fn_exception": None,
    },
    "state.State.copy_from": {"self": REQUIRED, "other": REQUIRED, "fields": None},
    "state.State.from_env": NOBODY,
    "state.State.set_distributed_vars": {"self": REQUIRED},
    "state.State.advance": {"self": REQUIRED},
    "state.State.freeze": {"self": REQUIRED},
    "CallWrapper.ping": {"self": REQUIRED},
    "CallWrapper.atomic": {"self": REQUIRED},
    "CallWrapper.disable_hang_protection": {"self": REQUIRED},
}
CALLS["state.FrozenState"] = CALLS["state.State"]
ONE_ARGUMENT = {
    "rank_assignment.RankAssignment": "ctx",
    "rank_assignment.RankFilter": "ctx",
    "initialize.Initialize": "state",
    "abort.Abort": "state",
    "finalize.Finalize": "state",
    "health_check.HealthCheck": "state",
    "completion.Completion": "state",
    "terminate.Terminate": "state",
}
PLAIN = [
    "Compose",
    "CallWrapper.iteration",
    "monitor_thread.RankShouldRestart",
    "rank_assignment.LayerFlag.RESERVE",
    "rank_assignment.LayerFlag.BACKFILL",
    "rank_assignment.FilterGroupedByKey",
    "store.FileStore",
    "store.StoreMixin",
    "store.BarrierTimeout",
    "store.BarrierOverflow",
    "health_check.FaultCounterExceeded",
    "rank_assignment.RankDiscarded",
    "attribution.InterruptionRecord.from_str",
    *(f"state.Mode.{name}" for name in ("INITIALIZED", "ACTIVE", "INACTIVE", "TERMINATED")),
    *(
        f"attribution.Interruption.{name}"
        for name in (
            "EXCEPTION",
            "BASE_EXCEPTION",
            "SOFT_TIMEOUT",
            "HARD_TIMEOUT",
            "TERMINATED",
            "UNRESPONSIVE",
            "MONITOR_PROCESS_EXCEPTION",
        )
    ),
]


def found(name: str) -> Any:
    thing: Any = inprocess
    for part in name.split("."):
        if inspect.ismodule(thing) and not hasattr(thing, part):
            importlib.import_module(f"{thing.__name__}.{part}")
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize("name", CALLS)
def test_parameters_and_defaults(name: str) -> None:
    """Ours may have more behind them, with defaults."""
    ours = list(inspect.signature(found(name)).parameters.values())
    theirs = CALLS[name]
    assert {one.name: one.default for one in ours[: len(theirs)]} == theirs
    assert all(one.default is not REQUIRED for one in ours[len(theirs) :])


@pytest.mark.parametrize("name", ONE_ARGUMENT)
def test_bases_to_derive_from(name: str) -> None:
    base = found(name)
    assert inspect.isabstract(base)
    assert list(inspect.signature(base.__call__).parameters) == ["self", ONE_ARGUMENT[name]]


@pytest.mark.parametrize("name", PLAIN)
def test_names(name: str) -> None:
    assert found(name) is not None


def test_the_tree_of_exceptions() -> None:
    restart = {
        "HealthCheckError",
        "InternalError",
        "TimeoutError",
        "RankDiscarded",
        "FaultCounterExceeded",
        "BarrierError",
    }
    assert all(issubclass(getattr(exception, name), exception.RestartError) for name in restart)
    assert issubclass(exception.BarrierTimeout, exception.BarrierError)
    assert issubclass(exception.BarrierOverflow, exception.BarrierError)
    for outright in (exception.RestartAbort, inprocess.monitor_thread.RankShouldRestart):
        assert issubclass(outright, BaseException) and not issubclass(outright, Exception)
