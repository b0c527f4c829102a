"""A rank's handle on its monitor process.

The process is forked, not started anew: talking to the store needs torch, whose import costs a second and 200 MB, and a
fork shares all of that. The fork is safe: the child touches no CUDA, uses no thread or lock of the parent, closes all
file descriptors and device mappings that it inherited, and never returns into the parent's code. It ignores SIGTERM,
SIGINT and SIGHUP, since it has to outlive its rank long enough to tell the others. It ends when its rank has ended and
the others know, or when all ranks have.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import signal
import socket
import threading
import warnings

from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.environment import Identity
from nvrx_slurm.inprocess.exception import InternalError
from nvrx_slurm.inprocess.guard.monitor_main import LEAVE, MAX_MESSAGE, MEET, READY, Monitor
from nvrx_slurm.inprocess.guard.page import Page
from nvrx_slurm.monitor import kill

logger = logging.getLogger(__name__)

# Python 3.12 warns of any fork with threads.
warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning, rf"{re.escape(__name__)}$")

_MAX_TEXT = 1024  # bytes of the text of a message


class MonitorProcess:
    """`start` forks, `leave` ends and reaps it."""

    def __init__(self, arguments: Arguments, identity: Identity, page: Page) -> None:
        self._arguments, self._identity, self._page = arguments, identity, page
        self.pid = 0
        self._pidfd = -1
        self._channel: socket.socket | None = None
        self.serves_groups = False  # whether a process group has met at this rank

    def start(self) -> None:
        """Fork. Raises OSError if no process can be made."""
        self._channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = self._fork(theirs)
        self._pidfd = os.pidfd_open(self.pid)

    def _fork(self, channel: socket.socket) -> int:
        rank_pidfd = os.pidfd_open(os.getpid())
        try:
            pid = os.fork()
            if pid == 0:
                Monitor(self._arguments, self._identity, self._page, rank_pidfd, channel).main()
            return pid
        finally:
            os.close(rank_pidfd)

    def await_ready(self, timeout_s: float) -> None:
        """Until it works (on rank 0: the store's server too). Raises InternalError with its reason if it cannot."""
        assert self._channel is not None
        self._channel.settimeout(timeout_s)
        try:
            answer = self._channel.recv(MAX_MESSAGE)
        except TimeoutError:
            answer = f"nothing happened for {timeout_s:g} s; see whether store_factory hangs, or a log's disk".encode()
        if answer != READY:
            raise InternalError(
                f"the monitor process cannot do its work: {answer.decode(errors='replace') or 'it has ended'}"
            )

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._pidfd >= 0 and not kill.is_dead(self._pidfd)

    def kill(self) -> None:
        """At once, even if it is stopped."""
        kill.send(self._pidfd, signal.SIGKILL)

    def leave(self, timeout_s: float | None) -> None:
        """Tell it that the rank has left, and reap it; after `timeout_s` seconds it is killed.

        None: it stays for the others, ends by itself, and is reaped then.
        """
        if self._pidfd < 0:
            return
        self.announce_leaving()
        if timeout_s is None:
            threading.Thread(target=self._close, name="nvrx-reaper", daemon=True).start()
            return
        if not select.select([self._pidfd], [], [], timeout_s)[0]:
            logger.warning("the monitor process did not end within %g s and is killed", timeout_s)
            self.kill()
        self._close()

    def announce_leaving(self, why: str = "") -> None:
        """It tells the others, if they still count on this rank (see COUNTED). Only the first call counts."""
        self._send(LEAVE + why.encode()[:_MAX_TEXT])

    def meet(self, number: int, address: str, port: int) -> None:
        """The process group of iteration `number` meets at this rank: see `fallback_server`."""
        self.serves_groups = True
        self._send(MEET + json.dumps([number, address, port]).encode())

    def _send(self, message: bytes) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.settimeout(1.0)
                self._channel.send(message, socket.MSG_NOSIGNAL)

    def _close(self) -> None:
        """Wait until it has ended, and reap it."""
        with contextlib.suppress(ChildProcessError):  # the user's code may have reaped it
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._channel is not None:
            self._channel.close()
