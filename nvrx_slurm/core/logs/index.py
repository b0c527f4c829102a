"""The index of a merged file: which bytes came from which rank, up to which byte of its own file. Pure.

One JSON value per line. {"v": 2, "term", "owner", "at", "end", "sources": {file: [id, rank, to]}}: the whole state. An
aggregator begins with it, and repeats it after each 4 MB of records, so that a reader can begin there. {"id", "file",
"rank"}: a source. [id, end, to, at]: the text up to byte `end` of the merged file is that of source `id` up to byte
`to` of its own file, first read at `at` (Unix milliseconds).

The text is written before its record. What lies behind the last record was never acknowledged: it is cut off, and the
source sends it again. So each byte is in the merged file exactly once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from nvrx_slurm.core.bounded_json import parsed

_STATE = b'{"v":2,'  # begins a record of the whole state
STATE_EACH_BYTES = 4 << 20  # of records between two of these


@dataclass(slots=True)
class Source:
    """One file of one rank."""

    file: str
    number: int
    rank: int  # -1 = a launcher
    to: int = 0  # bytes of it that are in the merged file


@dataclass(slots=True)
class Index:
    """What the records say. `end`: length of the merged file; `size`: length of the index, bytes."""

    end: int = 0
    size: int = 0
    term: int = 0
    owner: str = ""
    sources: dict[str, Source] = field(default_factory=dict)
    _by_number: dict[int, Source] = field(default_factory=dict)
    _since_state: int = 0

    # --- reading --------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, data: bytes, merged_size: int, start: int = 0) -> Index:
        """The state after the last whole record in `data` that is about bytes within `merged_size`.

        `start`: where `data` begins in the index; > 0: reading begins at the last whole state in `data`, and without
        one `term` is 0. Records behind a broken one are ignored.
        """
        at = data.rfind(b"\n" + _STATE) + 1 if start else 0
        index = cls(size=start + at)
        while (newline := data.find(b"\n", at)) >= 0 and (
            index.term or data.startswith(_STATE, at)
        ):
            try:
                index.apply(data[at:newline], merged_size)
            except ValueError:
                break
            index.size += newline + 1 - at
            at = newline + 1
        return index

    def apply(self, line: bytes, merged_size: int) -> tuple[Source, int] | None:
        """Take a record. For text: its source, and when it was read. Raises ValueError for what is no record here."""
        try:
            return self._apply(parsed(line), merged_size)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(str(error)) from None

    def _apply(self, record: Any, merged_size: int) -> tuple[Source, int] | None:
        if isinstance(record, list):
            number, end, to, at = record
            if not self.end <= end <= merged_size:
                raise ValueError("it is about other bytes")
            source = self._by_number[number]
            self.end, source.to = int(end), int(to)
            return source, int(at)
        if "file" in record:
            self._add(Source(str(record["file"]), int(record["id"]), int(record["rank"])))
            return None
        if record["end"] > merged_size:
            raise ValueError("it is about bytes that are lost")
        self.term, self.owner, self.end = (
            int(record["term"]),
            str(record["owner"]),
            int(record["end"]),
        )
        self.sources = {}
        self._by_number = {}
        for file, (number, rank, to) in record["sources"].items():
            self._add(Source(file, number, rank, to))
        return None

    def _add(self, source: Source) -> None:
        self.sources[source.file] = self._by_number[source.number] = source

    # --- writing: each method returns records to be appended ------------------------------------------------

    def begin(self, term: int, owner: str, at: int) -> bytes:
        """The whole state: an aggregator begins, or goes on. `owner`: the run; `at`: Unix milliseconds."""
        self.term = term
        self.owner = owner
        sources = {file: [one.number, one.rank, one.to] for file, one in self.sources.items()}
        record = _line(
            {"v": 2, "term": term, "owner": owner, "at": at, "end": self.end, "sources": sources}
        )
        self._since_state = -len(record)
        return record

    def open(self, file: str, rank: int) -> bytes:
        """A source, if it is not known yet."""
        if file in self.sources:
            return b""
        source = Source(file, len(self._by_number), rank)
        self._add(source)
        return _line({"id": source.number, "file": file, "rank": rank})

    def append(self, file: str, size: int, to: int, at: int) -> bytes:
        """`size` bytes of text are at the end of the merged file: those of `file` up to its byte `to`."""
        source = self.sources[file]
        self.end += size
        source.to = to
        return b"[%d,%d,%d,%d]\n" % (source.number, self.end, to, at)

    def written(self, size: int) -> bool:
        """`size` bytes of records were appended; whether the whole state is due."""
        self.size += size
        self._since_state += size
        return self._since_state >= STATE_EACH_BYTES


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
