"""Processes below a process, found and killed in whatever session. Rank monitors use this: it imports next to nothing.

A process is named by a pidfd that was opened before its parent was read, so a number that is used again hits nobody.
"""

from __future__ import annotations

import os
import select
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

SHM_MANAGER = b"torch_shm_manag"  # the name of torch_shm_manager, as ps shows it
_ENDS = 1 << (signal.SIGINT - 1) | 1 << (signal.SIGTERM - 1)


def is_dead(pidfd: int) -> bool:
    """Whether the process has ended (reaped or not)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


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


def nobody(pid: int) -> bool:
    """Spares no process."""
    return False


def cleans(pid: int) -> bool:
    """Whether the process is a helper that outlives its parent and cleans up: it ignores SIGINT and SIGTERM for that.

    Resource trackers of CPython and loky do, and block both signals while they start. torch_shm_manager does not.
    """
    return signals(pid, b"SigBlk", b"SigIgn") & _ENDS == _ENDS or name(pid) == SHM_MANAGER


def signals(pid: int, *kinds: bytes) -> int:
    """A bit for each signal that the process blocks ("SigBlk"), ignores ("SigIgn") or handles, also in a C library
    ("SigCgt"), as proc(5) has it; 0 where it is gone."""
    found = 0
    for line in read(pid, "status").splitlines():
        kind, _, mask = line.partition(b":")
        found |= int(mask, 16) if kind in kinds else 0
    return found


def below(pid: int, pidfd: int, spare: Callable[[int], bool] = nobody) -> list[int]:
    """A pidfd of each living process below the process `pid`, which `pidfd` names. The caller closes them.

    Not of those that are to be spared, and of what is below these.
    """
    todo = [(pid, pidfd)]
    found = list[int]()
    while todo:
        parent, parent_fd = todo.pop()
        for child in children(parent):
            fd = _open(child, (parent,))
            # dead: another process may have its number by now
            if fd >= 0 and (is_dead(parent_fd) or spare(child)):
                os.close(fd)
            elif fd >= 0:
                found.append(fd)
                todo.append((child, fd))
    return found


def kill_all(pidfds: Iterable[int]) -> None:
    """SIGKILL, and close the pidfds."""
    for fd in pidfds:
        try:
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        except OSError:
            pass  # gone, or another user's (setuid)
        os.close(fd)


def kill_tree(
    root: int, parents: Collection[int], mark: bytes = b"", spare: Callable[[int], bool] = nobody
) -> bool:
    """SIGKILL to `root`, a child of one of `parents`, and to all below it. Does not wait. False: there is none.

    `mark`: only if its environment has this entry (NAME=VALUE). `spare`: see `below`. All are found before one is
    killed: the children of a killed process get another parent. A process that is forked in between is missed, so
    callers look again.
    """
    fd = _open(root, parents, mark)
    if fd < 0:
        return False
    kill_all([fd, *below(root, fd, spare)])
    return True


def kill_marked(parents: Collection[int], mark: bytes) -> bool:
    """The same for all children of `parents` with this mark. `/proc/PID/task/TID/children` of init may be hidden."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return any([kill_tree(pid, parents, mark) for pid in pids if _parent(pid) in parents])


def _open(pid: int, parents: Collection[int], mark: bytes = b"") -> int:
    """A pidfd of the process if it lives, is a child of one of `parents` and has the mark; else -1."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return -1
    if (
        _parent(pid) in parents
        and (not mark or mark in read(pid, "environ").split(b"\0"))
        and not is_dead(fd)
    ):
        return fd
    os.close(fd)
    return -1


def name(pid: int) -> bytes:
    """What ps shows of a process; b"" where it is gone."""
    return read(pid, "comm").rstrip(b"\n")


def group(pid: int) -> int:
    """Its process group; -1: there is no such process."""
    try:
        return os.getpgid(pid)
    except OSError:
        return -1


def _parent(pid: int) -> int:
    """-1: there is no such process."""
    fields = read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else -1


def read(pid: int, name: str) -> bytes:
    """A file of the process; nothing where it is gone or another user's."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""
