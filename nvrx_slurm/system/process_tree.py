"""The processes below a process, by /proc. Imports next to nothing: Slurm's prologs load it."""

from __future__ import annotations

import contextlib
import os
import signal


def children(pid: int) -> list[int]:
    """Children of all threads of `pid`, ended ones too; none where it is gone or the kernel does not tell."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    except OSError:
        return found  # children of a parent that just ended have another parent now
    return found


def kill_tree(root: int, parent: int) -> None:
    """SIGKILL to `root`, a child of `parent`, and to all processes below it, in whatever session. Does not wait.

    All are found before one is killed: the children of a killed process get another parent. A process that is forked
    in between is missed; `processes.Orphans` looks again.
    """
    todo, found = [(root, parent)], list[int]()
    while todo:
        pid, parent = todo.pop()
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            continue  # gone
        found.append(fd)
        try:
            if _parent(pid) == parent:  # read with the pidfd open: no recycled pid is hit
                todo += [(child, pid) for child in children(pid)]
            else:
                os.close(found.pop())
        except OSError:
            os.close(found.pop())  # gone
    for fd in found:
        with contextlib.suppress(OSError):  # gone, or another user's (setuid)
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])


def blocked_threads(pid: int) -> set[tuple[str, ...]]:
    """Threads in state D with their counts of context switches; none where /proc does not tell."""
    found = set[tuple[str, ...]]()
    try:
        for tid in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{tid}/status", encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
            if any(line.startswith("State:\tD") for line in lines):
                found.add((tid, *(line for line in lines if "ctxt_switches" in line)))
    except OSError:  # it has just ended
        return set()
    return found
