"""The index of a merged file: which bytes came from which rank, up to which byte of its own file. Pure.

One JSON value per line. {"v": 1, "term", "owner", "cycle", "world", "at"}: an aggregator begins. {"id", "file",
"rank"}: a source. [id, end, to, at]: the text up to byte `end` of the merged file is that of source `id` up to byte
`to` of its own file, first read at `at` (Unix milliseconds). {"final": id}: the source is complete.
{"snapshot": {file: [id, rank, to, final]}, "end"}: all of that, so that a reader can begin here. {"complete": true}; or
{"missing": [ranks]}: the job has ended, and not all of these ranks' lines are here.

The text is written before its record. What lies behind the last record was never acknowledged: it is cut off, and the
source sends it again. So each byte is in the merged file exactly once.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

_SNAPSHOT = b'\n{"snapshot"'
SNAPSHOT_BYTES = 4 << 20  # of records between two snapshots
_VERSION = 1


@dataclass(slots=True)
class Source:
    """One file of one rank."""

    number: int
    rank: int  # -1 = a launcher
    to: int = 0  # bytes of it that are in the merged file
    final: bool = False


@dataclass(slots=True)
class Index:
    """What the records say. `end`: length of the merged file; `size`: length of the index, bytes."""

    end: int = 0
    size: int = 0
    term: int = 0
    owner: str = ""
    sources: dict[str, Source] = field(default_factory=dict)
    complete: bool = False
    _by_number: dict[int, Source] = field(default_factory=dict)
    _finals: int = 0  # complete sources of `owner`
    _since_snapshot: int = 0

    # --- reading --------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, data: bytes, merged_size: int, start: int = 0) -> Index:
        """The state after the last whole record in `data` that is about bytes within `merged_size`.

        `start`: where `data` begins in the index (see `tail_start`). Records behind a broken one are ignored.
        """
        index = cls(size=start)
        at = 0
        while (newline := data.find(b"\n", at)) >= 0:
            try:
                good = index._apply(json.loads(data[at:newline]), merged_size)
            except (ValueError, KeyError, TypeError, IndexError):
                good = False
            if not good:
                break
            index.size += newline + 1 - at
            at = newline + 1
        return index

    @staticmethod
    def tail_start(tail: bytes) -> int:
        """Where in the last bytes of an index a reader can begin: at the last snapshot; -1 = there is none."""
        return tail.rfind(_SNAPSHOT) + 1 or -1

    def _apply(self, record: Any, merged_size: int) -> bool:
        if isinstance(record, list):
            number, end, to, _ = record
            if not self.end <= end <= merged_size:
                return False
            source = self._by_number[number]
            self.end, source.to = int(end), int(to)
        elif "file" in record:
            self._add(record["file"], Source(int(record["id"]), int(record["rank"])))
        elif "final" in record:
            self._by_number[record["final"]].final = True
        elif "snapshot" in record:
            if record["end"] > merged_size:
                return False
            self.sources, self._by_number, self.end = {}, {}, int(record["end"])
            for file, (number, rank, to, final) in record["snapshot"].items():
                self._add(file, Source(number, rank, to, final))
            self.term, self.owner = int(record["term"]), str(record["owner"])
        elif "term" in record:
            self.term, self.owner, self.complete = int(record["term"]), str(record["owner"]), False
        elif "complete" in record:
            self.complete = True
        return True

    def _add(self, file: str, source: Source) -> None:
        self.sources[file] = self._by_number[source.number] = source

    # --- writing: each method returns records to be appended ------------------------------------------------

    def begin(self, term: int, owner: str, cycle: int, world: int, at: int) -> bytes:
        """An aggregator begins. `owner`: the run; `at`: Unix milliseconds."""
        self.term, self.owner = term, owner
        self._finals = sum(one.final for file, one in self.sources.items() if file.startswith(f"{owner}/"))
        self.complete = 0 < 2 * world <= self._finals
        head = {"v": _VERSION, "term": term, "owner": owner, "cycle": cycle, "world": world, "at": at}
        return _line(head) + self.snapshot() + (_line({"complete": True}) if self.complete else b"")

    def open(self, file: str, rank: int) -> bytes:
        """A source, if it is not known yet."""
        if file in self.sources:
            return b""
        source = Source(len(self._by_number), rank)
        self._add(file, source)
        return _line({"id": source.number, "file": file, "rank": rank})

    def append(self, file: str, size: int, to: int, at: int) -> bytes:
        """`size` bytes of text are at the end of the merged file: those of `file` up to its byte `to`."""
        source = self.sources[file]
        self.end += size
        source.to = to
        return b"[%d,%d,%d,%d]\n" % (source.number, self.end, to, at)

    def finish(self, file: str, expected: int) -> bytes:
        """The source is complete; with `expected` (> 0) complete ones of all ranks, the merged file is."""
        source = self.sources[file]
        if source.final:
            return b""
        source.final = True
        self._finals += file.startswith(f"{self.owner}/")
        self.complete = 0 < expected <= self._finals
        return _line({"final": source.number}) + (_line({"complete": True}) if self.complete else b"")

    def missing(self, world: int) -> list[int]:
        """The ranks of a cycle with `world` ranks of which not all is in the merged file."""
        done = [one.rank for file, one in self.sources.items() if one.final and file.startswith(f"{self.owner}/")]
        counts = Counter(done)
        return [rank for rank in range(world) if counts[rank] < 2]

    def give_up(self, world: int) -> bytes:
        """No more comes."""
        return _line({"missing": self.missing(world)})

    def snapshot(self) -> bytes:
        """The whole state."""
        self._since_snapshot = 0
        found = {file: [one.number, one.rank, one.to, one.final] for file, one in self.sources.items()}
        return _line({"snapshot": found, "end": self.end, "term": self.term, "owner": self.owner})

    def written(self, size: int) -> bytes:
        """`size` bytes of records were appended. Returns a snapshot where one is due."""
        self.size += size
        self._since_snapshot += size
        return self.snapshot() if self._since_snapshot >= SNAPSHOT_BYTES else b""


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
