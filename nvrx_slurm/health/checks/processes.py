"""Processes that SIGKILL does not end: blocked in the kernel, or dead and not collected."""

from __future__ import annotations

import time
from typing import NamedTuple

from nvrx_slurm.health.check import Expected, NodeView, Setting, Verdict, judged, listed, system_check

_MOST_LOOKED_AT = 65536
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD of include/linux/sched.h; these sleep in D as a matter of course
_SETTINGS = (
    Setting("stuck_s", "seconds", 3.0, "how long a process must stay blocked, in seconds"),
    Setting("zombies_max", "count", 200, "zombies that a node may have"),
)


class Process(NamedTuple):
    """From /proc/PID/stat (proc(5)). `start`: in clock ticks since boot, with the pid its identity."""

    pid: int
    name: str
    state: str
    flags: int
    start: int


class Facts(NamedTuple):
    """`stuck`: in state D and not scheduled between two looks `apart_s` seconds apart."""

    stuck: list[Process]
    zombies: list[Process]
    apart_s: float


def gather(node: NodeView, expected: Expected) -> Facts:
    """All processes; only if there are some in state D, a second look at them after `stuck_s` seconds."""
    pids = [int(name) for name in node.names("/proc") if name.isdecimal()][:_MOST_LOOKED_AT]
    everything = [found for pid in pids if (found := _process(node, pid))]
    zombies = [process for process in everything if process.state == "Z"]
    blocked = {p: _switches(node, p.pid) for p in everything if p.state == "D" and not p.flags & _KERNEL_THREAD}
    if not blocked:
        return Facts([], zombies, 0.0)
    node.doing(f"looking whether {len(blocked)} processes stay blocked")
    time.sleep(expected["stuck_s"])
    stuck = [p for p, switches in blocked.items() if _process(node, p.pid) == p and _switches(node, p.pid) == switches]
    return Facts(stuck, zombies, expected["stuck_s"])


def _process(node: NodeView, pid: int) -> Process | None:
    """None if it is gone."""
    try:
        return parsed(node.text(f"/proc/{pid}/stat", 4096))
    except (FileNotFoundError, ProcessLookupError):
        return None


def parsed(stat: str) -> Process:
    """A line of /proc/PID/stat; a name may hold anything, parentheses too. Raises ValueError."""
    before, _, after = stat.rpartition(")")
    pid, _, name = before.partition("(")
    fields = after.split()
    try:
        return Process(int(pid), name, fields[0], int(fields[6]), int(fields[19]))
    except (IndexError, ValueError):
        raise ValueError(f"a /proc/PID/stat holds {stat[:40]!r}") from None


def _switches(node: NodeView, pid: int) -> tuple[str, ...]:
    """The lines that count context switches; () if it is gone or does not tell."""
    try:
        status = node.text(f"/proc/{pid}/status", 65536)
    except (FileNotFoundError, ProcessLookupError):
        return ()
    return tuple(line for line in status.splitlines() if "ctxt_switches" in line)


@system_check(
    "stuck-processes",
    gather,
    "/proc/*/stat, and where a process is in state D /proc/*/status",
    contexts=("epilog", "periodic", "manual"),
    settings=_SETTINGS,
    budget_s=10.0,
    on_fail="warn",
)
def stuck_processes(facts: Facts, expected: Expected) -> tuple[Verdict, str]:
    """A process stays blocked in the kernel (state D) without being scheduled, or there are too many zombies."""
    wrong = [f"{p.name} ({p.pid}) is blocked in the kernel for {facts.apart_s:g} s and more" for p in facts.stuck]
    if len(facts.zombies) > expected["zombies_max"]:
        wrong.append(f"{len(facts.zombies)} zombies: {listed(dict.fromkeys(p.name for p in facts.zombies))}")
    return judged(wrong, f"no process is blocked in the kernel, {len(facts.zombies)} zombies")


CHECKS = (stuck_processes,)
