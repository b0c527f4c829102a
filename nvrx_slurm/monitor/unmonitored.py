"""A rank without a rank monitor, where NVRX_DISABLE_RANK_MONITORS says so: a client that does nothing."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from nvrx_slurm.monitor.distributed import RankInfo, env_int
from nvrx_slurm.monitor.page import PAGE_BYTES
from nvrx_slurm.monitor.transport import RankMonitorClientError
from nvrx_slurm.monitor.wire import SOCKET_ENV

_ENV = "NVRX_DISABLE_RANK_MONITORS"
_said: list[str] = []


def is_wanted() -> bool:
    """Whether this process has no rank monitor and shall go on without; rank 0 says so on stderr, once.

    Raises UsageError where the variable is neither true nor false.
    """
    from nvrx_slurm.config.layers import resolve

    launch = resolve({}, {_ENV: os.environ.get(_ENV, "")}).config.launch
    wanted = launch.disable_rank_monitors and not os.environ.get(SOCKET_ENV)
    if wanted and not _said and not env_int("RANK", 0):
        _said.append(f"RankMonitorClient does nothing here ({_ENV}): hangs are not noticed")
        print(_said[0], file=sys.stderr, flush=True)
    return wanted


def begin() -> tuple[RankInfo, Any, Any]:
    """What a client has instead of a monitor's answer: this rank, the default settings, words that nobody reads.

    Raises RankMonitorClientError where that is not wanted.
    """
    if not is_wanted():
        raise RankMonitorClientError(
            f"there is no rank monitor for this process ({SOCKET_ENV} is not set): start the "
            "script with nvrx-run, try it within nvrx_slurm.testing.standalone_monitor(), or go on without by "
            f"{_ENV}=true"
        )
    from nvrx_slurm.config.ft import FaultToleranceConfig

    rank = RankInfo(env_int("RANK", 0), env_int("LOCAL_RANK", 0), socket.gethostname(), os.getpid())
    return rank, FaultToleranceConfig().rank_settings(), [0] * (PAGE_BYTES // 8)
