"""The aggregator: takes lines from the shippers of all nodes and appends them to the merged file of their cycle.

It keeps no line: what it has read it writes in the same turn of its loop, and then acknowledges. Where it cannot write
(a full disk), it drops the shippers of the file, which come again, and tries again; lines wait in the ranks' own files.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nvrx_slurm.child import program
from nvrx_slurm.control.admission import Caller, Listener
from nvrx_slurm.control.identity import identity
from nvrx_slurm.control.stream import Stream
from nvrx_slurm.core.logs.names import cycle_file
from nvrx_slurm.errors import NvrxError, ProtocolError
from nvrx_slurm.logs import wire
from nvrx_slurm.logs.merged import Batch, MergedFile, Superseded
from nvrx_slurm.system import bounded

_FLUSH_BYTES = 4 << 20  # that may wait for the end of a turn of the loop
_SYNC_S = 10.0
_RETRY_S, _LAST_RETRY_S = 0.5, 5.0
_DISK_S = 60.0
_YOUNG_S = 2.0  # a job that ends sooner waits that long for its shippers to come
_KEPT = 3  # complete files that stay open, should a shipper be started again


class Settings(NamedTuple):
    """As the agent gives them."""

    token: str
    job: str
    term: int
    owner: str  # the run, "job/run": the files of its sources begin with it
    prefix: str  # of the merged files; "" = none is wanted
    logfile: str  # for the launchers' output; "" = none is wanted
    part: int = -1
    links: str = ""  # directory of links to the merged files; "" = none


@dataclass(slots=True)
class _Source:
    file: str
    path: str  # of the merged file
    to: int  # chunks have come up to this offset


class _Shipper:
    """One stream. `sources`: by its numbers."""

    def __init__(self, peer: Caller) -> None:
        self.peer = peer
        self.sources: dict[int, _Source] = {}
        self.waits: list[wire.Opened] = []  # that are not answered yet
        self.written = 0  # chunks that wait to be acknowledged


class Aggregator(program.Program):
    """The program's state. `listener`: where shippers come."""

    def __init__(self, listener: socket.socket, settings: Settings, connection: socket.socket) -> None:
        super().__init__(connection)
        self._settings = settings
        self._identity = identity(settings.token, wire.IDENTITY.format(settings.job))
        self._listener = Listener(self._begin, None, self.say)
        self._shippers: dict[Caller, _Shipper] = {}
        self._files: dict[str, MergedFile] = {}
        self._pending: dict[str, list[Batch]] = {}
        self._pending_bytes = 0
        self._retry: asyncio.TimerHandle | None = None
        self._retry_s = _RETRY_S
        self._broken: set[str] = set()  # files that could not be written since the last try
        self._finishing, self._began_s = False, self.loop.time()
        self._syncing = asyncio.ensure_future(self._keep_synced())
        self._listener.take(listener)

    def on_packet(self, packet: dict[str, Any]) -> None:
        """{"finish": seconds}: end when all shippers have left, after at most that time."""
        self._finishing = True
        self.loop.call_later(float(packet["finish"]), self.end)
        self._end_if_all_left()

    def _end_if_all_left(self) -> None:
        if not self._finishing or self._shippers or self._retry is not None or self.result.done():
            return
        late_s = self._began_s + _YOUNG_S - self.loop.time()
        if late_s <= 0 or (self._files and all(merged.index.complete for merged in self._files.values())):
            self.end()
        else:
            self.loop.call_later(late_s, self._end_if_all_left)

    def end(self, code: int = 0) -> None:
        """Name the ranks of which something is missing."""
        if not self.result.done() and not code:
            self._flush()
            for path, merged in self._files.items():
                with contextlib.suppress(OSError, Superseded):
                    if ranks := merged.give_up():
                        self.say(f"{path} is not complete: lines of {len(ranks)} ranks are missing, first {ranks[0]}")
        super().end(code)

    # --- shippers ---------------------------------------------------------------------------------------------

    def _begin(self, peer: Caller) -> Stream:
        wire.keep_alive(peer.socket)
        return Stream(peer.socket, self._identity, True, partial(self._on_frame, peer), partial(self._on_end, peer))

    def _on_frame(self, peer: Caller, frame: bytes) -> None:
        """Raises ProtocolError, which ends the stream."""
        kind = frame[0] if frame else -1
        shipper = self._shippers.get(peer)
        if kind == wire.CHUNK and shipper is not None:
            self._on_chunk(shipper, wire.to_chunk(frame))
        elif kind == wire.OPEN and shipper is not None:
            self._on_open(shipper, wire.opened(frame))
        elif kind == wire.HELLO and shipper is None:
            self._on_hello(peer, wire.content(frame))
        else:
            raise ProtocolError(f"it sent a frame of kind {kind}, which is not expected here")

    def _on_hello(self, peer: Caller, hello: Any) -> None:
        known = isinstance(hello, dict) and isinstance(hello.get("node"), str)
        if not known or hello.get("version") != wire.VERSION:
            raise ProtocolError(f"it does not speak version {wire.VERSION} of the log protocol")
        older = next((one for one in self._shippers if one.node_id == hello["node"]), None)
        self._shippers[peer] = _Shipper(peer)
        peer.node_id = hello["node"]
        self._listener.admitted(peer)
        if older is not None:
            older.abort(ConnectionError("its shipper connected again"))

    def _on_end(self, peer: Caller, why: Exception) -> None:
        shipper = self._shippers.pop(peer, None)
        if shipper is None:
            return self._listener.left(peer, why)
        if isinstance(why, NvrxError):
            self.say(f"the log shipper of {peer.node_id} broke the protocol: {why}")
        self._end_if_all_left()

    # --- sources ----------------------------------------------------------------------------------------------

    def _on_open(self, shipper: _Shipper, sources: list[wire.Opened]) -> None:
        for one in sources:
            if not one.file.startswith(f"{self._settings.owner}/") or ".." in Path(one.file).parts:
                raise ProtocolError(f"it opens {one.file[:80]!r}, which is no file of this run")
            if not self._path(one):
                raise ProtocolError("it opens a source that is not wanted")
        shipper.waits += sources
        self._answer(shipper)

    def _path(self, source: wire.Opened) -> str:
        s = self._settings
        return (s.prefix and cycle_file(s.prefix, source.cycle, s.part)) if source.cycle >= 0 else s.logfile

    def _answer(self, shipper: _Shipper) -> None:
        """Tell where the sources go on. Those of a file that cannot be opened wait."""
        self._flush()
        waits, shipper.waits = shipper.waits, []
        found: dict[int, _Source] = {}
        for one in waits:
            path = self._path(one)
            try:
                if path in self._broken:
                    shipper.waits.append(one)
                else:
                    found[one.source] = _Source(one.file, path, self._file(path, one).open(one.file, one.rank))
            except (OSError, Superseded) as error:
                shipper.waits.append(one)
                self._fail(path, error)
        shipper.sources.update(found)
        if found:
            self._send(shipper, wire.message(wire.HAVE, {number: source.to for number, source in found.items()}))

    def _file(self, path: str, source: wire.Opened) -> MergedFile:
        if path not in self._files:
            complete = [old for old, merged in self._files.items() if merged.index.complete]
            for old in complete[:-_KEPT]:  # all that was sent for them has been written: `_answer` flushes first
                self._files.pop(old).close()
            s, now = self._settings, int(time.time() * 1000)
            world = source.world if s.part < 0 and source.cycle >= 0 else 0
            self._files[path] = MergedFile(path, s.term, s.owner, source.cycle, world, now)
            self._link(path, source.cycle)
            if self._said.startswith(path):
                self.say(f"{path}: written again")
        return self._files[path]

    def _link(self, path: str, cycle: int) -> None:
        """So that `nvrx logs` finds the file from the directory of the run."""
        s = self._settings
        if s.links and cycle >= 0:
            with contextlib.suppress(OSError):
                os.makedirs(s.links, exist_ok=True)
                os.symlink(path, f"{s.links}/cycle_{cycle}{f'.part{s.part}' if s.part >= 0 else ''}.log")

    # --- lines ------------------------------------------------------------------------------------------------

    def _on_chunk(self, shipper: _Shipper, chunk: wire.Chunk) -> None:
        source = shipper.sources.get(chunk.source)
        if source is None or chunk.begin != source.to or chunk.to < source.to:
            raise ProtocolError("it sent a chunk that does not follow the one before")
        source.to = chunk.to
        shipper.written += 1
        if not self._pending:
            self.loop.call_soon(self._flush)
        batch = Batch(source.file, chunk.text, chunk.to, chunk.at, chunk.final)
        self._pending.setdefault(source.path, []).append(batch)
        self._pending_bytes += len(chunk.text)
        if self._pending_bytes >= _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write what has come in this turn, then acknowledge it."""
        pending, self._pending, self._pending_bytes = self._pending, {}, 0
        for path, batches in pending.items():
            try:
                if path not in self._files:
                    raise OSError(0, "it was closed")
                self._files[path].append(batches)
            except (OSError, Superseded) as error:
                self._fail(path, error)
        if pending:
            for shipper in self._shippers.values():
                if shipper.written:
                    self._send(shipper, wire.ack(shipper.written))
                    shipper.written = 0

    def _send(self, shipper: _Shipper, frame: bytes) -> None:
        if shipper.peer.stream is not None:
            shipper.peer.stream.send(frame)

    # --- files that cannot be written ---------------------------------------------------------------------------

    def _fail(self, path: str, error: Exception) -> None:
        """Forget what was not acknowledged, and try again later. Other files go on."""
        self._broken.add(path)
        self._pending.pop(path, None)
        if path in self._files:
            self._files.pop(path).close()
        if isinstance(error, Superseded):
            return self.end(program.GIVEN_UP)  # the aggregator of a later term has the files
        why = getattr(error, "strerror", "") or str(error)
        self.say(f"{path}: {why}; lines wait in the files of the ranks")
        for peer, shipper in list(self._shippers.items()):
            if any(source.path == path for source in shipper.sources.values()):
                shipper.written = 0
                peer.abort(ConnectionError("its lines cannot be written now"))
        if self._retry is None:
            self._retry = self.loop.call_later(self._retry_s, self._try_again)
            self._retry_s = min(2 * self._retry_s, _LAST_RETRY_S)

    def _try_again(self) -> None:
        self._retry = None
        self._broken.clear()
        for shipper in list(self._shippers.values()):
            self._answer(shipper)
        if not self._broken:
            self._retry_s = _RETRY_S
        self.loop.call_later(_LAST_RETRY_S, self._end_if_all_left)  # until then its shippers come again

    async def _keep_synced(self) -> None:
        """Have the disk take the files every 10 s. One that hangs does not end this program."""
        while True:
            await asyncio.sleep(_SYNC_S)
            for path, merged in list(self._files.items()):
                try:
                    merged.check_names()
                    if merged.synced != merged.index.size:
                        await bounded.call_async(merged.sync, _DISK_S, "the disk of the merged logs")
                except (OSError, RuntimeError, bounded.Overrun) as error:
                    if self._files.get(path) is merged:
                        self._fail(path, error)
                    break


def main(arguments: list[str]) -> int:
    """`arguments`: the descriptors of the socket to the agent, and of one that listens."""
    listener = socket.socket(fileno=int(arguments[1]))
    return program.run(int(arguments[0]), lambda settings, to: Aggregator(listener, Settings(**settings), to))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
