"""Helper processes of an agent: started with one end of a channel, watched on the event loop, started again.

`child.program` is the other end of a `PacketProcess`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nvrx_slurm.child import bootstrap, processes
from nvrx_slurm.child.program import GIVEN_UP
from nvrx_slurm.system import bounded

CLOSE_TIMEOUT_S = 1.0  # for the process to end when it is asked to; then it is killed
_MESSAGE_BYTES = 1 << 16
_MARGIN_S = 2.0  # for a program to end after its own limit


class SupervisedProcess:
    """One helper process over its lives. All methods belong to the thread of the running event loop.

    A subclass says how it is started (`_start`), and what happens then (the other methods that do nothing here).
    One that dies young is replaced after 0, 0.1, 0.2, ... s: at once after a stray kill, rarely if it cannot run here.
    """

    first_delay_s = 0.1
    longest_delay_s = 30.0
    young_s = 10.0  # one that lives longer is started again at once

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._child: processes.Child | None = None
        self._channel: socket.socket | None = None
        self._none_left = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None  # of the next start
        self._delay_s = 0.0  # before the next start
        self._began_s = 0.0
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The process id, None while there is no process."""
        return self._child.pid if self._child is not None else None

    # --- what a subclass does ---------------------------------------------------------------------------------

    def _start(self) -> tuple[processes.Child, socket.socket]:
        """The process, and our end of its channel. Raises OSError."""
        raise NotImplementedError

    def _on_start(self) -> None:
        """Send what the process has to know first: its channel is there."""

    def _on_failure(self, error: OSError) -> None:
        """No process can be made."""

    def _on_message(self, data: bytes) -> None:
        """Take a message of the process."""

    def _on_exit(self, pid: int, code: int) -> None:
        """Learn that the process was reaped; all of its messages have been taken."""

    def _ask_to_end(self) -> None:
        self._kill()

    # --- its life ---------------------------------------------------------------------------------------------

    def spawn(self) -> None:
        """Start the process, unless there is one."""
        if self._closed or self._child is not None:
            return
        self._timer = None
        self._began_s = self._loop.time()
        try:
            child, channel = self._start()
        except OSError as error:
            return self._on_failure(error)
        self._adopt(child, channel)
        self._on_start()

    def start_now(self) -> None:
        """Start it now if it is to be started again later."""
        if self._timer is not None:
            self._timer.cancel()
            self.spawn()

    def _adopt(self, child: processes.Child, channel: socket.socket | None) -> None:
        """This is the process now."""
        self._child = child
        self._channel = channel
        self._none_left.clear()
        if channel is not None:
            self._loop.add_reader(channel, self.hear)
        self._loop.add_reader(child.pidfd, self._on_end)

    def send(self, data: bytes, fds: Iterable[int] = ()) -> None:
        """Send to the process, if there is one. One that has stopped reading is killed: its successor is told anew."""
        if self._channel is None:
            return
        try:
            socket.send_fds(
                self._channel, [data], list(fds), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            )
        except BlockingIOError:
            self._kill()
        except OSError:
            return  # it has just died, and _on_end is about to run

    def hear(self) -> None:
        """Take all that the process has sent (otherwise done by the loop, in its own time)."""
        while self._channel is not None and self._child is not None:
            try:
                data = self._channel.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:  # ECONNRESET: the process ended with a message of ours unread
                data = b""
            if not data:
                self._loop.remove_reader(self._channel)  # it is dying, which its pidfd tells
                return
            self._on_message(data)

    def _on_end(self) -> None:
        try:
            self.hear()
        finally:  # whatever a message brings about, the process is reaped
            child = self._child
            self._child = None
            assert child is not None
            self._loop.remove_reader(child.pidfd)
            code = child.reap()
            self._drop_channel()
            self._none_left.set()
            self._on_exit(child.pid, code)

    def _drop_channel(self) -> None:
        if self._channel is not None:
            self._loop.remove_reader(self._channel)
            self._channel.close()
            self._channel = None

    def _spawn_later(self) -> float:
        """Start it again; returns in how many seconds."""
        if self._loop.time() - self._began_s >= self.young_s:
            self._delay_s = 0.0
        delay_s = self._delay_s
        self._timer = self._loop.call_later(delay_s, self.spawn)
        self._delay_s = min(max(self.first_delay_s, 2 * delay_s), self.longest_delay_s)
        return delay_s

    def _kill(self) -> None:
        if self._child is not None:
            self._child.signal_group(signal.SIGKILL)

    async def _wait_for_end(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        if self._child is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await bounded.wait_for(self._none_left.wait(), timeout_s)

    async def close(self) -> None:
        """End it for good: ask it, then kill it. At most 2 x CLOSE_TIMEOUT_S; a second call does nothing."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for end_it in (self._ask_to_end, self._kill):
            if self._child is not None:
                end_it()
                await self._wait_for_end()


class PacketProcess(SupervisedProcess):
    """A `child.program` over its lives: packets are JSON objects, and sentences of its are said.

    `settings()`: its first packet; `state()`: packets that bring it up to date. `listener`: one more socket for it.
    `env`: None = ours. With the exit code GIVEN_UP it is not started again.
    """

    def __init__(
        self,
        name: str,
        module: str,
        settings: Callable[[], dict[str, Any]],
        say: Callable[[str], None],
        state: Callable[[], Iterable[dict[str, Any]]] = tuple,
        *,
        listener: socket.socket | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._name = name
        self._module = module
        self._settings, self._state, self._say = settings, state, say
        self._listener = listener
        self._env = env
        self._code = -1  # with which it ended last

    def _start(self) -> tuple[processes.Child, socket.socket]:
        def start(fd: int) -> processes.Child:
            fds = [fd, *((self._listener.fileno(),) if self._listener is not None else ())]
            command = bootstrap.command(self._module, *map(str, fds))
            return processes.start_directly(command, fds, self._env)

        return processes.with_channel(start)

    def _on_start(self) -> None:
        for packet in (self._settings(), *self._state()):
            self.tell(packet)

    def _on_failure(self, error: OSError) -> None:
        if self._delay_s <= self.first_delay_s:
            self._say(f"the {self._name} cannot be started: {error.strerror}")
        self._spawn_later()

    def tell(self, packet: dict[str, Any]) -> None:
        """Send a packet."""
        self.send(json.dumps(packet).encode())

    def _on_message(self, data: bytes) -> None:
        with contextlib.suppress(ValueError):
            packet = json.loads(data)
            if "say" in packet:
                self._say(str(packet["say"]))
            self._on_packet(packet)

    def _on_packet(self, packet: dict[str, Any]) -> None:
        """Take a packet that is more than a sentence."""

    def _on_exit(self, pid: int, code: int) -> None:
        self._code = code
        if not self._closed and code != GIVEN_UP:
            self._say(f"the {self._name} ended with {code}; it is started again")
            self._spawn_later()

    async def finish(self, within_s: float) -> bool:
        """Have it do the rest of its work for at most that time; then it ends. Returns whether it has done all of it.

        A second call only returns the same.
        """
        if not self._closed:
            self._closed = True
            self.tell({"finish": within_s})
            await self._wait_for_end(within_s + _MARGIN_S)
        await super().close()  # a subclass may have made `close` its own way to this
        return self._code == 0
