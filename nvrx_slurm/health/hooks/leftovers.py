"""GPU processes that a job left behind: the epilog ends them, and nobody else's.

A process belongs to the job if its cgroup is the job's (`job_ID` as a part of a path of Slurm's). Where there are no
such cgroups: if it runs as the job's user, who is not root, its environment says SLURM_JOB_ID of this job, and its
cgroup is no other job's. It is a GPU process if it has a /dev/nvidiaN open.

Who traces such a process (ptrace(2)) can keep it from its end: it is ended, too, if it is the same user's or the job's.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from typing import NamedTuple

from nvrx_slurm.health.check import Check, Expected, NodeView, Verdict, listed
from nvrx_slurm.slurm import jobs
from nvrx_slurm.system.hardware import Absent

WAIT_S = 5.0  # for them to end; a process that holds on longer is blocked in the driver
NAME = "gpu-leftovers"
_ROUND_S = 0.5  # then it is looked who traces those that are still there
_MARGIN_S = 0.3
_GPU = re.compile(r"nvidia[0-9]+")
_PID = re.compile(r"[0-9]{1,9}")


class Job(NamedTuple):
    """`ids`: what may stand for the job in a cgroup (its id; from Slurm 26.05 its SLUID)."""

    ids: tuple[str, ...]
    uid: int


class Facts(NamedTuple):
    """ "name (pid)" of those that were ended, of those that were not, and of those that somebody holds by ptrace."""

    ended: list[str]
    left: list[str]
    held: tuple[str, ...] = ()


def check(job: Job) -> Check:
    """Ends them; fails if one does not end."""
    return Check(
        name=NAME,
        reads="/proc/*/fd, cgroup, status and environ",
        fails="A GPU process of the job that ended does not end on SIGKILL, and nobody traces it.",
        gather=lambda node, expected: end(node, job),
        judge=judge,
        budget_s=WAIT_S + 2.0,
    )


def end(node: NodeView, job: Job) -> Facts:
    """SIGKILL to each GPU process of the job, then wait for their end. Raises Absent where there is no GPU."""
    if not any(_GPU.fullmatch(name) for name in node.names("/dev")):
        raise Absent("there is no GPU")
    waiting: dict[int, tuple[int, str]] = {}  # pidfd -> (pid, who)
    for pid in [int(name) for name in node.names("/proc") if _PID.fullmatch(name) and int(name) != os.getpid()]:
        if not _to_end(node, job, pid):
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue  # gone
        if _to_end(node, job, pid):  # asked with the pidfd open: nobody else got the number since
            try:
                waiting[pidfd] = pid, f"{node.text(f'/proc/{pid}/comm', 64).strip()} ({pid})"
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            except OSError:
                continue  # gone, and its end is seen below
    until_s = min(time.monotonic() + WAIT_S, node.deadline_s - _MARGIN_S)
    ended = _ended(waiting, min(until_s, time.monotonic() + _ROUND_S))
    while waiting and time.monotonic() < until_s:
        for pid, _ in waiting.values():
            _end_tracers(node, job, pid)
        ended += _ended(waiting, min(until_s, time.monotonic() + _ROUND_S))
    held = tuple(who for pid, who in waiting.values() if _is_held(node, pid))
    return Facts(ended, [who for _, who in waiting.values() if who not in held], held)


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
    return _is_of_user(node, job, pid) and job.ids[0] in jobs.of_environment(node, pid)


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


def _is_of_user(node: NodeView, job: Job, pid: int) -> bool:
    """Whether the process runs as the job's user. Raises OSError when it is gone."""
    return _said(r"Uid:\s+(\d+)", node.text(f"/proc/{pid}/status", 65536)) == str(job.uid)


def _said(line: str, status: str) -> str:
    """What a line of /proc/PID/status says, "" if there is none."""
    found = re.search(f"^{line}", status, re.MULTILINE)
    return found[1] if found else ""


def _ended(waiting: dict[int, tuple[int, str]], until_s: float) -> list[str]:
    """Take out those that end by then."""
    poller, ended = select.poll(), list[str]()
    for pidfd in waiting:
        poller.register(pidfd, select.POLLIN)
    while waiting and (left_s := until_s - time.monotonic()) > 0:
        for pidfd, _ in poller.poll(int(left_s * 1000) + 1):
            poller.unregister(pidfd)
            ended.append(waiting.pop(pidfd)[1])
    return ended


# --- who is traced ----------------------------------------------------------------------------------------------------


def _threads(node: NodeView, pid: int) -> list[str]:
    """/proc/PID/task/TID/status of each thread that is left; any of them may be traced."""
    found = []
    for tid in node.names(f"/proc/{pid}/task"):
        try:
            found.append(node.text(f"/proc/{pid}/task/{tid}/status", 65536))
        except OSError:
            continue  # gone
    return found


def _tracers(node: NodeView, pid: int) -> set[int]:
    try:
        return {int(tracer) for status in _threads(node, pid) if (tracer := _said(r"TracerPid:\s+([1-9]\d*)", status))}
    except OSError:
        return set()  # gone


def _end_tracers(node: NodeView, job: Job, pid: int) -> None:
    """SIGKILL to those of the job and of its user; also to who traces these."""
    todo, ended = [pid], set[int]()
    while todo:
        traced = todo.pop()
        for tracer in _tracers(node, traced) - ended:
            try:
                pidfd = os.pidfd_open(tracer)
            except OSError:
                continue  # gone, or in another PID namespace
            try:
                if tracer in _tracers(node, traced) and _may_end(node, job, tracer):  # the number is still its own
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    ended.add(tracer)
                    todo.append(tracer)
            except OSError:
                continue  # gone
            finally:
                os.close(pidfd)


def _may_end(node: NodeView, job: Job, tracer: int) -> bool:
    return belongs(node, job, tracer) or (job.uid != 0 and _is_of_user(node, job, tracer))


def _is_held(node: NodeView, pid: int) -> bool:
    """Whether somebody stopped it, and the driver does not: nothing is known of the GPU then."""
    try:
        states = {_said(r"State:\s+(\S)", status) for status in _threads(node, pid)}
    except OSError:
        return False
    return "D" not in states and bool(states & {"t", "T"})


def judge(facts: Facts, expected: Expected) -> tuple[Verdict, str]:
    """Fails for each that did not end, unless somebody only keeps it from ending."""
    if facts.left:
        return Verdict.FAIL, f"GPU processes of a job that ended do not end: {listed(facts.left)}"
    if facts.held:
        return (
            Verdict.UNKNOWN,
            f"GPU processes of a job that ended are stopped by who traces them: {listed(facts.held)}",
        )
    if facts.ended:
        return Verdict.PASS, f"ended {len(facts.ended)} left-over GPU processes: {listed(facts.ended)}"
    return Verdict.PASS, "no GPU process was left over"
