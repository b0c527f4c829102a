"""The aggregator: takes lines from the shippers of all nodes and appends them to the merged file of their cycle.

It keeps no line: what it has read it writes in the same turn of its loop, and then acknowledges. Where it cannot write
(a full disk), it drops the shippers of the file, which come again; lines wait in the ranks' own files.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nvrx_slurm.child import program
from nvrx_slurm.control.admission import Caller, Listener
from nvrx_slurm.control.identity import identity
from nvrx_slurm.core.logs.names import cycle_file
from nvrx_slurm.errors import NvrxError, ProtocolError
from nvrx_slurm.logs import wire
from nvrx_slurm.logs.merged import Batch, MergedFile, Superseded

_FLUSH_BYTES = 4 << 20  # with more than this, lines are written before the turn of the loop ends
_YOUNG_S = 2.0  # a job that ends sooner waits that long for its shippers to come
_AGAIN_S = wire.LAST_RETRY_S + 1.0  # within which dropped shippers come again
_MOST_FILES = 8  # open at a time


class AggregatorSettings(NamedTuple):
    """As the agent gives them."""

    token: str
    job: str  # "" = it has one node
    term: int
    owner: str  # the run, "job/run": the files of its sources begin with it
    prefix: str  # of the merged files; "" = none is wanted
    logfile: str  # for the launchers' output; "" = none is wanted
    links: str = ""  # directory of links to the merged files; "" = none


@dataclass(slots=True)
class _OpenSource:
    file: str
    path: str  # of the merged file
    to: int  # chunks have come up to this offset


class _Shipper:
    """One stream. `sources`: by its numbers. `written`: offsets that wait to be acknowledged."""

    def __init__(self, peer: Caller) -> None:
        self.peer = peer
        self.sources: dict[int, _OpenSource] = {}
        self.written: dict[int, int] = {}

    def have(self, offsets: dict[int, int]) -> None:
        """Tell it what the files have."""
        if offsets and self.peer.stream is not None:
            self.peer.stream.send(wire.message(wire.HAVE, offsets))


class Aggregator(program.Program):
    """The program's state. `listener`: where shippers come."""

    def __init__(
        self, listener: socket.socket, settings: AggregatorSettings, connection: socket.socket
    ) -> None:
        super().__init__(connection)
        self._settings = settings
        self._listener = Listener(self._on_frame, self._on_end, None, self.say)
        self._listener.identity = identity(settings.token, wire.IDENTITY.format(settings.job))
        self._shippers: dict[Caller, _Shipper] = {}
        self._files: dict[str, MergedFile] = {}  # open ones, oldest first
        self._pending: dict[str, list[Batch]] = {}
        self._pending_bytes = 0
        self._finishing, self._come_until_s = False, self.loop.time() + _YOUNG_S
        self._listener.take(listener)

    def on_packet(self, packet: dict[str, Any]) -> None:
        """{"finish": seconds}: end when all shippers have left, after at most that time."""
        self._finishing = True
        self.loop.call_later(float(packet["finish"]), self.end)
        self._end_if_all_left()

    def _end_if_all_left(self) -> None:
        if self._finishing and not self._shippers and not self.result.done():
            left_s = self._come_until_s - self.loop.time()
            if left_s <= 0:
                self.end()
            else:
                self.loop.call_later(left_s, self._end_if_all_left)

    # --- shippers ---------------------------------------------------------------------------------------------

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
        wire.keep_alive(peer.socket)
        older = next((one for one in self._shippers if one.node_id == hello["node"]), None)
        self._shippers[peer] = _Shipper(peer)
        peer.node_id = hello["node"]
        self._listener.admitted(peer)
        if older is not None:
            older.abort(ConnectionError("its shipper connected again"))
        if not self._settings.job:
            self._come_until_s = 0.0  # there is no other one

    def _on_end(self, peer: Caller, why: Exception) -> None:
        shipper = self._shippers.pop(peer, None)
        if shipper is None:
            return self._listener.left(peer, why)
        if isinstance(why, NvrxError):
            self.say(f"the log shipper of {peer.node_id} broke the protocol: {why}")
        self._end_if_all_left()

    def _on_open(self, shipper: _Shipper, sources: list[wire.Opened]) -> None:
        """Tell where the sources go on, but not those of a file that cannot be opened."""
        self._flush()
        found = dict[int, int]()
        broken = set[str]()
        for one in sources:
            if not one.file.startswith(f"{self._settings.owner}/") or ".." in Path(one.file).parts:
                raise ProtocolError(f"it opens {one.file[:80]!r}, which is no file of this run")
            path = self._path(one.cycle)
            if not path:
                raise ProtocolError("it opens a source that is not wanted")
            if path in broken:
                continue
            try:
                found[one.source] = to = self._file(path, one.cycle).open(one.file, one.rank)
            except (OSError, Superseded) as error:
                broken.add(path)
                self._fail(path, error)
            else:
                shipper.sources[one.source] = _OpenSource(one.file, path, to)
        shipper.have(found)

    # --- files ------------------------------------------------------------------------------------------------

    def _path(self, cycle: int) -> str:
        s = self._settings
        return (s.prefix and cycle_file(s.prefix, cycle)) if cycle >= 0 else s.logfile

    def _file(self, path: str, cycle: int = -1) -> MergedFile:
        """The open file; with `cycle` there is a link to it. One that was closed for another one is opened again."""
        if path not in self._files:
            self._files[path] = MergedFile(path, self._settings.term, self._settings.owner)
            self._link(path, cycle)
            if self._said.startswith(path):
                self.say(f"{path}: written again")
            if len(self._files) > _MOST_FILES:
                self._files.pop(next(iter(self._files))).close()
        return self._files[path]

    def _link(self, path: str, cycle: int) -> None:
        """So that `nvrx logs` finds the file from the directory of the run."""
        links = self._settings.links
        if links and cycle >= 0:
            with contextlib.suppress(OSError):
                os.makedirs(links, exist_ok=True)
                os.symlink(path, f"{links}/cycle_{cycle}.log")

    # --- lines ------------------------------------------------------------------------------------------------

    def _on_chunk(self, shipper: _Shipper, chunk: wire.Chunk) -> None:
        source = shipper.sources.get(chunk.source)
        if source is None or chunk.begin != source.to or chunk.to < source.to:
            raise ProtocolError("it sent a chunk that does not follow the one before")
        source.to = shipper.written[chunk.source] = chunk.to
        if not self._pending:
            self.loop.call_soon(self._flush)
        self._pending.setdefault(source.path, []).append(
            Batch(source.file, chunk.text, chunk.to, chunk.at)
        )
        self._pending_bytes += len(chunk.text)
        if self._pending_bytes >= _FLUSH_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write what has come in this turn, then acknowledge it."""
        pending = self._pending
        self._pending = {}
        self._pending_bytes = 0
        for path, batches in pending.items():
            try:
                self._file(path).append(batches)
            except (OSError, Superseded) as error:
                self._fail(path, error)
        if pending:
            for shipper in list(self._shippers.values()):
                written = shipper.written
                shipper.written = {}
                shipper.have(written)

    def _fail(self, path: str, error: Exception) -> None:
        """Forget what was not acknowledged: its shippers come again. Other files go on."""
        if path in self._files:
            self._files.pop(path).close()
        if isinstance(error, Superseded):
            return self.end(program.GIVEN_UP)  # the aggregator of a later term has the files
        why = getattr(error, "strerror", "") or str(error)
        self.say(f"{path}: {why}; lines wait in the files of the ranks")
        self._come_until_s = self.loop.time() + _AGAIN_S
        for shipper in list(self._shippers.values()):
            if any(source.path == path for source in shipper.sources.values()):
                shipper.sources = {}
                shipper.written = {}
                shipper.peer.abort(ConnectionError("its lines cannot be written now"))


def main(arguments: list[str]) -> int:
    """`arguments`: the descriptors of the socket to the agent, and of one that listens."""
    listener = socket.socket(fileno=int(arguments[1]))
    return program.run(
        int(arguments[0]), lambda told, to: Aggregator(listener, AggregatorSettings(**told), to)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
