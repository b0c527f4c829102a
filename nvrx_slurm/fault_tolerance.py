"""What a training script imports: tell the launcher that this rank is alive.

    from nvrx_slurm.fault_tolerance import RankMonitorClient

    monitor = RankMonitorClient()
    monitor.init_workload_monitoring()
    for batch in loader:
        train(batch)
        monitor.send_heartbeat()
    monitor.shutdown_workload_monitoring()

Imports neither torch nor grpc.
"""

from __future__ import annotations

import os
import socket
import sys
import weakref
from collections import namedtuple
from time import monotonic_ns
from typing import Any

from nvrx_slurm.monitor import transport
from nvrx_slurm.monitor.page import FINISHED, HEARTBEAT, Page, PageError
from nvrx_slurm.monitor.transport import RankMonitorClientError

__all__ = ["FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR", "RankInfo", "RankMonitorClient", "RankMonitorClientError"]

FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR = "FT_RANK_MONITOR_IPC_SOCKET"


class RankInfo(namedtuple("RankInfo", "global_rank local_rank host pid")):
    """Who this process is: its rank in the job, its rank on the node, the node's name, its process id."""

    __slots__ = ()

    @classmethod
    def get_for_current_rank(cls) -> RankInfo:
        """From torch.distributed if the script has initialised it, else from the launcher's environment.

        Raises RankMonitorClientError if neither knows the rank.
        """
        return cls(_global_rank(), _env_int("LOCAL_RANK", 0), socket.gethostname(), os.getpid())


def _global_rank() -> int:
    dist = sys.modules.get("torch.distributed")  # never imported for this: it costs a second
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    rank = _env_int("RANK", -1)
    if rank < 0:
        raise RankMonitorClientError(
            "the rank of this process is not known: RANK is not set and torch.distributed is not initialised; "
            "start the script with nvrx-run"
        )
    return rank


def _env_int(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise RankMonitorClientError(f"{name} in the environment must be an integer, not {text!r}") from None


class _Config:
    """The launcher's settings as read-only attributes, named as in FaultToleranceConfig."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, Any]) -> None:
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        if name in _Config.__slots__ or name not in self._values:
            raise AttributeError(f"the launcher sent no setting {name!r}")
        return self._values[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("settings come from the launcher and are read-only in a rank")

    def __repr__(self) -> str:
        return f"cfg({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


class RankMonitorClient:
    """Connects this rank to its rank monitor. One per rank; not for processes that the rank forks (see below).

    Attributes: `is_initialized`; `rank_info` (RankInfo) and `cfg` (the launcher's settings, read-only; both None before
    init).

    A heartbeat is one store into memory that is shared with the monitor: no syscall, no lock, no waiting, whatever
    state the monitor is in. In a child made by os.fork() (a data loader's worker) the client is uninitialised, so that
    a child that still lives can never be taken for its rank; sending a heartbeat there raises.
    """

    def __init__(self) -> None:
        self.rank_info: RankInfo | None = None
        self.cfg: _Config | None = None
        self._page: Page | None = None
        self._words: Any = None  # the page's memoryview while initialised
        _clients.add(self)

    @property
    def is_initialized(self) -> bool:
        """Whether heartbeats of this client reach the rank monitor."""
        return self._words is not None

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Start monitoring: from now on `initial_rank_heartbeat_timeout` runs.

        `num_warmup_iters` (>= 0, None = the launcher's setting) is for sections and means nothing to heartbeats.
        Waits for the rank monitor's answer: usually < 1 ms, at most 30 s. Raises RankMonitorClientError if already
        initialised, not started by nvrx-run, the rank is not known, or the monitor refuses or does not answer.
        """
        if self.is_initialized:
            raise RankMonitorClientError("init_workload_monitoring() was already called by this client")
        if num_warmup_iters is not None and (type(num_warmup_iters) is not int or num_warmup_iters < 0):
            raise RankMonitorClientError(f"num_warmup_iters must be an integer >= 0 or None, not {num_warmup_iters!r}")
        path = os.environ.get(FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR)
        if not path:
            raise RankMonitorClientError(
                f"there is no rank monitor for this process ({FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR} is not set): "
                "start the script with nvrx-run"
            )
        rank_info = RankInfo.get_for_current_rank()
        reply, fd = transport.request(
            path,
            "init",
            rank=rank_info.global_rank,
            local_rank=rank_info.local_rank,
            num_warmup_iters=num_warmup_iters,
        )
        self._page = _map(fd)
        cfg = reply.get("cfg")
        self.cfg = _Config(cfg if isinstance(cfg, dict) else {})
        self.rank_info = rank_info
        self._words = self._page.words

    def send_heartbeat(self) -> None:
        """Tell that this rank makes progress; restarts `rank_heartbeat_timeout`. About 0.1 us, never blocks.

        Raises RankMonitorClientError if not initialised in this process.
        """
        try:
            self._words[HEARTBEAT] = monotonic_ns()
        except (TypeError, ValueError):
            raise RankMonitorClientError(
                "send_heartbeat() needs init_workload_monitoring() first, in the rank's own process "
                "(not in one forked from it) and before shutdown_workload_monitoring()"
            ) from None

    def shutdown_workload_monitoring(self) -> None:
        """End monitoring: no timeout fires after this, until the next init. Does nothing if not initialised."""
        if self._page is not None and self._words is not None:
            self._words[FINISHED] = monotonic_ns()
        self._detach()

    def _detach(self) -> None:
        self._words = None
        if self._page is not None:
            self._page.close()
            self._page = None


def _map(fd: int | None) -> Page:
    if fd is None:
        raise RankMonitorClientError("the rank monitor's answer came without its memory page")
    try:
        return Page(fd)
    except (PageError, OSError) as error:
        raise RankMonitorClientError(f"the rank monitor's memory page cannot be used: {error}") from None
    finally:
        os.close(fd)


_clients: weakref.WeakSet[RankMonitorClient] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._detach()


os.register_at_fork(after_in_child=_after_fork_in_child)
