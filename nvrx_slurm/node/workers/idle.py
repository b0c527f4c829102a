"""What ranks that were told to end do, by /proc: a restart need not wait for ranks that do nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial

from nvrx_slurm.child.descendants import children
from nvrx_slurm.core.rank.idle import Signs, is_idle
from nvrx_slurm.system import bounded

_READ_S = 0.25  # the longest reading before SIGTERM
_READINGS = 4
# What a rank that does nothing sleeps in: futex, poll, ppoll, select, pselect6, epoll_wait, epoll_pwait, nanosleep,
# clock_nanosleep, wait4, waitid, read, recvfrom, recvmsg, accept4, pause, rt_sigtimedwait. Not: send, write, close, ...
_X86 = (202, 7, 271, 23, 270, 232, 281, 35, 230, 61, 247, 0, 45, 47, 288, 34, 128)
_ARM = (98, 73, 72, 22, 101, 115, 260, 95, 63, 207, 212, 242, 137)
_WAITS = frozenset(b"%d" % number for number in (_X86 if os.uname().machine == "x86_64" else _ARM))


async def wait_until_idle(
    pids: Callable[[], Sequence[int]], end: Callable[[], None], hold: Callable[[], bool], idle_s: float
) -> bool:
    """Call `end`, which sends SIGTERM, after a first reading; whether the `pids` (of ranks that are alive) did nothing
    for `idle_s` seconds without `hold`. False once there are none, or if /proc does not tell."""
    loop = asyncio.get_running_loop()
    try:
        before = since = await bounded.call_or_none(partial(read_signs, pids()), _READ_S, "idle")
    finally:
        end()
    since_s = loop.time()
    while pids() and before is not None and since is not None:
        await asyncio.sleep(idle_s / _READINGS)
        now = await bounded.call_or_none(partial(read_signs, pids()), idle_s, "idle")
        if now is None:
            break
        if hold() or not all(is_idle(before[pid], since[pid], now[pid]) for pid in now):
            since, since_s = now, loop.time()
        elif loop.time() >= since_s + idle_s and pids():
            return True
    return False


def read_signs(pids: Sequence[int]) -> dict[int, Signs]:
    """What each of the processes, and all below it, do."""
    return {pid: _signs_of(pid) for pid in pids}


def _signs_of(root: int) -> Signs:
    places, ticks, wakes, moved, todo = dict[int, bytes](), 0, 0, 0, [root]
    while todo:
        pid = todo.pop()
        todo += children(pid)
        try:
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                stat = _read(f"/proc/{pid}/task/{thread}/stat").rpartition(b")")[2].split()
                if stat[0] not in b"ZX":
                    call = _read(f"/proc/{pid}/task/{thread}/syscall").split()
                    sleeps = stat[0] == b"S" and len(call) == 9 and call[0] in _WAITS
                    places[thread] = b" ".join((call[0], *call[7:])) if sleeps else b""
                    ticks += int(stat[11]) + int(stat[12])
                    status = _read(f"/proc/{pid}/task/{thread}/status")
                    wakes += int(status.partition(b"\nvoluntary_ctxt_switches:")[2].split(None, 1)[0])
            if pid in places:
                io = _read(f"/proc/{pid}/io").split()
                moved += int(io[1]) + int(io[3])
        except OSError:
            places[pid] = b""  # it has just ended, or this user may not know
    return Signs(places, ticks, wakes, moved)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
