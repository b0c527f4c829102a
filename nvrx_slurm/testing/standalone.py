"""A real rank monitor without a launcher: to try RankMonitorClient in a notebook, and to test scripts that use it.

    with standalone_monitor(rank_section_timeouts={"step": 2.0}) as monitor:
        client = RankMonitorClient()
        client.init_workload_monitoring()
        client.start_section("step")
        print(monitor.wait_for_hang(10.0))  # "in section 'step' for 2.00 s (limit 2 s)"

A hang ends a substitute process, not the caller.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvrx_slurm.config.ft import FaultToleranceConfig
from nvrx_slurm.monitor import wire
from nvrx_slurm.node.monitors.monitors import RankMonitor, WatchRules

if TYPE_CHECKING:
    from nvrx_slurm.fault_tolerance import WorkloadControlRequest
    from nvrx_slurm.types import WorkloadAction

_ANSWER_TIMEOUT_S = 30.0
# ends with us, however we end
_SUBSTITUTE = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"]


class StandaloneMonitor:
    """The object that `standalone_monitor()` gives.

    `hangs`: a sentence for the hang that was found, if one was. `requests`: the workload control requests that were
    sent, in order; nothing follows from them here.
    """

    def __init__(self) -> None:
        self.hangs: list[str] = []
        self.requests: list[WorkloadControlRequest] = []
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self._monitor: RankMonitor | None = None

    @property
    def pid(self) -> int | None:
        """The rank monitor's process id (None while it is being replaced)."""
        return self._monitor.pid if self._monitor else None

    def wait_for_hang(self, timeout_s: float) -> str:
        """The sentence of the hang, as soon as there is one. Raises TimeoutError after `timeout_s` seconds."""
        return str(self._nth(self.hangs, 1, timeout_s, "hangs"))

    def wait_for_request(self, timeout_s: float, count: int = 1) -> WorkloadControlRequest:
        """The request number `count` (>= 1), as soon as it is there. Raises TimeoutError after `timeout_s` seconds."""
        request: WorkloadControlRequest = self._nth(self.requests, count, timeout_s, "requests")
        return request

    def warn(self) -> None:
        """What the warning signal does in a job: from now on `should_stop()` says yes."""
        assert self._monitor is not None
        self._call(self._monitor.warn)

    def _nth(self, found: list[Any], count: int, timeout_s: float, what: str) -> Any:
        with self._changed:
            if not self._changed.wait_for(lambda: len(found) >= count, timeout_s):
                raise TimeoutError(
                    f"the rank monitor got {len(found)} {what} within {timeout_s:g} s"
                )
            return found[count - 1]

    def _on_hang(self, local_rank: int, message: Mapping[str, Any]) -> None:
        with self._changed:
            self.hangs.append(str(message["sentence"]))
            self._changed.notify_all()

    def _on_asked(self, local_rank: int, action: WorkloadAction, description: str) -> None:
        from nvrx_slurm.fault_tolerance import WorkloadControlRequest

        with self._changed:
            self.requests.append(WorkloadControlRequest(action, description))
            self._changed.notify_all()

    def _call(self, deed: Callable[[], Any]) -> Any:
        """The result of `deed`, which runs in the thread of the monitor's event loop."""

        async def run() -> Any:
            return deed()

        return self._await(run())

    def _await(self, deed: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(deed, self._loop).result(_ANSWER_TIMEOUT_S)

    @contextmanager
    def _watching(self, private_dir: str, config: FaultToleranceConfig) -> Iterator[str]:
        """The socket for the rank, while a substitute process is watched in its place."""
        thread = threading.Thread(
            target=self._loop.run_forever, name="standalone-monitor", daemon=True
        )
        thread.start()
        try:
            with subprocess.Popen(
                _SUBSTITUTE, stdin=subprocess.PIPE, start_new_session=True
            ) as substitute:
                yield self._call(lambda: self._start(Path(private_dir), substitute.pid, config))
        finally:
            if self._monitor is not None:
                self._await(self._monitor.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join(_ANSWER_TIMEOUT_S)
            self._loop.close()

    def _start(self, private_dir: Path, pid: int, config: FaultToleranceConfig) -> str:
        self._monitor = monitor = RankMonitor(0, private_dir, self._on_hang, self._on_asked)
        monitor.start()
        monitor.spawn()
        path = monitor.worker_env()[wire.SOCKET_ENV]
        pidfd = os.pidfd_open(pid)
        try:
            rules = WatchRules(
                config.rank_limits(), config.rank_termination_signal, config.rank_settings()
            )
            monitor.watch(
                pid=pid, pidfd=pidfd, cycle=0, rank=int(os.environ.get("RANK", "0")), rules=rules
            )
        finally:
            os.close(pidfd)
        return path


@contextmanager
def standalone_monitor(**settings: Any) -> Iterator[StandaloneMonitor]:
    """A rank monitor for this process, as nvrx-run would start one; for one rank at a time.

    `settings`: fields of FaultToleranceConfig, `rank_heartbeat_timeout=2.0` for example. Inside the block
    RankMonitorClient works in this process and in those it starts (FT_RANK_MONITOR_IPC_SOCKET is set, and RANK to 0
    where it is not); afterwards the environment is as it was. A hang is told and not punished; after it nothing is
    watched any more. Raises UsageError for a wrong setting, OSError if no process can be started.
    """
    config = FaultToleranceConfig.from_kwargs(**settings)
    before = {name: os.environ.get(name) for name in (wire.SOCKET_ENV, "RANK")}
    with tempfile.TemporaryDirectory(prefix="nvrx-", ignore_cleanup_errors=True) as private_dir:
        monitor = StandaloneMonitor()
        with monitor._watching(private_dir, config) as path:
            os.environ[wire.SOCKET_ENV] = path
            os.environ.setdefault("RANK", "0")
            try:
                yield monitor
            finally:
                os.environ.update(
                    {name: value for name, value in before.items() if value is not None}
                )
                for name in [name for name, value in before.items() if value is None]:
                    del os.environ[name]
