"""The shipper: reads what the ranks of this node wrote and sends it to an aggregator. One process per node.

It keeps no line: what is not acknowledged is read again. A rank's file is the queue, so a rank never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from nvrx_slurm.child import program
from nvrx_slurm.control.identity import identity
from nvrx_slurm.control.stream import Stream
from nvrx_slurm.core.logs.lines import Lines, rank_prefix
from nvrx_slurm.errors import ProtocolError
from nvrx_slurm.logs import wire
from nvrx_slurm.logs.rank_file import RankFile
from nvrx_slurm.system import bounded

_WINDOW_BYTES = 512 << 10  # most bytes that are sent and not yet acknowledged
_CONNECT_S = 5.0
_RETRY_S = 0.2  # doubles up to wire.LAST_RETRY_S
# at the end: without an acknowledgement for so long, the rest stays in the ranks' files
_STALLED_S = 5.0


class ShipperSettings(NamedTuple):
    """As the agent gives them. Paths of sources are below `log_dir`."""

    token: str
    job: str
    node: str  # names this node's shipper to the aggregator
    log_dir: str
    batch_s: float = 0.5  # between two readings
    say_after_s: float = 10.0  # without an aggregator


@dataclass(slots=True)
class _GrowingFile:
    """One source, which was sent as far as it was read. `known`: the aggregator has said where it goes on."""

    opened: wire.Opened
    file: RankFile
    known: bool = False
    acknowledged: int = 0  # bytes
    ending: bool = False  # no program writes to it any more
    at_end: bool = False  # whether the last read came to its end


class Shipper(program.Program):
    """The program's state."""

    def __init__(self, settings: ShipperSettings, connection: socket.socket) -> None:
        super().__init__(connection)
        self._settings = settings
        self._token = settings.token
        self._sources: dict[int, _GrowingFile] = {}
        self._opened = 0  # sources so far
        # sources that may have something to send, in the order of turns
        self._unread: dict[int, None] = {}
        self._in_flight = 0  # bytes
        self._stream: Stream | None = None  # to an aggregator that has proved itself
        self._where: tuple[str, int] = ("", 0)  # host and port, or path and 0
        self._try_now = asyncio.Event()  # the aggregator is elsewhere now, or the job ends
        self._reopening: asyncio.TimerHandle | None = None
        self._finishing, self._heard_s = False, 0.0  # when something was acknowledged last
        self._connecting = asyncio.ensure_future(self._stay_connected())
        self._connecting.add_done_callback(self._on_broken)
        self._read_on()

    # --- the agent ----------------------------------------------------------------------------------------------

    def on_packet(self, packet: dict[str, Any]) -> None:
        """{"at": [host, port], "token"}: the aggregator. {"cycle", "files": [[file, rank]...], "world"}: sources.
        {"over": cycle}: complete. {"now": true}: send at once. {"finish": seconds}: send the rest, then end."""
        if "at" in packet:
            (host, port), self._token = packet["at"], packet["token"] or self._token
            self._where = host, port
            self._try_now.set()
            if self._stream is not None:
                self._stream.abort(ConnectionError("the aggregator is elsewhere now"))
        if "files" in packet:
            self._add(packet["cycle"], packet["files"], packet["world"])
            return
        if "finish" in packet and not self._finishing:
            self._finishing, self._heard_s = True, self.loop.time()
            if self._where[0]:
                self._try_now.set()  # connect at once: the aggregator waits for a short time only
            self.loop.call_later(float(packet["finish"]), self._give_up)
        for source in self._sources.values():
            if not source.ending and (self._finishing or source.opened.cycle == packet.get("over")):
                source.ending = True
                source.at_end = False
        self._read_all()
        self._end_if_done()

    def _add(self, cycle: int, files: list[tuple[str, int]], world: int) -> None:
        known = {one.opened.file for one in self._sources.values()}
        for file, rank in files:
            if file not in known:
                opened = wire.Opened(self._opened, cycle, file, rank)
                lines = Lines(rank_prefix(rank, world) if rank >= 0 else b"")
                path = os.path.join(self._settings.log_dir, file)
                self._sources[self._opened] = _GrowingFile(opened, RankFile(path, lines))
                self._opened += 1
        self._open()

    def _end_if_done(self) -> None:
        if self._finishing and not self.result.done():
            left_s = self._heard_s + _STALLED_S - self.loop.time()
            if not self._sources or left_s <= 0:
                return self._give_up()
            self.loop.call_later(left_s, self._end_if_done)

    def _give_up(self) -> None:
        self.end(program.UNFINISHED if self._sources else 0)

    def _on_broken(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.result.done():
            self.result.set_exception(error)

    # --- the aggregator -------------------------------------------------------------------------------------------

    async def _stay_connected(self) -> None:
        await self._try_now.wait()
        delay_s, lost_s = _RETRY_S, self.loop.time()
        while True:
            self._try_now.clear()
            began_s = self.loop.time()
            why = await self._talk()
            if self._stream is not None:
                lost_s = self.loop.time()
            self._stream = None
            self._in_flight = 0
            for source in self._sources.values():
                source.known = False  # what was not acknowledged has to be sent again
            if self.loop.time() - lost_s >= self._settings.say_after_s:
                number = why.errno if isinstance(why, OSError) else None
                reason = os.strerror(number) if number else str(why) or "no answer in time"
                where = ":".join(map(str, self._where))
                self.say(
                    f"the log aggregator at {where} cannot be reached: {reason}; lines wait in the ranks' files"
                )
            young = self.loop.time() - began_s < 2 * _CONNECT_S
            delay_s = min(2 * delay_s, wire.LAST_RETRY_S) if young else _RETRY_S
            with contextlib.suppress(asyncio.TimeoutError):
                await bounded.wait_for(self._try_now.wait(), delay_s)

    async def _talk(self) -> Exception:
        """One stream to the aggregator; returns how it ended."""
        try:
            connection = await bounded.wait_for(self._connect(), _CONNECT_S)
        except (OSError, asyncio.TimeoutError) as error:
            return error
        ended: asyncio.Future[Exception] = self.loop.create_future()
        secret = identity(self._token, wire.IDENTITY.format(self._settings.job))
        stream = Stream(
            connection, secret, False, self._on_frame, ended.set_result, lambda: self._begin(stream)
        )
        self.loop.call_later(_CONNECT_S, self._expect_proof, stream)
        return await ended

    async def _connect(self) -> socket.socket:
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
        return connection

    def _begin(self, stream: Stream) -> None:
        """The aggregator has proved itself."""
        self._stream = stream
        stream.send(
            wire.message(wire.HELLO, {"version": wire.VERSION, "node": self._settings.node})
        )
        self._open()

    def _expect_proof(self, stream: Stream) -> None:
        if self._stream is not stream:
            stream.abort(ConnectionError("no answer in time"))

    def _open(self) -> None:
        """Open what the aggregator does not know; again later, because it may not be able to write its file now."""
        if self._reopening is not None:
            self._reopening.cancel()
        unknown = [source.opened for source in self._sources.values() if not source.known]
        if self._stream is not None and unknown:
            self._stream.send(wire.message(wire.OPEN, unknown))
            self._reopening = self.loop.call_later(wire.LAST_RETRY_S, self._open)

    def _on_frame(self, frame: bytes) -> None:
        """Raises ProtocolError."""
        if not frame or frame[0] != wire.HAVE:
            raise ProtocolError("it sent a frame that is no HAVE")
        for number, to in wire.content(frame).items():
            if (source := self._sources.get(int(number))) is not None:
                self._on_have(source, int(to))
        self._heard_s = self.loop.time()
        self._pump()
        self._end_if_done()

    def _on_have(self, source: _GrowingFile, to: int) -> None:
        """The merged file has the source up to byte `to`: go on from there, or less is in flight."""
        if not source.known:
            source.known = True
            source.at_end = False
            source.file.at = to
            source.file.lines = Lines(source.file.lines.prefix)
            self._unread[source.opened.source] = None
        elif to > source.file.at:
            raise ProtocolError("it acknowledges what was not sent")
        else:
            self._in_flight -= to - source.acknowledged
        source.acknowledged = to
        self._drop_if_complete(source)

    def _drop_if_complete(self, source: _GrowingFile) -> None:
        if (
            source.ending
            and source.known
            and source.at_end
            and source.acknowledged == source.file.at
        ):
            del self._sources[source.opened.source]
            source.file.close()

    # --- the files --------------------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        """Read what has come since the last time, now and ever again."""
        self.loop.call_later(self._settings.batch_s, self._read_on)
        self._read_all()

    def _read_all(self) -> None:
        self._unread.update(dict.fromkeys(self._sources))
        self._pump()

    def _pump(self) -> None:
        """Send one chunk of each source in turn, until the window is full."""
        at = int(time.time() * 1000)
        while self._unread and self._stream is not None and self._in_flight < _WINDOW_BYTES:
            number = next(iter(self._unread))
            del self._unread[number]
            source = self._sources.get(number)
            if source is not None and source.known:
                self._send_some(self._stream, source, at)

    def _send_some(self, stream: Stream, source: _GrowingFile, at: int) -> None:
        """Send a chunk of this source."""
        file = source.file
        begin = source.file.at
        text = b""
        source.at_end = True
        try:
            text, source.at_end = file.read(source.ending)
        except OSError as error:
            self.say(f"{file.path} cannot be read: {error.strerror}")
        if file.at > begin:
            stream.send(wire.from_chunk(wire.Chunk(source.opened.source, begin, file.at, at, text)))
            self._in_flight += file.at - begin
        if not source.at_end:
            self._unread[source.opened.source] = None
        self._drop_if_complete(source)


def main(arguments: list[str]) -> int:
    """`arguments`: the descriptor of the socket to the agent."""
    return program.run(
        int(arguments[0]),
        lambda settings, connection: Shipper(ShipperSettings(**settings), connection),
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
