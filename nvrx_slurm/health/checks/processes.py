"""Processes that nobody can end: blocked in the kernel, or dead and not collected."""

from __future__ import annotations

import time
from typing import NamedTuple

from nvrx_slurm.health.check import QUICK, Check, Expected, NodeView, Setting, Verdict, listed

_MOST_LOOKED_AT = 65536
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD of include/linux/sched.h


class Process(NamedTuple):
    """From /proc/PID/stat (proc(5)). `start`: in clock ticks since boot, with the pid its identity."""

    pid: int
    name: str
    state: str
    flags: int
    start: int


class Facts(NamedTuple):
    """`stuck`: in state D and not scheduled once between two looks `apart_s` seconds apart."""

    stuck: list[Process]
    zombies: list[Process]
    apart_s: float


def gather(node: NodeView, expected: Expected) -> Facts:
    """All processes; only if there are some in state D, a second look at them after `stuck_s` seconds."""
    everything = [found for pid in _pids(node) if (found := _process(node, pid))]
    zombies = [process for process in everything if process.state == "Z"]
    # A kernel thread sleeps in D as a matter of course.
    blocked = {p: _switches(node, p.pid) for p in everything if p.state == "D" and not p.flags & _KERNEL_THREAD}
    if not blocked:
        return Facts([], zombies, 0.0)
    apart_s = expected["stuck_s"]
    node.doing(f"looking whether {len(blocked)} processes stay blocked")
    time.sleep(apart_s)
    stuck = [p for p, switches in blocked.items() if _process(node, p.pid) == p and _switches(node, p.pid) == switches]
    return Facts(stuck, zombies, apart_s)


def _pids(node: NodeView) -> list[int]:
    return [int(name) for name in node.names("/proc") if name.isdecimal()][:_MOST_LOOKED_AT]


def _process(node: NodeView, pid: int) -> Process | None:
    """None if it is gone."""
    try:
        return parsed(node.text(f"/proc/{pid}/stat", 4096), f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None


def parsed(stat: str, file: str = "/proc/PID/stat") -> Process:
    """A line of /proc/PID/stat; a name may hold anything, parentheses too. Raises ValueError that names `file`."""
    before, _, after = stat.rpartition(")")
    pid, _, name = before.partition("(")
    fields = after.split()
    if len(fields) < 20 or not all(word.isdecimal() for word in (pid.strip(), fields[6], fields[19])):
        raise ValueError(f"{file} holds {stat[:40]!r}")
    return Process(int(pid), name, fields[0], int(fields[6]), int(fields[19]))


def _switches(node: NodeView, pid: int) -> tuple[str, ...]:
    """The lines that count context switches; () if it is gone or does not tell."""
    try:
        status = node.text(f"/proc/{pid}/status", 65536)
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return tuple(line for line in status.splitlines() if "ctxt_switches" in line)


def judge(facts: Facts, expected: Expected) -> tuple[Verdict, str]:
    """Fails for any process that stayed blocked, and for more zombies than `zombies_max`."""
    if facts.stuck:
        names = listed(f"{process.name} ({process.pid})" for process in facts.stuck)
        return Verdict.FAIL, f"blocked in the kernel for {facts.apart_s:g} s and more: {names}"
    if len(facts.zombies) > expected["zombies_max"]:
        names = listed(dict.fromkeys(process.name for process in facts.zombies))
        return Verdict.FAIL, f"{len(facts.zombies)} zombies: {names}"
    return Verdict.PASS, f"nothing is blocked in the kernel, {len(facts.zombies)} zombies"


CHECKS = (
    Check(
        name="stuck-processes",
        lane=QUICK,
        reads="/proc/*/stat, and where something is in state D /proc/*/status",
        fails="A process stays blocked in the kernel (state D) without being scheduled, or there are too many zombies.",
        gather=gather,
        judge=judge,
        contexts=("epilog", "periodic", "manual"),
        settings=(
            Setting("stuck_s", "seconds", 3.0, "how long a process must stay blocked, in seconds"),
            Setting("zombies_max", "count", 200, "zombies that are nothing to worry about"),
        ),
        budget_s=10.0,
        on_fail="warn",
    ),
)
