"""The first process ("init") of a pretended machine: everything that machine runs is a descendant of it.

A Slurm node of the minicluster is not a machine, only a slurmd; its slurmstepds detach themselves and the user's
processes may start sessions of their own, so no process group or session holds them all. A *child subreaper*
(prctl(2), PR_SET_CHILD_SUBREAPER) does: a process that loses its parent becomes a child of this process instead of
PID 1. So "all processes of node n3" is a walk of parent links, exact, without guessing by names or environments,
and nothing stays a zombie where PID 1 does not reap.

Run as a program (by path, with ``python -I -S``: it must start in milliseconds, hence only the standard library)::

    minicluster_init.py LIFELINE_FD COMMAND [ARGUMENT...]

It starts the command, reaps, and ends when no descendant is left (a crashed slurmd leaves its steps running, as on
a real node). SIGTERM, or end of file on LIFELINE_FD (-1 = none), make it kill the whole tree and end at once.
It exits with the command's code (128+n for signals).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_KILL_ROUNDS = 1000  # a bound for trees that fork while being killed; each round kills all that exist
_REAP_S = 5.0


class Process(NamedTuple):
    """One life of one pid: pids are used again, (pid, start time) pairs are not."""

    pid: int
    start: int  # clock ticks since boot, field 22 of /proc/PID/stat (proc(5))
    name: str  # comm, at most 15 characters


def _stat(pid):
    """(process, parent pid, state letter) from /proc/PID/stat, or None when it is gone."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    head, _, rest = text.rpartition(")")  # comm may itself hold blanks and brackets
    fields = rest.split()
    return Process(pid, int(fields[19]), head.partition("(")[2]), int(fields[1]), fields[0]


def process(pid):
    """The living process with this pid; None when there is none or only its zombie is left."""
    found = _stat(pid)
    return None if found is None or found[2] in "ZX" else found[0]


def descendants(pid):
    """Living descendants of `pid`, parents before children; zombies are left out but looked through."""
    children: dict[int, list[int]] = defaultdict(list)
    seen: dict[int, tuple[Process, int, str]] = {}
    for entry in os.listdir(_PROC):
        if entry.isdecimal() and (found := _stat(int(entry))) is not None:
            seen[found[0].pid] = found
            children[found[1]].append(found[0].pid)
    order, queue = [], list(children[pid])
    while queue:
        found = seen[queue.pop(0)]
        queue.extend(children[found[0].pid])
        if found[2] not in "ZX":
            order.append(found[0])
    return order


def signal_process(target, signum):
    """Send `signum` to exactly `target`; False when that process is gone (a reused pid is never hit: pidfd)."""
    try:
        fd = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return False
    try:
        now = process(target.pid)
        if now is None or now.start != target.start:
            return False
        signal.pidfd_send_signal(fd, signum)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)


def kill_tree(pid):
    """SIGKILL all descendants of `pid` (not `pid`), until none is left; returns the killed ones, parents first.

    First all are stopped: on a dead node none sees another one's end. A process of srun would end the step when srun
    dies. Children go first, because the kernel wakes stopped orphans with SIGHUP. `pid` must be a child subreaper.
    """
    killed: dict[tuple[int, int], Process] = {}
    stopped: set[tuple[int, int]] = set()
    for _ in range(_KILL_ROUNDS):
        new = [one for one in descendants(pid) if (one.pid, one.start) not in stopped]
        for one in new:
            signal_process(one, signal.SIGSTOP)
            stopped.add((one.pid, one.start))
        if not new:
            break
    for _ in range(_KILL_ROUNDS):
        alive = descendants(pid)
        if not alive:
            break
        for one in reversed(alive):
            if signal_process(one, signal.SIGKILL):
                killed.setdefault((one.pid, one.start), one)
        os.sched_yield()
    return list(reversed(killed.values()))


def _reap(command_pid):
    """Reap all that ended; returns (the command's exit code if it is among them, whether any child is left)."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code, False
        if pid == 0:
            return code, True
        if pid == command_pid:
            raw = os.waitstatus_to_exitcode(status)
            code = raw if raw >= 0 else 128 - raw


def _reap_all(woken):
    """Reap the killed tree, so that no zombie is left to a PID 1 that may not reap; bounded by _REAP_S seconds."""
    deadline = time.monotonic() + _REAP_S
    while _reap(-1)[1] and (left := deadline - time.monotonic()) > 0:
        if select.select([woken], [], [], left)[0]:
            os.read(woken, 4096)


def main(argv):
    """Be the init of `argv[1:]` with lifeline `argv[0]`; returns the exit code (see the module's text)."""
    lifeline, command = int(argv[0]), argv[1:]
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    woken, waker = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for signum in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(signum, lambda *_: None)
    if lifeline >= 0:
        os.set_inheritable(lifeline, False)
    own = [signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE]  # Python ignores SIGPIPE; daemons want the default
    command_pid = os.posix_spawnp(command[0], command, os.environ, setsigdef=own)
    sources = [woken] if lifeline < 0 else [woken, lifeline]
    code, children_left = 128 + signal.SIGTERM, True
    while children_left:
        ready, _, _ = select.select(sources, [], [])
        told_to_end = lifeline in ready
        if woken in ready:
            told_to_end |= signal.SIGTERM in os.read(woken, 4096)
        if told_to_end:
            kill_tree(os.getpid())
            _reap_all(woken)
            return code
        ended, children_left = _reap(command_pid)
        code = code if ended is None else ended
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
