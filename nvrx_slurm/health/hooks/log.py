"""Where a hook logs: the system log, a person's terminal, and the file LOG of hooks.conf.

Logging never delays or changes a verdict. The system log gets a datagram that is not waited for. LOG, which may be on a
full disk or one that hangs, is written at the end by a bounded process.
"""

from __future__ import annotations

import _socket  # importing socket takes as long as importing all our modules
import contextlib
import os
import sys
import syslog
import time

from nvrx_slurm.child import bounded_process
from nvrx_slurm.errors import UsageError
from nvrx_slurm.system import files, trust

_SOCKET = "/dev/log"
_MAX_CHARACTERS = 2000  # of a line for the system log
_LOG_S = 1.0  # longest wait for LOG
_MARGIN_S = 0.4  # to give up a process that is blocked in the kernel


class HookLog:
    """The lines of one run of the hook `when`. `file`: LOG, "" if there is none."""

    def __init__(self, when: str, file: str) -> None:
        self.file = file
        self._tag = f"nvrx-{when}"
        self._lines: list[str] = []

    def say(self, level: int, line: str) -> None:
        """Log one line with a `level` of syslog(3). Never waits, never raises."""
        stamp = time.strftime("%b %e %H:%M:%S")
        text = f"<{syslog.LOG_DAEMON | level}>{stamp} {self._tag}[{os.getpid()}]: {line[:_MAX_CHARACTERS]}"
        flags = _socket.SOCK_DGRAM | _socket.SOCK_NONBLOCK | _socket.SOCK_CLOEXEC
        with contextlib.suppress(OSError):  # no system log, or its queue is full
            _socket.socket(_socket.AF_UNIX, flags).sendto(text.encode(errors="replace"), _SOCKET)
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            print(f"{self._tag}: {line}", file=sys.stderr)
        self._lines.append(
            f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {self._tag}: {line}\n"
        )

    def taken(self) -> bytes:
        """All lines so far, which are in LOG only if they are added again."""
        lines = "".join(self._lines)
        self._lines = []
        return lines.encode(errors="replace")

    def add(self, lines: bytes) -> None:
        """Add lines that a child has said, and `taken`."""
        text = lines.decode(errors="replace")
        with contextlib.suppress(OSError, ValueError):
            print(text, end="", file=sys.stderr)
        self._lines.append(text)

    def write(self, until_s: float) -> None:
        """Write all lines so far to LOG, at the latest by `until_s` (time.monotonic()). The others get its failure."""
        lines = self.taken()
        if not self.file or not lines:
            return
        try:
            wait_s = min(_LOG_S, until_s - _MARGIN_S - time.monotonic())
            ended = bounded_process.fork(
                lambda pipe: _append(self.file, lines, pipe), wait_s
            ).finish()
            problem = ended.stdout.decode(errors="replace") or (
                "" if ended.code == 0 else "no answer in time"
            )
        except OSError as error:
            problem = f"no process could be started: {error.strerror}"
        if problem:
            self.say(syslog.LOG_ERR, f"LOG={self.file} cannot be used: {problem}")


def _append(file: str, data: bytes, pipe: int) -> None:
    """Append `data` to `file`, or write to `pipe` why that failed. Runs in the child."""
    try:
        trust.require(os.path.dirname(file), UsageError)
        flags = (
            os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        )
        files.write_all(os.open(file, flags, 0o640), data)
    except (OSError, UsageError) as error:
        os.write(pipe, str(error.strerror if isinstance(error, OSError) else error).encode())
