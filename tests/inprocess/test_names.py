"""Names, parameters and defaults of NVRx's inprocess package: what its users write works here as it is.

What is not here is in docs/how-to/migrate-from-nvrx.md, with the reason.
"""

import importlib
import inspect

import pytest

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import exception

pytestmark = pytest.mark.process


REQUIRED = inspect.Parameter.empty

# Positional parameters, in order, with their defaults as repr() shows them.
CALLS = """
rank_assignment.RankAssignmentCtx(state, store, terminated_ranks)
rank_assignment.ActivateAllRanks()
rank_assignment.MaxActiveWorldSize(max_active_world_size=None)
rank_assignment.ActiveWorldSizeDivisibleBy(divisor=1)
rank_assignment.ShiftRanks()
rank_assignment.FillGaps()
rank_assignment.FilterCountGroupedByKey(key_or_fn, condition, timeout=datetime.timedelta(seconds=60))
rank_assignment.Layer(min_ranks=1, max_ranks=None, key_or_fn='', flag=None)
rank_assignment.Tree(layers, world_size_filter=None)
initialize.RetryController(max_iterations=None, min_world_size=1, min_active_world_size=1)
abort.AbortTorchDistributed(torch_fr_trace_path=None)
abort.AbortTransformerEngine()
abort.AbortPersistentCheckpointProcesses()
finalize.ThreadedFinalize(timeout, fn, args=(), kwargs=None)
health_check.CudaHealthCheck(timeout=datetime.timedelta(seconds=30))
health_check.FaultCounter(max_rank_faults=None)
health_check.ChainedGPUHealthCheck(device_index=None)
health_check.ChainedNVLHealthCheck(device_index=None)
health_check.ChainedNicHealthCheck(device_index=None)
nested_restarter.NestedRestarterLogger()
nested_restarter.NestedRestarterHandlingCompleted(special_rank=0)
nested_restarter.NestedRestarterHandlingStarting(special_rank=0)
nested_restarter.NestedRestarterFinalized(special_rank=0)
nested_restarter.NestedRestarterAborted(special_rank=0)
attribution.InterruptionRecord(rank, interruption)
store.TCPStore(host_name=None, port=None, world_size=None, timeout=datetime.timedelta(seconds=300), \
wait_for_workers=True, multi_tenant=False, use_libuv=True)
store.PrefixStore(iteration, store)
state.State(rank, world_size, active_rank=None, active_world_size=None, initial_rank=None, initial_world_size=None, \
iteration=0, mode=<Mode.INITIALIZED: 1>, fn_exception=None)
state.FrozenState(rank, world_size, active_rank=None, active_world_size=None, initial_rank=None, \
initial_world_size=None, iteration=0, mode=<Mode.INITIALIZED: 1>, fn_exception=None)
state.State.copy_from(self, other, fields=None)
state.State.from_env()
state.State.set_distributed_vars(self)
state.State.advance(self)
state.State.freeze(self)
rank_assignment.RankAssignment.__call__(self, ctx)
rank_assignment.RankFilter.__call__(self, ctx)
initialize.Initialize.__call__(self, state)
abort.Abort.__call__(self, state)
finalize.Finalize.__call__(self, state)
health_check.HealthCheck.__call__(self, state)
completion.Completion.__call__(self, state)
terminate.Terminate.__call__(self, state)
CallWrapper.ping(self)
CallWrapper.atomic(self)
CallWrapper.disable_hang_protection(self)
""".strip().splitlines()
PLAIN = {
    "": "Compose CallWrapper.iteration monitor_thread.RankShouldRestart",
    "attribution.Interruption.": "EXCEPTION BASE_EXCEPTION SOFT_TIMEOUT HARD_TIMEOUT TERMINATED UNRESPONSIVE "
    "MONITOR_PROCESS_EXCEPTION",
    "attribution.InterruptionRecord.": "from_str",
    "health_check.": "FaultCounterExceeded",
    "rank_assignment.": "LayerFlag.RESERVE LayerFlag.BACKFILL FilterGroupedByKey RankDiscarded",
    "state.Mode.": "INITIALIZED ACTIVE INACTIVE TERMINATED",
    "store.": "FileStore StoreMixin BarrierTimeout BarrierOverflow",
}


def found(name):
    thing = inprocess
    for part in name.split("."):
        if inspect.ismodule(thing) and not hasattr(thing, part):
            importlib.import_module(f"{thing.__name__}.{part}")
        thing = getattr(thing, part)
    return thing


def test_parameters_and_defaults():
    """Ours may have more behind them, with defaults."""
    for call in CALLS:
        name, _, arguments = call.partition("(")
        ours = list(inspect.signature(found(name)).parameters.values())
        theirs = [argument for argument in arguments.removesuffix(")").split(", ") if argument]
        assert [str(one.replace(annotation=REQUIRED)) for one in ours[: len(theirs)]] == theirs, call
        assert all(one.default is not REQUIRED for one in ours[len(theirs) :]), call


def test_names():
    for place, names in PLAIN.items():
        for name in names.split():
            assert found(place + name) is not None


def test_the_tree_of_exceptions():
    for name in ("HealthCheckError", "InternalError", "TimeoutError", "RankDiscarded", "FaultCounterExceeded"):
        assert issubclass(getattr(exception, name), exception.RestartError)
    assert issubclass(exception.BarrierError, exception.RestartError)
    for barrier in (exception.BarrierTimeout, exception.BarrierOverflow):
        assert issubclass(barrier, exception.BarrierError)
    for outright in (exception.RestartAbort, inprocess.monitor_thread.RankShouldRestart):
        assert issubclass(outright, BaseException) and not issubclass(outright, Exception)
