"""What one worker shares with its rank monitor: a page of memory and a socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from nvrx_slurm.errors import UsageError
from nvrx_slurm.monitor.page import create_page
from nvrx_slurm.system.files import MAX_SOCKET_PATH_BYTES

_BACKLOG = 128


def socket_prefix(local_rank: int) -> str:
    """How the names of the sockets of one rank begin."""
    return f"rank{local_rank}."


class Life:
    """What one life of a worker shares with its monitor: the page and the socket, at a path of its own.

    A process left over from an earlier life has the page and the path of that life, and can say nothing about this one.
    """

    def __init__(self, private_dir: Path, local_rank: int, number: int) -> None:
        self.path = private_dir / f"{socket_prefix(local_rank)}{number}"
        if len(os.fsencode(self.path)) > MAX_SOCKET_PATH_BYTES:
            raise UsageError(
                f"{self.path} is too long for a Unix socket ({MAX_SOCKET_PATH_BYTES} bytes): set a shorter TMPDIR"
            )
        self.watch: bytes | None = None  # the message, once there is a worker
        self.pidfd = -1
        self.hung = False
        self.broken = False  # the page cannot be read; that was said
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.page_fd = -1
        try:
            self.page_fd = create_page()
            self.listener.bind(os.fspath(self.path))
            self.listener.listen(_BACKLOG)
        except OSError:
            self.close()
            raise

    def fds(self) -> list[int]:
        return [self.pidfd, self.page_fd, self.listener.fileno()]

    def close(self) -> None:
        """Never raises; a second call does nothing."""
        try:
            self.listener.close()
            self.path.unlink(missing_ok=True)
        except OSError:
            pass  # the directory is no longer ours: no rank finds the socket there
        fds, self.page_fd, self.pidfd = (self.page_fd, self.pidfd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
