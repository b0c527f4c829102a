"""The process of the health checks, started before the agent's own modules are imported.

Its interpreter and its imports take about as long as ours, so both come up side by side. This module needs no event
loop, and imports little.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nvrx_slurm.child import processes
from nvrx_slurm.config.layers import Config
from nvrx_slurm.node.preflight.preflight_settings import PreflightSpec, preflight_spec
from nvrx_slurm.system.files import HEALTH_NAME, PrivateDir


class Spawned(NamedTuple):
    """The process and our ends of its pipes."""

    child: processes.Child
    stdin: int
    stdout: int
    stderr: int


def spawn(spec: PreflightSpec, state_dir: Path) -> Spawned:
    """Start the process. Raises OSError."""
    command = [sys.executable, *spec.program, *spec.arguments, f"--state-dir={state_dir}"]
    with contextlib.ExitStack() as on_error, contextlib.ExitStack() as always:
        pipes = []
        for ours_first in (False, True, True):
            ends = os.pipe()
            ours, theirs = ends if ours_first else ends[::-1]
            on_error.callback(os.close, ours)
            pipes.append((ours, always.enter_context(open(theirs, "rb" if not ours_first else "wb"))))
        (stdin, their_in), (stdout, their_out), (stderr, their_err) = pipes
        child = processes.start(command, os.environ, their_out, their_err, stdin=their_in)
        on_error.pop_all()
    return Spawned(child, stdin, stdout, stderr)


class Early(NamedTuple):
    """The agent's private directory, and the process where there is one."""

    private_dir: PrivateDir
    resident: Spawned | None


@contextlib.contextmanager
def started(config: Config) -> Iterator[Early]:
    """Start the process if this job has health checks; at the end kill it, if the agent has not.

    Raises UsageError where no private directory can be made.
    """
    _hold_standard_descriptors()
    early = Early(PrivateDir(), None)
    spec = preflight_spec(config)
    with contextlib.suppress(OSError):  # the agent tries again, and tells
        early = early._replace(resident=spawn(spec, early.private_dir.path / HEALTH_NAME) if spec.checks else None)
    try:
        yield early
    finally:
        resident = early.resident
        if resident is not None and resident.child.pid in processes.own_pids():
            resident.child.reap()
            for fd in resident[1:]:
                os.close(fd)
        early.private_dir.remove()


def _hold_standard_descriptors() -> None:
    """Where 0, 1 or 2 came closed, keep them taken: else a log of ours gets that number and the console's lines."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.dup(fd)
    os.close(fd)
