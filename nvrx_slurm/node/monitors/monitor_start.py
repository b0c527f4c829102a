"""Starts the processes of rank monitors: one interpreter, which forks several, so that they share their memory."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_slurm.child import bootstrap, processes
from nvrx_slurm.child.supervised import SupervisedProcess
from nvrx_slurm.monitor.lease import Lease

if TYPE_CHECKING:
    from nvrx_slurm.node.monitors.monitors import RankMonitor


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
        arguments = (os.fspath(directory), str(lease_fd), *which)
        command = bootstrap.command("nvrx_slurm.monitor.main", *arguments, libraries=False)
        child = processes.start_directly(command, pass_fds=[fd for fd in (lease_fd, listener, *theirs) if fd >= 0])
        on_error.pop_all()
    return child, ours


class MonitorStarter(SupervisedProcess):
    """Starts the first processes of `monitors` together, `after_s` seconds from now; 0: at once.

    The forked ones become children of this agent, which has to be a subreaper (child.processes.Orphans).
    """

    def __init__(self, directory: Path, lease: Lease | None, monitors: Sequence[RankMonitor], after_s: float) -> None:
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
                return self._adopt(child, None)
        for monitor in self._monitors:
            monitor.spawn()

    def _on_exit(self, pid: int, code: int) -> None:
        for monitor in self._monitors:
            monitor.take_over(wanted=not self._closed)
