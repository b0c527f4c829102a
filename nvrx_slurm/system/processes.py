"""Child processes that cannot be mixed up, outlive us, or be missed: sessions, parent-death signals, pidfds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

_TRAMPOLINE = str(Path(__file__).with_name("trampoline.py"))


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
) -> Child:
    """Start `argv` (from the main thread: the parent-death signal follows the thread that forked).

    A command that cannot be executed ends with 126 or 127 and a sentence on its stderr. Raises OSError when no
    process can be made at all (limits, memory).
    """
    popen = subprocess.Popen(
        [sys.executable, "-I", "-S", _TRAMPOLINE, str(os.getpid()), *argv],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        close_fds=True,
    )
    return Child(popen)
