"""A child process that is kept running: watched on the event loop, started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Mapping

from nvrx_slurm.child import processes

CLOSE_TIMEOUT_S = 1.0  # for the process to end when it is asked to; then it is killed


class RestartedProcess:
    """The process over its lives. All methods belong to the thread of the running event loop.

    A subclass starts the process in `spawn`, hands it to `_adopt`, and closes its own descriptors in `_on_exit`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._child: processes.Child | None = None
        self._readers: Mapping[int, Callable[[], None]] = {}
        self._none_left = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # of the next start
        self._delay_s = 0.0  # before the next start
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        return self._child.pid if self._child is not None else None

    def spawn(self) -> None:
        """Start the process."""
        raise NotImplementedError

    def _on_exit(self, pid: int, code: int) -> None:
        """The process was reaped; all of its output has been read."""
        raise NotImplementedError

    def _adopt(self, child: processes.Child, readers: Mapping[int, Callable[[], None]]) -> None:
        """This is the process now. `readers`: by descriptor; each is called when there is output, and at the end."""
        self._child, self._readers = child, readers
        self._none_left.clear()
        for fd, read in readers.items():
            self._loop.add_reader(fd, self._read_one, fd, read)
        self._loop.add_reader(child.pidfd, self._on_end)

    def _read_one(self, fd: int, read: Callable[[], None]) -> None:
        try:
            read()
        except OSError:  # ECONNRESET: the process ended with a message of ours unread; its pidfd tells the rest
            self._loop.remove_reader(fd)

    def _on_end(self) -> None:
        with contextlib.ExitStack() as at_end:  # whatever a reader raises, the process is reaped
            at_end.callback(self._reap)
            for fd, read in self._readers.items():
                at_end.callback(self._loop.remove_reader, fd)
                self._read_one(fd, read)

    def _reap(self) -> None:
        child, self._child = self._child, None
        assert child is not None
        self._loop.remove_reader(child.pidfd)
        code = child.reap()
        self._none_left.set()
        self._on_exit(child.pid, code)

    def _spawn_later(self, first_s: float, longest_s: float) -> None:
        """Start it again after `_delay_s`, which grows from `first_s` on."""
        self._timer = self._loop.call_later(self._delay_s, self.spawn)
        self._delay_s = min(max(first_s, 2 * self._delay_s), longest_s)

    def _kill(self) -> None:
        if self._child is not None:
            self._child.signal_group(signal.SIGKILL)

    async def _wait_for_end(self) -> None:
        """At most CLOSE_TIMEOUT_S."""
        if self._child is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), CLOSE_TIMEOUT_S)

    async def _close(self, ask: Callable[[], None]) -> None:
        """End it for good: `ask` it, then kill it. At most 2 x CLOSE_TIMEOUT_S; a second call does nothing."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for end_it in (ask, self._kill):
            if self._child is not None:
                end_it()
                await self._wait_for_end()
