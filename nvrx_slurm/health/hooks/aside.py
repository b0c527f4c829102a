"""Work beside the checks of a hook that may never return, as it is about a disk that may be dead: LOG, the spool.

It is done by a child process, which is left to init where even SIGKILL does not end it; a thread would keep the hook
itself from ending. Of one kind of work at most one is under way on a node: a dead disk gets one blocked process, not
one of each job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import time
from collections.abc import Callable
from typing import NoReturn

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.health import cache
from nvrx_slurm.health.check import NodeView

_MAX_BYTES = 65536  # of an answer


class Aside:
    """`work` under way in a child that ends after `wait_s` seconds (> 0), if anything can end it. It returns what
    `result` returns, and may raise OSError, NvrxError and cache.Unusable. `name`: of the kind of work.
    """

    def __init__(self, node: NodeView, name: str, work: Callable[[], bytes], wait_s: float) -> None:
        self._until_s = time.monotonic() + wait_s
        self._failed = ""
        self._pipe, theirs = os.pipe()
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _child(node, name, work, theirs, wait_s)
        except OSError as error:
            self._failed = f"no process could be started for it: {error.strerror}"
        finally:
            os.close(theirs)

    def result(self) -> bytes:
        """Wait for it, once. Raises cache.Unusable with what was wrong, or if the time is up."""
        told = f"-{self._failed}".encode() if self._failed else self._told()
        os.close(self._pipe)
        if not self._failed:  # what has answered ends now; what has not goes to init when the hook ends
            os.waitpid(self._pid, 0 if told else os.WNOHANG)
        if told[:1] != b"+":
            raise cache.Unusable(told[1:].decode(errors="replace") or "no answer in time, as from a dead disk")
        return told[1:]

    def _told(self) -> bytes:
        told = b""
        while (left_s := self._until_s - time.monotonic()) > 0 and select.select([self._pipe], [], [], left_s)[0]:
            more = os.read(self._pipe, _MAX_BYTES)
            told += more
            if not more:
                return told
        return b""


def _child(node: NodeView, name: str, work: Callable[[], bytes], pipe: int, wait_s: float) -> NoReturn:
    """The forked process: never returns into the caller's frames."""
    try:
        os.setsid()
        for signum in (signal.SIGTERM, signal.SIGALRM):
            signal.signal(signum, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, wait_s, 0.1)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        told = _done(node, name, work)
        while told:
            told = told[os.write(pipe, told) :]
    finally:
        os._exit(0)


def _done(node: NodeView, name: str, work: Callable[[], bytes]) -> bytes:
    """`+` and what it returned, or `-` and a sentence."""
    with contextlib.suppress(OSError, cache.Unusable):  # then there may be several at a time
        lock = os.open(f"{cache.private_directory(node)}/{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.lockf(lock, fcntl.LOCK_EX)  # until our alarm
    try:
        return b"+" + work()
    except OSError as error:
        return f"-{error.strerror or error}".encode()
    except (NvrxError, cache.Unusable) as error:
        return f"-{error}".encode()
