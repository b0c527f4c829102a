"""A real rank monitor without a launcher: to try RankMonitorClient in a notebook, and to test scripts that use it.

    with standalone_monitor(rank_section_timeouts={"step": 2.0}) as monitor:
        client = RankMonitorClient()
        client.init_workload_monitoring()
        client.start_section("step")
        print(monitor.wait_for_hang(10.0))  # "in section 'step' for 2.00 s (limit 2 s)"

What the monitor ends when it finds a hang is a stand-in process, not the caller.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvrx_slurm.agent.monitors import SOCKET_ENV, RankMonitor
from nvrx_slurm.config.ft import FaultToleranceConfig

if TYPE_CHECKING:
    from nvrx_slurm.fault_tolerance import WorkloadControlRequest
    from nvrx_slurm.types import WorkloadAction

_START_TIMEOUT_S = 30.0
_STAND_IN = [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"]  # ends with us, however we end


class StandaloneMonitor:
    """What `standalone_monitor()` gives.

    `hangs`: a sentence for the hang that was found, if one was. `requests`: the workload control requests that were
    sent, in order; nothing follows from them here.
    """

    def __init__(self, config: FaultToleranceConfig) -> None:
        self.hangs: list[str] = []
        self.requests: list[WorkloadControlRequest] = []
        self._asked = threading.Condition()
        self._config = config
        self._hung = threading.Event()
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._socket = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._monitor: RankMonitor | None = None
        self._thread = threading.Thread(target=self._run, name="standalone-monitor", daemon=True)

    @property
    def pid(self) -> int | None:
        """The rank monitor's process id (None while it is being replaced)."""
        return self._monitor.pid if self._monitor else None

    def wait_for_hang(self, timeout_s: float) -> str:
        """The sentence of the hang, as soon as there is one. Raises TimeoutError after `timeout_s` seconds."""
        if not self._hung.wait(timeout_s):
            raise TimeoutError(f"the rank monitor found no hang within {timeout_s:g} s")
        return self.hangs[0]

    def wait_for_request(self, timeout_s: float, count: int = 1) -> WorkloadControlRequest:
        """The request number `count` (>= 1), as soon as it is there. Raises TimeoutError after `timeout_s` seconds."""
        with self._asked:
            if not self._asked.wait_for(lambda: len(self.requests) >= count, timeout_s):
                raise TimeoutError(f"the rank monitor got {len(self.requests)} requests within {timeout_s:g} s")
            return self.requests[count - 1]

    def warn(self) -> None:
        """What the warning signal does in a job: from now on `should_stop()` says yes."""
        assert self._loop is not None and self._monitor is not None
        monitor, done = self._monitor, threading.Event()

        def warn() -> None:
            monitor.warn()
            done.set()

        self._loop.call_soon_threadsafe(warn)
        if not done.wait(_START_TIMEOUT_S):
            raise TimeoutError(f"the rank monitor could not warn within {_START_TIMEOUT_S:g} s")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        private = Path(tempfile.mkdtemp(prefix="nvrx-"))
        self._monitor = monitor = RankMonitor(0, private, self._on_hang, self._on_asked)
        stand_in: subprocess.Popen[bytes] | None = None
        try:
            monitor.start()
            self._socket = monitor.worker_env()[SOCKET_ENV]
            stand_in = subprocess.Popen(_STAND_IN, stdin=subprocess.PIPE, start_new_session=True)
            self._watch(stand_in)
            self._ready.set()
            await self._end.wait()
        finally:
            await monitor.close()
            if stand_in is not None:
                stand_in.kill()
                stand_in.communicate()
            shutil.rmtree(private, ignore_errors=True)

    def _watch(self, stand_in: subprocess.Popen[bytes]) -> None:
        assert self._monitor is not None
        pidfd = os.pidfd_open(stand_in.pid)
        try:
            self._monitor.watch(
                pid=stand_in.pid,
                pidfd=pidfd,
                cycle=0,
                rank=int(os.environ.get("RANK", "0")),
                limits=self._config.rank_limits(),
                signum=self._config.rank_termination_signal,
                cfg=self._config.rank_settings(),
            )
        finally:
            os.close(pidfd)

    def _on_hang(self, local_rank: int, message: Mapping[str, Any]) -> None:
        self.hangs.append(str(message["sentence"]))
        self._hung.set()

    def _on_asked(self, local_rank: int, action: WorkloadAction, description: str) -> None:
        from nvrx_slurm.fault_tolerance import WorkloadControlRequest

        with self._asked:
            self.requests.append(WorkloadControlRequest(action, description))
            self._asked.notify_all()

    def _start(self) -> None:
        self._thread.start()
        if not self._ready.wait(_START_TIMEOUT_S):
            raise TimeoutError(f"the rank monitor did not start within {_START_TIMEOUT_S:g} s")
        if self._failure is not None:
            raise self._failure

    def _stop(self) -> None:
        if self._loop is not None and self._end is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_START_TIMEOUT_S)


@contextmanager
def standalone_monitor(**settings: Any) -> Iterator[StandaloneMonitor]:
    """A rank monitor for this process, as nvrx-run would start one; for one rank at a time.

    `settings`: fields of FaultToleranceConfig, `rank_heartbeat_timeout=2.0` for example. Inside the block
    RankMonitorClient works in this process and in those it starts (FT_RANK_MONITOR_IPC_SOCKET is set, and RANK to 0
    where it is not); afterwards the environment is as it was. A hang is told and not punished; after it nothing is
    watched any more. Raises UsageError for a wrong setting, OSError if no process can be started.
    """
    monitor = StandaloneMonitor(FaultToleranceConfig.from_kwargs(**settings))
    changed = {name: os.environ.get(name) for name in (SOCKET_ENV, "RANK")}
    try:
        monitor._start()
        os.environ[SOCKET_ENV] = monitor._socket
        os.environ.setdefault("RANK", "0")
        yield monitor
    finally:
        for name, value in changed.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        monitor._stop()
