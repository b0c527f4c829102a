"""Reads the lines of a job again: from its merged files where there are any, else from the files of its ranks.

A reader remembers where it stopped: `read` gives what is new since then.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from nvrx_slurm.core.logs.lines import Lines, rank_prefix
from nvrx_slurm.core.logs.names import index_file
from nvrx_slurm.logs.rank_file import RankFile

_RANK_FILE = re.compile(r"rank_(\d+)\.(out|err)")


class Piece(NamedTuple):
    """Whole lines of one rank, behind their prefix."""

    at: int  # when they were read first, Unix milliseconds; 0 = not known
    rank: int
    stream: str  # "out" or "err"
    text: bytes


class MergedReader:
    """One merged file, by its index. `final`: no program writes any more, so a last line without newline counts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = self._end = 0
        self._sources: dict[int, tuple[int, str]] = {}

    def read(self, final: bool) -> Iterator[Piece]:
        """What has come since the last time. Raises OSError."""
        with open(index_file(str(self._path)), "rb") as index, self._path.open("rb") as text:
            index.seek(self._at)
            for line in index:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    yield from self._record(json.loads(line), text)

    def _record(self, record: Any, text: IO[bytes]) -> Iterator[Piece]:
        if isinstance(record, list):
            number, end, _, at = record
            rank, stream = self._sources[number]
            if end > self._end:
                text.seek(self._end)
                yield Piece(at, rank, stream, text.read(end - self._end))
                self._end = end
        elif "file" in record:
            self._sources[record["id"]] = record["rank"], record["file"].rpartition(".")[2]
        else:
            self._end = max(self._end, record["end"])
            for file, (number, rank, _) in record["sources"].items():
                self._sources[number] = rank, file.rpartition(".")[2]


class TreeReader:
    """The files of all ranks of one cycle, one after the other."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, RankFile] = {}

    def read(self, final: bool) -> Iterator[Piece]:
        """What has come since the last time. Raises OSError."""
        found = {}
        for path in self._directory.glob("node_*/rank_*"):
            if match := _RANK_FILE.fullmatch(path.name):
                found[path] = int(match[1]), match[2]
        world = max((rank for rank, _ in found.values()), default=0) + 1
        for path, (rank, stream) in sorted(found.items(), key=lambda item: item[1]):
            file = self._files.setdefault(path, RankFile(path, Lines()))
            file.lines.prefix = rank_prefix(rank, world)
            at_end = False
            while not at_end:
                text, at_end = file.read(final)
                if text:
                    yield Piece(0, rank, stream, text)
            file.close()


def cycles(run: Path) -> dict[int, MergedReader | TreeReader]:
    """The reader of each cycle below the directory of a run, by its number."""
    found: dict[int, MergedReader | TreeReader] = {}
    for path in [*run.glob("cycle_*"), *run.glob("merged/cycle_*.log")]:
        number = path.stem.removeprefix("cycle_")
        if number.isdecimal() and path.exists():
            found[int(number)] = TreeReader(path) if path.suffix == "" else MergedReader(path.resolve())
    return dict(sorted(found.items()))
