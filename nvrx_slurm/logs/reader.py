"""Reads the lines of a job again: from its merged files where there are any, else from the files of its ranks.

A reader remembers where it stopped: `read` gives what is new since then.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from nvrx_slurm.core.logs.index import Index
from nvrx_slurm.core.logs.lines import Lines, rank_prefix
from nvrx_slurm.core.logs.names import index_file
from nvrx_slurm.logs.rank_file import RankFile
from nvrx_slurm.system.foreign import names_in, opened, size_of

_CYCLE = re.compile(r"cycle_(\d{1,9})(\.log)?")
# bytes: all sources of a big job; what an aggregator appends at once
_LONGEST_RECORD = _LONGEST_PIECE = 8 << 20
_MOST_BROKEN = 1000  # records, until nothing more is read
_RANK_FILE = re.compile(r"rank_(\d{1,9})\.(out|err)")


class Piece(NamedTuple):
    """Whole lines of one rank, behind their prefix."""

    at: int  # when they were read first, Unix milliseconds; 0 = not known
    rank: int
    stream: str  # "out" or "err"
    text: bytes


class MergedReader:
    """One merged file, by its index. `final`: no program writes any more, so a last line without newline counts."""

    def __init__(self, path: Path) -> None:
        self._path = Path(os.path.realpath(path))  # an aggregator has made a link to it
        self._owner = path.lstat().st_uid
        self._at = 0  # how many bytes of the index were read
        self._index = Index()

    def read(self, final: bool) -> Iterator[Piece]:
        """Read what has come since the last time. Raises OSError."""
        folder = self._path.parent
        name = self._path.name
        with (
            BufferedReader(opened(folder, index_file(name))) as records,
            opened(folder, name) as text,
        ):
            if os.fstat(text.fileno()).st_uid != self._owner:
                raise PermissionError(errno.EPERM, "another user owns it", str(self._path))
            records.seek(self._at)
            broken = 0
            while broken < _MOST_BROKEN and (line := records.readline(_LONGEST_RECORD)).endswith(
                b"\n"
            ):
                self._at += len(line)
                begin = self._index.end
                try:
                    found = self._index.apply(line, size_of(text))
                except ValueError:
                    broken += 1
                    continue
                if found:
                    source, at = found
                    piece = os.pread(
                        text.fileno(), min(self._index.end - begin, _LONGEST_PIECE), begin
                    )
                    yield Piece(at, source.rank, source.file.rpartition(".")[2], piece)


class TreeReader:
    """The files of all ranks of one cycle, one after the other."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[Path, RankFile] = {}

    def read(self, final: bool) -> Iterator[Piece]:
        """Read what has come since the last time. Raises OSError."""
        found = {}
        folder = self._directory
        run = os.path.realpath(folder.parent)
        for path in (
            folder / node / name for node in names_in(folder) for name in names_in(folder / node)
        ):
            leads_out = os.path.realpath(path) != os.path.join(run, *path.parts[-3:])
            if (match := _RANK_FILE.fullmatch(path.name)) and not leads_out:
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
    places = [
        place
        for place in (run, run / "merged")
        if not (os.path.islink(run) or os.path.islink(place))
    ]
    for path in (place / name for place in places for name in names_in(place)):
        if (match := _CYCLE.fullmatch(path.name)) and path.exists():
            found[int(match[1])] = MergedReader(path) if match[2] else TreeReader(path)
    return dict(sorted(found.items()))
