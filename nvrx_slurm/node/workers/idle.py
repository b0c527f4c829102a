"""What ranks that were told to end do, by /proc: a restart need not wait for ranks that do nothing."""

from __future__ import annotations

import asyncio
import os
import select
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from nvrx_slurm.child.descendants import children
from nvrx_slurm.core.rank.idle import Signs, is_idle
from nvrx_slurm.system import bounded
from nvrx_slurm.system.pending import is_pending, read_memory

_READINGS = 8
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# What a rank that does nothing sleeps in: futex, poll, ppoll, select, pselect6, epoll_wait, epoll_pwait, nanosleep,
# clock_nanosleep, wait4, waitid, read, recvfrom, recvmsg, accept4, pause, rt_sigtimedwait, restart_syscall.
# Not: send, write, close, ...
_IS_X86 = os.uname().machine == "x86_64"
_X86 = (202, 7, 271, 23, 270, 232, 281, 35, 230, 61, 247, 0, 45, 47, 288, 34, 128, 219)
_ARM = (98, 73, 72, 22, 101, 115, 260, 95, 63, 207, 212, 242, 137, 128)
_WAITS = frozenset(b"%d" % number for number in (_X86 if _IS_X86 else _ARM))
_POLLS = (b"7", b"271") if _IS_X86 else (b"73",)
_SELECTS = (b"23", b"270") if _IS_X86 else (b"72",)
_POLLFD = struct.Struct("ihh")
_MOST_POLLFDS = 64  # of one call


async def wait_until_idle(
    pids: Callable[[], Sequence[int]], signum: int, hold: Callable[[], bool], idle_s: float
) -> bool:
    """Whether the `pids` (of ranks that are alive, and have just got the signal) did nothing for `idle_s` seconds
    without `hold`. False once there are none, or if /proc does not tell."""
    readings = deque[dict[int, Signs]](maxlen=_READINGS)
    loop = asyncio.get_running_loop()
    due_s = loop.time()
    while pids():
        due_s = max(due_s + idle_s / _READINGS, loop.time())
        await asyncio.sleep(due_s - loop.time())
        now = await bounded.call_or_none(partial(read_signs, pids(), signum), idle_s, "idle")
        if now is None:
            break
        readings.append(now)
        if hold():
            readings.clear()
        elif len(readings) == _READINGS and pids():
            histories = ([reading[pid] for reading in readings] for pid in pids())
            if all(is_idle(history, idle_s) for history in histories):
                return True
    return False


def read_signs(pids: Sequence[int], signum: int) -> dict[int, Signs]:
    """What each of the processes, and all below it, do."""
    return {pid: _signs_of(pid, signum) for pid in pids}


def _signs_of(root: int, signum: int) -> Signs:
    pending, place, busy, cpu_s, written, todo = False, b"", set[int](), 0.0, 0, [root]
    while todo:
        pid = todo.pop()
        todo += children(pid)
        try:
            state, cpu = _state(f"/proc/{pid}/stat")
            if state in b"ZX":
                continue
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                where = _place(pid, thread)
                if not where:
                    busy.add(thread)
                if thread == root:
                    pending = is_pending(root, signum)
                    place = where
            cpu_s += cpu
            written += int(_read(f"/proc/{pid}/io").split()[3])
        except OSError:
            busy.add(pid)  # it has just ended, or this user may not know
    return Signs(pending, place, frozenset(busy), cpu_s, written)


def _place(pid: int, thread: int) -> bytes:
    """The place where the thread rests: its system call, stack and instruction pointer; b"": it works."""
    state, _ = _state(f"/proc/{pid}/task/{thread}/stat")
    call = _read(f"/proc/{pid}/task/{thread}/syscall").split()
    if state != b"S" or len(call) != 9 or call[0] not in _WAITS or _waits_to_send(pid, call[0], call[1:]):
        return b""
    return b" ".join((call[0], *call[7:]))


def _waits_to_send(pid: int, call: bytes, args: Sequence[bytes]) -> bool:
    """Whether it waits to send, as an upload by a socket with a timeout does."""
    if call in _SELECTS:
        return int(args[2], 16) != 0
    if call not in _POLLS:
        return False
    size = min(int(args[1], 16), _MOST_POLLFDS) * _POLLFD.size
    polled = _POLLFD.iter_unpack(read_memory(pid, int(args[0], 16), size))
    return any(events & select.POLLOUT for _, events, _ in polled)


def _state(path: str) -> tuple[bytes, float]:
    """State and processor time in s of a process or thread."""
    fields = _read(path).rpartition(b")")[2].split()
    return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
