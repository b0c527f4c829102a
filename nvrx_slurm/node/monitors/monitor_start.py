"""Starts the processes of rank monitors: one interpreter, which forks several, so that they share their memory."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from nvrx_slurm.child import processes
from nvrx_slurm.child.supervised import RestartedProcess
from nvrx_slurm.monitor.lease import Lease

_ROOT = str(Path(__file__).resolve().parents[2])
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from nvrx_slurm.monitor.main import main; sys.exit(main(sys.argv[2:]))"
)


def start(
    directory: Path, lease: Lease | None, local_ranks: Sequence[int]
) -> tuple[processes.Child, list[socket.socket]]:
    """The process, and our ends of the monitors' control sockets. Raises OSError.

    For one rank the process is its monitor. For several it forks them, tells the pids on the sockets, and ends.
    """
    with contextlib.ExitStack() as on_error, contextlib.ExitStack() as always:
        ours, theirs = list[socket.socket](), list[int]()
        for _ in local_ranks:
            mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.append(on_error.enter_context(mine))
            theirs.append(always.enter_context(its).fileno())
            mine.setblocking(False)
        which = [str(number) for pair in zip(local_ranks, theirs, strict=True) for number in pair]
        lease_fd, listener = (-1, -1) if lease is None else (lease.fd, lease.listener)
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, _ROOT, os.fspath(directory), str(lease_fd), *which]
        child = processes.start_directly(command, pass_fds=[fd for fd in (lease_fd, listener, *theirs) if fd >= 0])
        on_error.pop_all()
    return child, ours


class Forkable(Protocol):
    """A rank monitor without a process."""

    local_rank: int

    def connect(self, control: socket.socket) -> None:
        """`control`: will lead to its process."""

    def take_over(self) -> None:
        """Its process is our child now, unless the fork failed."""

    def spawn(self) -> None:
        """Start a process for this monitor alone."""


class MonitorStarter(RestartedProcess):
    """Starts the first processes of `monitors` together, `after_s` seconds from now; 0: at once.

    The forked ones become children of this agent, which has to be a subreaper (system.processes.Orphans).
    """

    def __init__(self, directory: Path, lease: Lease | None, monitors: Sequence[Forkable], after_s: float) -> None:
        super().__init__()
        self._directory, self._lease = directory, lease
        self._monitors = monitors
        if after_s:
            self._timer = self._loop.call_later(after_s, self.spawn)
        else:
            self.spawn()

    def spawn(self) -> None:
        """Start them; those that this fails for try again on their own."""
        local_ranks = [monitor.local_rank for monitor in self._monitors]
        with contextlib.suppress(OSError):
            if len(local_ranks) > 1:
                child, controls = start(self._directory, self._lease, local_ranks)
                for monitor, control in zip(self._monitors, controls, strict=True):
                    monitor.connect(control)
                return self._adopt(child, {})
        for monitor in self._monitors:
            monitor.spawn()

    def _on_exit(self, pid: int, code: int) -> None:
        for monitor in self._monitors:
            monitor.take_over()

    async def close(self) -> None:
        """End the starter if it has not ended; at most CLOSE_TIMEOUT_S."""
        await self._close(self._kill)
