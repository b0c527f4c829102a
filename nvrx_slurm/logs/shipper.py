"""The shipper: reads what the ranks of this node wrote and sends it to an aggregator. One process per node.

It keeps no line: what is not acknowledged is read again. A rank's file is the queue, so a rank never waits. inotify
tells of new lines; they are read twice a second at most.
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

from nvrx_slurm.child import program
from nvrx_slurm.control.identity import identity
from nvrx_slurm.control.stream import Stream
from nvrx_slurm.core.logs.lines import Lines, rank_prefix
from nvrx_slurm.errors import ProtocolError
from nvrx_slurm.logs import wire
from nvrx_slurm.logs.rank_file import RankFile
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
    say_after_s: float = 10.0  # without an aggregator


@dataclass(slots=True)
class _Source:
    """One file, which was sent as far as it was read. `known`: the aggregator has said where it goes on."""

    opened: wire.Opened
    file: RankFile
    known: bool = False
    ending: bool = False  # no program writes to it any more
    final_sent: bool = False


class Shipper(program.Program):
    """The program's state."""

    def __init__(self, settings: Settings, connection: socket.socket) -> None:
        super().__init__(connection)
        self._settings, self._token = settings, settings.token
        self._sources: dict[int, _Source] = {}
        self._opened = 0  # sources so far
        self._dirty: dict[int, None] = {}  # sources that may have something to send, in the order of turns
        self._flights: deque[tuple[_Source, int, bool]] = deque()  # with their sizes, and whether it is the last one
        self._in_flight = 0  # bytes
        self._stream: Stream | None = None
        self._where: tuple[str, int] = ("", 0)  # host and port, or path and 0
        self._moved = asyncio.Event()  # the aggregator is elsewhere now
        self._finishing, self._heard_s = False, 0.0  # when something was acknowledged last
        self._lost_s = 0.0  # when there was a stream last
        self._changes: Inotify | None = None
        try:
            self._changes = Inotify()
            self.loop.add_reader(self._changes.fd, self._on_change)
        except OSError as error:
            self.say(f"no inotify here ({error.strerror}): the files are read every {_POLL_S:g} s")
            self._poll()
        self._connecting = asyncio.ensure_future(self._stay_connected())
        self._connecting.add_done_callback(self._on_broken)

    # --- the agent ----------------------------------------------------------------------------------------------

    def on_packet(self, packet: dict[str, Any]) -> None:
        """{"at": [host, port], "token"}: the aggregator. {"cycle", "files": [[file, rank]...], "world"}: sources.
        {"over": cycle}: complete. {"now": true}: send at once. {"finish": seconds}: send the rest, then end."""
        if "at" in packet:
            (host, port), self._token = packet["at"], packet["token"] or self._token
            self._where = host, port
            self._moved.set()
            if self._stream is not None:
                self._stream.abort(ConnectionError("the aggregator is elsewhere now"))
        if "files" in packet:
            self._add(packet["cycle"], packet["files"], packet["world"])
            return
        if "finish" in packet and not self._finishing:
            self._finishing, self._heard_s = True, self.loop.time()
            self.loop.call_later(float(packet["finish"]), self._give_up)
        for source in self._sources.values():
            source.ending = source.ending or self._finishing or source.opened.cycle == packet.get("over")
        self._dirty.update(dict.fromkeys(self._sources))
        self._pump()
        self._end_if_done()

    def _add(self, cycle: int, files: list[tuple[str, int]], world: int) -> None:
        known = {one.opened.file for one in self._sources.values()}
        new = []
        for file, rank in files:
            if file not in known:
                opened = wire.Opened(self._opened, cycle, file, rank, world)
                path = os.path.join(self._settings.log_dir, file)
                lines = Lines(rank_prefix(rank, world) if rank >= 0 else b"")
                self._sources[self._opened] = _Source(opened, RankFile(path, lines))
                self._opened += 1
                new.append(opened)
                self._watch(os.path.dirname(path))
        self._open(new)

    def _watch(self, directory: str) -> None:
        if self._changes is not None:
            try:
                os.makedirs(directory, exist_ok=True)
                self._changes.watch(directory)
            except OSError as error:
                self.say(f"{directory} cannot be watched: {error.strerror}: its files are read at the end")

    def _end_if_done(self) -> None:
        if self._finishing and not self.result.done():
            left_s = self._heard_s + _STALLED_S - self.loop.time()
            if not self._sources or left_s <= 0:
                return self._give_up()
            self.loop.call_later(left_s, self._end_if_done)

    def _give_up(self) -> None:
        if self._sources and not self.result.done():
            self.say(f"{len(self._sources)} files are not merged to their end; the rest is in the ranks' own files")
        self.end()

    def _on_broken(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.result.done():
            self.result.set_exception(error)

    # --- the aggregator -------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        delay_s = _RETRY_S
        await self._moved.wait()
        self._lost_s = self.loop.time()
        while True:
            self._moved.clear()
            ended: asyncio.Future[Exception] = self.loop.create_future()
            began_s = self.loop.time()
            try:
                await asyncio.wait_for(self._connect(ended), _CONNECT_S)
                why: Exception = await ended
            except (OSError, asyncio.TimeoutError) as error:
                why = error
            if self._stream is not None:
                self._lost_s = self.loop.time()
            self._stream = None
            self._forget()
            if self.loop.time() - self._lost_s >= self._settings.say_after_s:
                number = why.errno if isinstance(why, OSError) else None
                reason = os.strerror(number) if number else str(why) or "no answer in time"
                where = ":".join(map(str, self._where))
                self.say(f"the log aggregator at {where} cannot be reached: {reason}; lines wait in the ranks' files")
            delay_s = _RETRY_S if self.loop.time() - began_s >= 2 * _CONNECT_S else min(2 * delay_s, _LAST_RETRY_S)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._moved.wait(), delay_s)

    async def _connect(self, ended: asyncio.Future[Exception]) -> None:
        """Returns when the aggregator has proved itself, or the stream has ended."""
        host, port = self._where
        family = socket.AF_UNIX if not port else socket.AF_INET6 if ":" in host else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await self.loop.sock_connect(connection, (host, port) if port else host)
            wire.keep_alive(connection)
        except BaseException:
            connection.close()
            raise
        proved = asyncio.Event()

        def on_end(why: Exception) -> None:
            proved.set()
            if not ended.done():
                ended.set_result(why)

        secret = identity(self._token, wire.IDENTITY.format(self._settings.job))
        stream = Stream(connection, secret, False, self._on_frame, on_end, proved.set)
        try:
            await proved.wait()
        except BaseException:
            stream.abort(ConnectionError("no answer in time"))
            raise
        if not ended.done():
            self._stream = stream
            stream.send(wire.message(wire.HELLO, {"version": wire.VERSION, "node": self._settings.node}))
            self._open([source.opened for source in self._sources.values()])

    def _forget(self) -> None:
        """What was not acknowledged has to be sent again."""
        self._flights.clear()
        self._in_flight = 0
        for source in self._sources.values():
            source.known = source.final_sent = False

    def _open(self, sources: list[wire.Opened]) -> None:
        if self._stream is not None:
            self._stream.send(wire.message(wire.OPEN, sources))

    def _on_frame(self, frame: bytes) -> None:
        """Raises ProtocolError."""
        kind = frame[0] if frame else -1
        if kind == wire.ACK:
            self._on_ack(wire.acked(frame))
        elif kind == wire.HAVE:
            for number, to in wire.content(frame).items():
                if (source := self._sources.get(int(number))) is not None:
                    source.known, source.file.at = True, int(to)
                    source.file.lines = Lines(source.file.lines.prefix)
                    self._dirty[int(number)] = None
        else:
            raise ProtocolError(f"it sent a frame of kind {kind}")
        self._heard_s = self.loop.time()
        self._pump()
        self._end_if_done()

    def _on_ack(self, count: int) -> None:
        if count > len(self._flights):
            raise ProtocolError("it acknowledges what was not sent")
        for _ in range(count):
            source, size, final = self._flights.popleft()
            self._in_flight -= size
            if final:
                del self._sources[source.opened.source]
                self._dirty.pop(source.opened.source, None)
                source.file.close()

    # --- the files --------------------------------------------------------------------------------------------------

    def _on_change(self) -> None:
        """A file has grown. It is looked at later: a rank may write a thousand lines until then."""
        assert self._changes is not None
        self.loop.remove_reader(self._changes.fd)
        self.loop.call_later(self._settings.batch_s, self._take_changes)

    def _take_changes(self) -> None:
        assert self._changes is not None
        names = self._changes.wait()
        for number, source in self._sources.items():
            if "" in names or os.path.basename(source.file.path) in names:
                self._dirty[number] = None
        self.loop.add_reader(self._changes.fd, self._on_change)
        self._pump()

    def _poll(self) -> None:
        self.loop.call_later(_POLL_S, self._poll)
        self._dirty.update(dict.fromkeys(self._sources))
        self._pump()

    def _pump(self) -> None:
        """Send one chunk of each source in turn, until the window is full."""
        at = int(time.time() * 1000)
        while self._dirty and self._stream is not None and self._in_flight < _WINDOW_BYTES:
            number = next(iter(self._dirty))
            del self._dirty[number]
            source = self._sources[number]
            if source.known and not source.final_sent and self._send_some(self._stream, source, at):
                self._dirty[number] = None

    def _send_some(self, stream: Stream, source: _Source, at: int) -> bool:
        """Send a chunk of this source; whether there may be more to send now."""
        file, begin, text, at_end = source.file, source.file.at, b"", True
        try:
            text, at_end = file.read(source.ending)
        except OSError as error:
            self.say(f"{file.path} cannot be read: {error.strerror}")
        final = source.ending and at_end
        if file.at == begin and not final:
            return False
        source.final_sent = final
        stream.send(wire.from_chunk(wire.Chunk(source.opened.source, begin, file.at, at, final, text)))
        size = len(text) + 64
        self._flights.append((source, size, final))
        self._in_flight += size
        return not at_end


def main(arguments: list[str]) -> int:
    """`arguments`: the descriptor of the socket to the agent."""
    return program.run(int(arguments[0]), lambda settings, connection: Shipper(Settings(**settings), connection))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
