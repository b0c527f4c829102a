"""What a node's program has before its own modules are imported: its private directory, the process of health checks.

The interpreter of that process and its imports take about as long as ours, so both come up side by side. This module
needs no event loop, and imports little.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from nvrx_slurm.child import processes
from nvrx_slurm.config.layers import Config
from nvrx_slurm.node.preflight.preflight_settings import PreflightSpec, preflight_spec
from nvrx_slurm.system.files import HEALTH_NAME, PrivateDir

Spawned = tuple[processes.Child, socket.socket]  # the process, and our end of its stdin, stdout and stderr


def spawn(spec: PreflightSpec, state_dir: Path) -> Spawned:
    """Start the process. Raises OSError."""
    command = [*spec.program, *spec.arguments, f"--state-dir={state_dir}"]
    start = partial(processes.start, command, os.environ)
    return processes.with_channel(lambda fd: start(fd, fd, stdin=fd), socket.SOCK_STREAM)


class HeadStart(NamedTuple):
    """The agent's private directory, and the process where there is one."""

    private_dir: PrivateDir
    checks: Spawned | None


@contextlib.contextmanager
def started(config: Config) -> Iterator[HeadStart]:
    """Start the process if this job has health checks; at the end kill it, if the agent has not.

    Raises UsageError where no private directory can be made.
    """
    _hold_standard_descriptors()
    head_start = HeadStart(PrivateDir(), None)
    spec = preflight_spec(config)
    if spec.checks:
        with contextlib.suppress(OSError):  # the agent tries again, and tells
            head_start = head_start._replace(checks=spawn(spec, head_start.private_dir.path / HEALTH_NAME))
    try:
        yield head_start
    finally:
        if head_start.checks is not None and head_start.checks[0].pid in processes.own_pids():
            child, channel = head_start.checks
            child.reap()
            channel.close()
        head_start.private_dir.remove()


def _hold_standard_descriptors() -> None:
    """Where 0, 1 or 2 came closed, keep them taken: else a log of ours gets that number and the console's lines."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.dup(fd)
    os.close(fd)
