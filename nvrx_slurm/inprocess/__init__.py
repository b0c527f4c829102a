"""In-process restart: a wrapped training function is called again, in the same processes, after a fault."""

from nvrx_slurm.inprocess import attribution, exception, monitor_thread, state
from nvrx_slurm.inprocess.call import CallWrapper
from nvrx_slurm.inprocess.meeting import store
from nvrx_slurm.inprocess.plugins import (
    abort,
    completion,
    finalize,
    health_check,
    initialize,
    nested_restarter,
    rank_assignment,
    terminate,
)
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.state import FrozenState, Mode, State
from nvrx_slurm.inprocess.watch import monitor_process
from nvrx_slurm.inprocess.wrapper import Wrapper

__all__ = [
    "CallWrapper",
    "Compose",
    "FrozenState",
    "Mode",
    "State",
    "Wrapper",
    "abort",
    "attribution",
    "completion",
    "exception",
    "finalize",
    "health_check",
    "initialize",
    "monitor_process",
    "monitor_thread",
    "nested_restarter",
    "rank_assignment",
    "state",
    "store",
    "terminate",
]
