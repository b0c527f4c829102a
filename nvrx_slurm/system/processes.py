"""Child processes that cannot be mixed up, outlive us, or be missed: sessions, parent-death signals, pidfds, and a
subreaper for their orphans."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO

from nvrx_slurm.system.process_tree import children, kill_tree

_TRAMPOLINE = str(Path(__file__).with_name("trampoline.py"))
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MAX_ROUNDS = 16  # of killing what came to us because its parent was killed


class Child:
    """A started process: leader of its own session and process group, killed by the kernel when we die.

    `pidfd` is readable once the process has ended. The process is reaped by `reap()` only, so until then its pid and
    process group id belong to it and cannot be recycled.
    """

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.pidfd = os.pidfd_open(popen.pid)

    def signal_group(self, signum: int) -> None:
        """Send `signum` to the whole process group; harmless when it is gone already."""
        try:
            os.killpg(self.pid, signum)
        except (ProcessLookupError, PermissionError):  # gone, or only a zombie of another user (setuid) is left
            return

    def reap(self) -> int:
        """After `pidfd` became readable: kill what is left of the group, collect the exit code (negative = signal)."""
        self.signal_group(signal.SIGKILL)
        code = self._popen.wait()
        os.close(self.pidfd)
        return code


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
    ignored: int = 0,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
) -> Child:
    """Start `argv` (from the main thread: the parent-death signal follows the thread that forked).

    `ignored`: a signal that it shall not die of, unless it sets a handler (0 = none); its own children inherit that.
    A command that cannot be executed ends with 126 or 127 and a sentence on its stderr. Raises OSError when no
    process can be made at all (limits, memory).
    """
    popen = subprocess.Popen(
        [sys.executable, "-I", "-S", _TRAMPOLINE, str(os.getpid()), str(int(ignored)), *argv],
        env=dict(env),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        close_fds=True,
    )
    return Child(popen)


def end_with_parent(signum: int) -> None:
    """From now on `signum` comes when the thread that forked this process ends; nothing comes if it has already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


class Orphans:
    """Descendants that lost their parent become children of this process and are found, whatever their session.

    All methods belong to the thread that reaps our other children; `known` are those: they are left alone. So are
    children that were here before us (of a shell that became this program by exec). On a kernel without
    /proc/PID/task/TID/children nothing is killed.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._before = frozenset(children(os.getpid()))

    def reap(self, known: Iterable[int]) -> None:
        """Collect those that have ended, as init did before they came to us; call it on SIGCHLD."""
        kept = frozenset(known)
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in kept:  # a known one is reaped in a moment, and then this is called
                return
            _collect(ended.si_pid)

    def kill(self, known: Iterable[int]) -> int:
        """SIGKILL all orphans and all below them without waiting; returns how many have not ended yet."""
        spared, seen, me = self._before.union(known), set[int](), os.getpid()
        for _ in range(_MAX_ROUNDS):
            new = [pid for pid in children(me) if pid not in spared and pid not in seen]
            if not new:
                break
            seen.update(new)
            for pid in new:
                kill_tree(pid, me)
        return sum(not _collect(pid) for pid in children(me) if pid not in spared)


def _collect(pid: int) -> bool:
    """Reap our child `pid` if it has ended; whether it is gone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True
