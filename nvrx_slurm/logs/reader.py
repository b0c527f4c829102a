"""Reads the lines of a job again: from its merged files where there are any, else from the files of its ranks.

A reader remembers where it stopped: `read` gives what is new since then.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nvrx_slurm.core.logs.index import Index
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
        self._at = 0  # of the index
        self._index = Index()

    def read(self, final: bool) -> Iterator[Piece]:
        """What has come since the last time. Raises OSError."""
        with open(index_file(str(self._path)), "rb") as records, self._path.open("rb") as text:
            records.seek(self._at)
            for line in records:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                begin = self._index.end
                with contextlib.suppress(ValueError):
                    if found := self._index.apply(line, os.fstat(text.fileno()).st_size):
                        source, at = found
                        text.seek(begin)
                        piece = text.read(self._index.end - begin)
                        yield Piece(at, source.rank, source.file.rpartition(".")[2], piece)


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
