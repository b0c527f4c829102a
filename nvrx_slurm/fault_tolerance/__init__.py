"""Public interface for training scripts: tell the launcher that this rank makes progress.

    from nvrx_slurm.fault_tolerance import RankMonitorClient

    monitor = RankMonitorClient()
    monitor.init_workload_monitoring()
    for batch in loader:
        train(batch)
        monitor.send_heartbeat()  # or: start_section("step") before, end_section("step") after the training
    monitor.shutdown_workload_monitoring()

Imports neither torch nor grpc.
"""

from __future__ import annotations

from nvrx_slurm.config.ft import FaultToleranceConfig
from nvrx_slurm.core.rank.learn import HeartbeatTimeouts, SectionTimeouts
from nvrx_slurm.monitor.client import FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR, RankMonitorClient
from nvrx_slurm.monitor.distributed import RankInfo
from nvrx_slurm.monitor.transport import RankMonitorClientError
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
