"""Public interface for training scripts: tell the launcher that this rank makes progress.

    from nvrx_slurm.fault_tolerance import RankMonitorClient

    monitor = RankMonitorClient()
    monitor.init_workload_monitoring()
    for batch in loader:
        train(batch)
        monitor.send_heartbeat()  # or: start_section("step") before, end_section("step") after the training
    monitor.shutdown_workload_monitoring()

Imports neither torch nor grpc. Names that need more than the client are imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvrx_slurm.monitor.client import FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR, RankMonitorClient
from nvrx_slurm.monitor.rank_info import RankInfo
from nvrx_slurm.monitor.transport import RankMonitorClientError

if TYPE_CHECKING:
    from nvrx_slurm.config.ft import FaultToleranceConfig
    from nvrx_slurm.core.rank.learn import HeartbeatTimeouts, SectionTimeouts
    from nvrx_slurm.monitor.workload_control import WorkloadControlRequest
    from nvrx_slurm.types import WorkloadAction

__all__ = [
    "FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR",
    "FaultToleranceConfig",
    "HeartbeatTimeouts",
    "RankInfo",
    "RankMonitorClient",
    "RankMonitorClientError",
    "SectionTimeouts",
    "WorkloadAction",
    "WorkloadControlRequest",
]

_LAZY = {
    "FaultToleranceConfig": "nvrx_slurm.config.ft",
    "HeartbeatTimeouts": "nvrx_slurm.core.rank.learn",
    "SectionTimeouts": "nvrx_slurm.core.rank.learn",
    "WorkloadAction": "nvrx_slurm.types",
    "WorkloadControlRequest": "nvrx_slurm.monitor.workload_control",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
