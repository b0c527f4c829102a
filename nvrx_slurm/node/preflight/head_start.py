"""What a node's program has before its own modules are imported: its private directory, the process of health checks.

The interpreter of that process and its imports take about as long as ours, so both come up side by side. This module
needs no event loop, and imports little.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from nvrx_slurm.child import bootstrap, processes
from nvrx_slurm.config.layers import Config
from nvrx_slurm.declared import Record, field
from nvrx_slurm.system.files import HEALTH_NAME, PrivateDir

ANSWER_MARGIN_S = 2.0  # for the process to say that time was up
_CLOSE_S = 1.0  # for a process that has not answered to be killed
_PREFLIGHT_S = 5.0  # for all checks of the preflight together
_NODE_SERVICE_S = 65.0  # longest wait where an nvhcd service is asked: that has 60 s
_IDLE_INTERVALS = 12  # of the watch: how often all checks of an idle node run
Spawned = tuple[processes.Child, socket.socket]  # the process, and our end of its stdin, stdout and stderr


class Reclaim(Record):
    """How to wait for GPU memory: at most `timeout_s` seconds (0: not at all), until no GPU holds more than
    `tolerance_mb` MiB, with a reading every `poll_s` seconds. `gpus`: the first of
    this agent, and the first that is not; by number among those it sees."""

    timeout_s: float
    tolerance_mb: float
    poll_s: float
    gpus: tuple[int, int | None] = (0, None)


class PreflightSpec(Record):
    """What the health checks are told, and how long to wait for what (seconds)."""

    arguments: tuple[str, ...]
    reclaim: Reclaim
    answer_s: float = _PREFLIGHT_S + ANSWER_MARGIN_S
    idle_s: float = 60.0  # between two runs of all checks while the node is idle
    injected: frozenset[tuple[int, int]] = frozenset()  # (cycle, infra rank) at which the preflight fails, for tests
    program: Sequence[str] = field(default_factory=partial(bootstrap.command, "nvrx_slurm.health.__main__", "--serve"))
    checks: bool = True  # False: the process is started only to read GPU memory

    @property
    def longest_s(self) -> float:
        """How long one preflight may take."""
        return self.reclaim.timeout_s + ANSWER_MARGIN_S + _CLOSE_S + self.answer_s


def preflight_spec(config: Config) -> PreflightSpec:
    """What the settings ask for. Without the checks, the wait for GPU memory remains as it is."""
    ft = config.ft
    wait = Reclaim(ft.gpu_memory_reclaim_timeout, ft.gpu_memory_tolerance_mb, ft.gpu_memory_poll_interval)
    if not ft.node_health_checks:
        return PreflightSpec(("--no-checks",), wait, answer_s=0.0, checks=False)
    deadline_s = _NODE_SERVICE_S if ft.node_health_check_endpoint else _PREFLIGHT_S
    told = ["--when=preflight", f"--sysroot={config.launch.sysroot}", f"--deadline={deadline_s:g}"]
    told += [f"--interval={ft.node_health_check_interval:g}", "--watch=gpu-recovery"]
    if ft.enable_dist_storage_healthcheck:
        told += ["--include=lustre", "--include=mounts"]
    if not ft.enable_nic_healthcheck:
        told += ["--skip=nic-ports"]
    if ft.enable_nic_monitor:
        told += ["--watch=nic-errors"]
    expected = {
        "storage_paths": ft.storage_healthcheck_path,
        "node_service": ft.node_health_check_endpoint,
        "link_state_path": ft.link_state_path_template,
        "link_downed_path": ft.link_down_path_template,
        "storage_hang_is_failure": "true" if ft.storage_hang_is_failure else "",
    }
    told += [f"--expect={name}={value}" for name, value in expected.items() if value]
    return PreflightSpec(
        tuple(told),
        wait,
        deadline_s + ANSWER_MARGIN_S,
        _IDLE_INTERVALS * ft.node_health_check_interval,
        config.launch.inject_gpu_failure,
    )


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
    """Keep the descriptors 0, 1 and 2 taken where they came closed: else a log of ours gets that number and the
    console's lines."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.dup(fd)
    os.close(fd)
