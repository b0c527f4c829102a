"""Where a hook tells what it does: the system's log, a person's terminal, and LOG of hooks.conf.

A verdict must reach Slurm whatever state these are in. So the system's log gets a line at once or not at all, by a
datagram that is never waited for; LOG, which may be on a full or dead disk, is written when all is decided and done,
by a process that may be left behind.
"""

from __future__ import annotations

import _socket  # socket itself takes as long to load as all our modules
import contextlib
import os
import sys
import syslog
import time

from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import cache
from nvrx_slurm.health.check import NodeView
from nvrx_slurm.health.hooks import aside
from nvrx_slurm.system import trust

_SOCKET = "/dev/log"
_MAX_CHARACTERS = 2000  # of a line for the system's log
_LOG_S = 1.0  # longest wait for LOG; nobody needs its lines more than the verdict


class HookLog:
    """The lines of one run of the hook `when`. `file`: LOG, "" if there is none."""

    def __init__(self, when: str, file: str) -> None:
        self.file = file
        self._tag = f"nvrx-{when}"
        self._lines: list[str] = []

    def say(self, level: int, line: str) -> None:
        """Never waits, never raises. `level`: of syslog(3)."""
        stamp = time.strftime("%b %e %H:%M:%S")
        text = f"<{syslog.LOG_DAEMON | level}>{stamp} {self._tag}[{os.getpid()}]: {line[:_MAX_CHARACTERS]}"
        with contextlib.suppress(OSError):  # nobody listens, or his queue is full
            _send(text.encode(errors="replace"))
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone
            print(f"{self._tag}: {line}", file=sys.stderr)
        self._lines.append(f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {self._tag}: {line}\n")

    def write(self, node: NodeView, wait_s: float) -> None:
        """All lines so far to LOG, within `wait_s` seconds at most; if that cannot be, it is said to the others."""
        lines, self._lines = "".join(self._lines).encode(errors="replace"), []
        if not self.file or not lines:
            return
        try:
            aside.Aside(node, "log", lambda: _append(self.file, lines), min(wait_s, _LOG_S)).result()
        except (OSError, cache.Unusable) as error:
            self.say(syslog.LOG_ERR, f"LOG={self.file} cannot be used: {error}")


def _send(data: bytes) -> None:
    sender = _socket.socket(_socket.AF_UNIX, _socket.SOCK_DGRAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC)
    try:
        sender.sendto(data, _SOCKET)
    finally:
        sender.close()


def _append(file: str, data: bytes) -> bytes:
    trust.require(os.path.dirname(file), UsageError)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    fd = os.open(file, flags, 0o640)
    try:
        while data:  # at once, unless the disk is nearly full
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)
    return b""
