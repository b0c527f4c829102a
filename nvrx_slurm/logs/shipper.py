"""The shipper: reads what the ranks of this node wrote and sends it to an aggregator. One process per node.

It keeps no line either: what is not acknowledged is read again. A rank's file is the queue, so a rank never waits.
inotify tells of new lines; they are read twice a second at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

from nvrx_slurm.control.identity import identity
from nvrx_slurm.control.stream import Stream
from nvrx_slurm.core.logs.lines import Lines, rank_prefix
from nvrx_slurm.errors import ProtocolError
from nvrx_slurm.logs import child, wire
from nvrx_slurm.logs.tcp import keep_alive
from nvrx_slurm.system.inotify import Inotify

_WINDOW_BYTES = 512 << 10  # of text that is not acknowledged
_CONNECT_S = 5.0
_RETRY_S, _LAST_RETRY_S = 0.2, 5.0
_STALLED_S = 5.0  # at the end: without an acknowledgement for so long, the rest stays in the ranks' files
_POLL_S = 1.0  # where there is no inotify


class Settings(NamedTuple):
    """As the agent gives them. Paths of sources are below `log_dir`."""

    token: str
    job: str
    node: str  # names this node's shipper to the aggregator
    log_dir: str
    batch_s: float = 0.5  # lines wait up to that long for more


@dataclass(slots=True)
class _Source:
    """One file. Its bytes up to `sent` were sent, those up to `acked` are in the merged file."""

    opened: wire.Opened
    path: str
    lines: Lines
    fd: int = -1
    sent: int = -1  # -1: the aggregator has not said where it goes on
    acked: int = 0
    ending: bool = False  # no program writes to it any more
    final_sent: bool = False


class _Flight(NamedTuple):
    source: _Source
    to: int
    size: int
    final: bool


class Shipper:
    """The program's state. `result`: its exit code."""

    def __init__(self, settings: Settings, connection: socket.socket) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._control = child.Control(connection, self._on_packet)
        self._sources: dict[int, _Source] = {}
        self._next_number = 0
        self._dirty: dict[int, None] = {}  # numbers of sources that may have something to send, in the order of turns
        self._flights: deque[_Flight] = deque()
        self._in_flight = 0  # bytes
        self._stream: Stream | None = None
        self._where: tuple[str, int] | None = None  # host and port, or path and 0
        self._token = settings.token
        self._connecting: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()  # the aggregator is elsewhere now
        self._round_timer: asyncio.TimerHandle | None = None
        self._finishing = False
        self._heard_s = 0.0  # when something was acknowledged last
        self._changes: Inotify | None = None
        self._told = ""
        self.result: asyncio.Future[int] = self._loop.create_future()
        try:
            self._changes = Inotify()
            self._loop.add_reader(self._changes.fd, self._on_change)
        except OSError as error:
            self._say(f"no inotify here ({error.strerror}): the files are read every {_POLL_S:g} s")
            self._poll()

    def _say(self, text: str) -> None:
        if text != self._told:
            self._told = text
            self._control.send(say=text)

    # --- the agent ----------------------------------------------------------------------------------------------

    def _on_packet(self, packet: dict[str, Any] | None) -> None:
        """{"at": [host, port], "token"}: the aggregator. {"cycle", "files": [[file, rank]...], "world"}: sources.
        {"over": cycle}: complete. {"now": true}: send at once. {"finish": seconds}: send the rest, then end."""
        if packet is None:
            packet = {"finish": _STALLED_S}
        if "at" in packet:
            self._where, self._token = tuple(packet["at"]), packet["token"] or self._token
            self._moved.set()
            if self._stream is not None:
                self._stream.abort(ConnectionError("the aggregator is elsewhere now"))
            if self._connecting is None:
                self._connecting = asyncio.ensure_future(self._stay_connected())
                self._connecting.add_done_callback(self._on_broken)
        if "cycle" in packet:
            self._add(packet["cycle"], packet["files"], packet["world"])
        if "over" in packet:
            self._over(packet["over"])
        if "finish" in packet and not self._finishing:
            self._finish(float(packet["finish"]))
        if "now" in packet or "over" in packet:
            self._dirty.update(dict.fromkeys(self._sources))
            self._pump()

    def _add(self, cycle: int, files: list[tuple[str, int]], world: int) -> None:
        known = {one.opened.file for one in self._sources.values()}
        new = []
        for file, rank in files:
            if file in known:
                continue
            path = os.path.join(self._settings.log_dir, file)
            opened = wire.Opened(self._next_number, cycle, file, rank, world)
            self._next_number += 1
            prefix = rank_prefix(rank, world) if rank >= 0 else b""
            self._sources[opened.source] = _Source(opened, path, Lines(prefix))
            new.append(opened)
            self._watch(os.path.dirname(path))
        if self._stream is not None and new:
            self._open(new, everything=False)

    def _watch(self, directory: str) -> None:
        if self._changes is not None:
            try:
                os.makedirs(directory, exist_ok=True)
                self._changes.watch(directory)
            except OSError as error:
                self._say(f"{directory} cannot be watched: {error.strerror}: its files are read at the end")

    def _over(self, cycle: int) -> None:
        """No worker of this cycle is left."""
        for number, source in self._sources.items():
            if source.opened.cycle == cycle:
                source.ending = True
                self._dirty[number] = None

    def _finish(self, within_s: float) -> None:
        """No worker is left."""
        self._finishing = True
        for number, source in self._sources.items():
            source.ending = True
            self._dirty[number] = None
        self._heard_s = self._loop.time()
        self._loop.call_later(within_s, self._end, 0)
        self._pump()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if not self._finishing or self.result.done():
            return
        if not self._sources:
            return self._end(0)
        stalled_s = self._loop.time() - self._heard_s
        if stalled_s >= _STALLED_S:
            return self._end(0)
        self._loop.call_later(_STALLED_S - stalled_s, self._end_if_done)

    def _end(self, code: int) -> None:
        if not self.result.done():
            self.result.set_result(code)

    def _on_broken(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None and not self.result.done():
            self.result.set_exception(task.exception())  # type: ignore[arg-type]

    # --- the aggregator -------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        delay_s = _RETRY_S
        while True:
            self._moved.clear()
            ended: asyncio.Future[Exception] = self._loop.create_future()
            began_s = self._loop.time()
            try:
                await asyncio.wait_for(self._connect(ended), _CONNECT_S)
                why: Exception = await ended
                delay_s = _RETRY_S if self._loop.time() - began_s >= _CONNECT_S else delay_s
            except (OSError, asyncio.TimeoutError) as error:
                why = error
            self._stream = None
            self._forget()
            if isinstance(why, ProtocolError):
                self._say(f"the log aggregator broke the protocol: {why}")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._moved.wait(), delay_s)
            delay_s = min(2 * delay_s, _LAST_RETRY_S)

    async def _connect(self, ended: asyncio.Future[Exception]) -> None:
        assert self._where is not None
        host, port = self._where
        family = socket.AF_UNIX if not port else socket.AF_INET6 if ":" in host else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await self._loop.sock_connect(connection, (host, port) if port else host)
            if port:
                keep_alive(connection)
        except BaseException:
            connection.close()
            raise

        def on_end(why: Exception) -> None:
            if not ended.done():
                ended.set_result(why)

        proved: asyncio.Future[None] = self._loop.create_future()
        id = identity(self._token, wire.IDENTITY.format(self._settings.job))
        stream = Stream(connection, id, False, self._on_frame, on_end, lambda: proved.set_result(None))
        try:
            both: set[asyncio.Future[Any]] = {proved, ended}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            stream.abort(ConnectionError("no answer in time"))
            raise
        if proved.done() and not ended.done():
            self._stream = stream
            stream.send(wire.message(wire.HELLO, {"version": wire.VERSION, "node": self._settings.node}))
            self._open_all()

    def _forget(self) -> None:
        """What was not acknowledged has to be sent again."""
        self._flights.clear()
        self._in_flight = 0
        for source in self._sources.values():
            source.sent, source.final_sent = -1, False

    def _open_all(self) -> None:
        self._forget()
        self._open([source.opened for source in self._sources.values()], everything=True)

    def _open(self, sources: list[wire.Opened], everything: bool) -> None:
        assert self._stream is not None
        self._stream.send(wire.message(wire.OPEN, {"all": everything, "sources": sources}))

    def _on_frame(self, frame: bytes) -> None:
        """Raises ProtocolError."""
        kind = frame[0] if frame else -1
        if kind == wire.ACK:
            self._on_ack(wire.acked(frame))
        elif kind == wire.HAVE:
            self._on_have(wire.content(frame))
        elif kind == wire.HOLD:
            self._open_all()
        else:
            raise ProtocolError(f"it sent a frame of kind {kind}")

    def _on_have(self, offsets: dict[str, int]) -> None:
        for number, to in offsets.items():
            source = self._sources.get(int(number))
            if source is not None:
                source.sent = source.acked = int(to)
                source.lines = Lines(source.lines.prefix)
                self._dirty[source.opened.source] = None
        self._heard_s = self._loop.time()
        self._pump()

    def _on_ack(self, count: int) -> None:
        for _ in range(count):
            if not self._flights:
                raise ProtocolError("it acknowledges what was not sent")
            flight = self._flights.popleft()
            self._in_flight -= flight.size
            flight.source.acked = flight.to
            if flight.final:
                self._drop(flight.source)
        self._heard_s = self._loop.time()
        self._pump()
        self._end_if_done()

    def _drop(self, source: _Source) -> None:
        self._sources.pop(source.opened.source, None)
        self._dirty.pop(source.opened.source, None)
        if source.fd >= 0:
            os.close(source.fd)
            source.fd = -1

    # --- the files --------------------------------------------------------------------------------------------------

    def _on_change(self) -> None:
        """A file has grown. Do not look before the next round: a rank may write a thousand lines until then."""
        assert self._changes is not None
        self._loop.remove_reader(self._changes.fd)
        if self._round_timer is None:
            self._round_timer = self._loop.call_later(self._settings.batch_s, self._look)

    def _look(self) -> None:
        self._round_timer = None
        assert self._changes is not None
        names = self._changes.wait()
        for number, source in self._sources.items():
            if "" in names or os.path.basename(source.path) in names:
                self._dirty[number] = None
        self._loop.add_reader(self._changes.fd, self._on_change)
        self._pump()

    def _poll(self) -> None:
        self._loop.call_later(_POLL_S, self._poll)
        self._dirty.update(dict.fromkeys(self._sources))
        self._pump()

    def _pump(self) -> None:
        """Send one chunk of each source in turn, until the window is full."""
        at = int(time.time() * 1000)
        while self._dirty and self._stream is not None and self._in_flight < _WINDOW_BYTES:
            number = next(iter(self._dirty))
            del self._dirty[number]
            source = self._sources[number]
            if source.sent >= 0 and not source.final_sent and self._send_some(source, at):
                self._dirty[number] = None

    def _send_some(self, source: _Source, at: int) -> bool:
        """Send a chunk of this source; whether there may be more to send now."""
        try:
            if source.fd < 0:
                source.fd = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
            data = os.pread(source.fd, wire.READ_BYTES, source.sent)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            self._say(f"{source.path} cannot be read: {error.strerror}")
            data = b""
        at_end = len(data) < wire.READ_BYTES
        final = source.ending and at_end
        text, used = source.lines.take(data, final)
        if not used and not final:
            return False
        chunk = wire.Chunk(source.opened.source, source.sent, source.sent + used, at, final, text)
        assert self._stream is not None
        self._stream.send(wire.from_chunk(chunk))
        size = len(text) + 64
        self._flights.append(_Flight(source, chunk.to, size, final))
        self._in_flight += size
        source.sent, source.final_sent = chunk.to, final
        return not at_end


async def _main(settings: dict[str, Any], connection: socket.socket) -> int:
    return await Shipper(Settings(**settings), connection).result


def main(arguments: list[str]) -> int:
    """`arguments`: the descriptor of the socket to the agent."""
    return child.run(int(arguments[0]), _main)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
