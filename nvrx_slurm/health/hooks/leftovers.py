"""GPU processes that a job left behind: the epilog ends those, and no others.

A process belongs to the job if its cgroup does (`job_ID` as a part of a path of Slurm's). A GPU process has a
/dev/nvidiaN open.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Collection

from nvrx_slurm.child import bounded_process
from nvrx_slurm.health.check import Check, Judgement, NodeView, Verdict, listed
from nvrx_slurm.health.policy import LEFTOVERS
from nvrx_slurm.slurm import jobs
from nvrx_slurm.system.hardware import Absent

WAIT_S = 5.0  # for them to end; a process that takes longer is blocked in the driver
_MARGIN_S = 0.3
_GPU = re.compile(r"nvidia[0-9]+")


def check(job: Collection[str]) -> Check:
    """The check that ends them and fails if one does not end. `job`: its names in cgroups: its id, and from Slurm 26.05
    its SLUID."""
    return Check(
        name=LEFTOVERS,
        reads="/proc/*/fd and cgroup",
        fails="A GPU process of the job that ended does not end on SIGKILL.",
        examine=lambda node, expected: end(node, job),
        budget_s=WAIT_S + 2.0,
    )


def end(node: NodeView, job: Collection[str]) -> Judgement:
    """Send SIGKILL to each GPU process of the job and wait for their end. Raises Absent on a node without GPU."""
    if not any(_GPU.fullmatch(name) for name in node.names("/dev")):
        raise Absent("there is no GPU")
    waiting: dict[int, str] = {}  # pidfd -> "name (pid)"
    for pid in [
        int(name) for name in node.names("/proc") if name.isdecimal() and int(name) != os.getpid()
    ]:
        if not _is_to_end(node, job, pid):
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue  # gone
        # asked again with the pidfd open: the pid was not recycled in between
        if _is_to_end(node, job, pid):
            try:
                waiting[pidfd] = f"{node.text(f'/proc/{pid}/comm', 64).strip()} ({pid})"
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except OSError:
                continue  # gone; its end is seen below
    until_s = min(time.monotonic() + WAIT_S, node.deadline_s - _MARGIN_S)
    ended = list[str]()
    while waiting and time.monotonic() < until_s:
        ended += [waiting.pop(pidfd) for pidfd in bounded_process.wait(waiting, until_s)]
    if waiting:
        return (
            Verdict.FAIL,
            f"GPU processes of a job that ended do not end: {listed(waiting.values())}",
        )
    if ended:
        return Verdict.PASS, f"ended {len(ended)} left-over GPU processes: {listed(ended)}"
    return Verdict.PASS, "no GPU process was left over"


def _is_to_end(node: NodeView, job: Collection[str], pid: int) -> bool:
    try:
        return not jobs.of_cgroup(node, pid).isdisjoint(job) and _has_gpu_open(node, pid)
    except OSError:
        return False  # gone


def _has_gpu_open(node: NodeView, pid: int) -> bool:
    devices = node.path("/dev/")
    for fd in node.names(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(node.path(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue  # closed
        if target.startswith(devices) and _GPU.fullmatch(target[len(devices) :]):
            return True
    return False
