"""GPU processes that a job left behind: the epilog ends them, and nobody else's.

A process belongs to the job if its cgroup is the job's (`job_ID` as a part of a path of Slurm's). Where there are no
such cgroups: if it runs as the job's user, who is not root, its environment says SLURM_JOB_ID of this job, and its
cgroup is no other job's. It is a GPU process if it has a /dev/nvidiaN open.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from typing import NamedTuple

from nvrx_slurm.health import jobs
from nvrx_slurm.health.check import Check, Expected, NodeView, Verdict, listed
from nvrx_slurm.system.hardware import Absent

WAIT_S = 5.0  # for them to end; a process that holds on longer is blocked in the driver
NAME = "gpu-leftovers"
_MARGIN_S = 0.3
_GPU = re.compile(r"nvidia[0-9]+")
_PID = re.compile(r"[0-9]{1,9}")


class Job(NamedTuple):
    """`ids`: what may stand for the job in a cgroup (its id; from Slurm 26.05 its SLUID)."""

    ids: tuple[str, ...]
    uid: int


class Facts(NamedTuple):
    """ "name (pid)" of those that were ended, and of those that were not."""

    ended: list[str]
    left: list[str]


def check(job: Job) -> Check:
    """Ends them; fails if one does not end."""
    return Check(
        name=NAME,
        reads="/proc/*/fd, cgroup, status and environ",
        fails="A GPU process of the job that ended does not end on SIGKILL.",
        gather=lambda node, expected: end(node, job),
        judge=judge,
        budget_s=WAIT_S + 2.0,
    )


def end(node: NodeView, job: Job) -> Facts:
    """SIGKILL to each GPU process of the job, then wait for their end. Raises Absent where there is no GPU."""
    if not any(_GPU.fullmatch(name) for name in node.names("/dev")):
        raise Absent("there is no GPU")
    waiting: dict[int, str] = {}  # pidfd -> who
    for pid in [int(name) for name in node.names("/proc") if _PID.fullmatch(name) and int(name) != os.getpid()]:
        if not _to_end(node, job, pid):
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue  # gone
        if _to_end(node, job, pid):  # asked with the pidfd open: nobody else got the number since
            try:
                waiting[pidfd] = f"{node.text(f'/proc/{pid}/comm', 64).strip()} ({pid})"
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except OSError:
                continue  # gone, and its end is seen below
    ended = _wait(waiting, min(time.monotonic() + WAIT_S, node.deadline_s - _MARGIN_S))
    return Facts(ended, [who for who in waiting.values() if who not in ended])


def _to_end(node: NodeView, job: Job, pid: int) -> bool:
    try:
        return belongs(node, job, pid) and _holds_gpu(node, pid)
    except (OSError, ValueError):
        return False  # gone


def belongs(node: NodeView, job: Job, pid: int) -> bool:
    """Whether the process is the job's, by the rules above. Raises OSError when it is gone."""
    if found := jobs.of_cgroup(node, pid):
        return bool(found & set(job.ids))
    if job.uid == 0:
        return False
    uids = re.search(r"^Uid:\s+(\d+)", node.text(f"/proc/{pid}/status", 65536), re.MULTILINE)
    if uids is None or int(uids[1]) != job.uid:
        return False
    return job.ids[0] in jobs.of_environment(node, pid)


def _holds_gpu(node: NodeView, pid: int) -> bool:
    devices = node.path("/dev/")
    for fd in node.names(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(node.path(f"/proc/{pid}/fd/{fd}"))
        except OSError:
            continue  # closed
        if target.startswith(devices) and _GPU.fullmatch(target[len(devices) :]):
            return True
    return False


def _wait(waiting: dict[int, str], until_s: float) -> list[str]:
    """Who ended by then."""
    poller, ended = select.poll(), list[str]()
    for pidfd in waiting:
        poller.register(pidfd, select.POLLIN)
    while len(ended) < len(waiting) and (left_s := until_s - time.monotonic()) > 0:
        for pidfd, _ in poller.poll(int(left_s * 1000) + 1):
            poller.unregister(pidfd)
            ended.append(waiting[pidfd])
    return ended


def judge(facts: Facts, expected: Expected) -> tuple[Verdict, str]:
    """Fails for each that did not end."""
    if facts.left:
        return Verdict.FAIL, f"GPU processes of a job that ended do not end: {listed(facts.left)}"
    if facts.ended:
        return Verdict.PASS, f"ended {len(facts.ended)} left-over GPU processes: {listed(facts.ended)}"
    return Verdict.PASS, "no GPU process was left over"
