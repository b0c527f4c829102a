"""One merged file and its index on disk: opened, cut back to what was acknowledged, appended to.

Two aggregators may have the same file open: that of an earlier term may wake up when that of the present term has
begun. Both append, so the lengths tell each of them that the other has written. The one with the lower term ends, the
other one cuts its bytes off again. A lock keeps other jobs out, where the file system has locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nvrx_slurm.core.logs.index import STATE_EACH_BYTES, Index
from nvrx_slurm.core.logs.names import cycle_file, index_file
from nvrx_slurm.system.files import write_all
from nvrx_slurm.system.foreign import followed
from nvrx_slurm.system.owned import append_to

_OPEN = os.O_RDWR | os.O_APPEND
_TAIL_BYTES = 4 * STATE_EACH_BYTES


class Superseded(Exception):
    """The aggregator of a later term has this file."""


class Batch(NamedTuple):
    """Text of one source, to be appended: its file up to byte `to`."""

    file: str
    text: bytes
    to: int
    at: int  # Unix milliseconds


def missing_lines(prefix: str, log_dir: Path, cycles: Iterable[Mapping[str, Any]]) -> int:
    """How many lines of ranks are not in the merged files, as these tell. `cycles`: as the shipper is told of them."""
    lines = 0
    for told in cycles:
        merged, index = cycle_file(prefix, told["cycle"]), Index()
        with contextlib.suppress(OSError), followed(index_file(merged)) as records:
            index = _at_end(records.fileno(), os.stat(merged).st_size)
        for file, rank in told["files"]:
            index.open(file, rank)
            with contextlib.suppress(OSError), open(log_dir / file, "rb") as written:
                written.seek(index.sources[file].to)
                lines += sum(1 for _ in written)
    return lines


def _at_end(records: int, merged_size: int, most: int = _TAIL_BYTES) -> Index:
    size = os.fstat(records).st_size
    start = max(0, size - most)
    return Index.load(os.pread(records, size - start, start), merged_size, start)


class MergedFile:
    """Raises OSError where it cannot be opened or written to; after that it has to be closed and made anew.

    `owner`: the run, as "job/run". Raises Superseded.
    """

    def __init__(self, path: str, term: int, owner: str) -> None:
        self.path = path
        self._term = term
        self._owner = owner
        with contextlib.ExitStack() as on_error:
            self._text = append_to(Path(path), 1, _OPEN)
            on_error.callback(os.close, self._text)
            self._records = append_to(Path(index_file(path)), 1, _OPEN)
            on_error.callback(os.close, self._records)
            locked = self._lock()
            self.index = self._load()
            if self._is_later(self.index):
                raise Superseded(path)
            if not locked and self.index.owner != owner:
                raise OSError(
                    0, f"another job ({self.index.owner}) writes it; use %j in the prefix"
                )
            self._cut()
            self._record(self._state())
            on_error.pop_all()

    def open(self, file: str, rank: int) -> int:
        """How many bytes of this source the merged file has."""
        if record := self.index.open(file, rank):
            self._check_lengths()
            self._record(record)
        return self.index.sources[file].to

    def append(self, batches: Iterable[Batch]) -> None:
        """Append text, then the records about it."""
        self._check_lengths()
        texts = []
        records = []
        for one in batches:
            records.append(self.index.append(one.file, len(one.text), one.to, one.at))
            texts.append(one.text)
        write_all(self._text, b"".join(texts))
        self._record(b"".join(records))

    def close(self) -> None:
        """Close it; the lock ends."""
        os.close(self._text)
        os.close(self._records)

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._records, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            return True  # a file system without locks: the terms have to do
        return True

    def _load(self) -> Index:
        size, merged_size = os.fstat(self._records).st_size, os.fstat(self._text).st_size
        # its end has the whole state, unless that tells of a lost text
        for most in (_TAIL_BYTES, size):
            index = _at_end(self._records, merged_size, most)
            if index.term:
                return index
        return Index(end=merged_size)  # a file that was here before us

    def _state(self) -> bytes:
        return self.index.begin(self._term, self._owner, int(time.time() * 1000))

    def _is_later(self, index: Index) -> bool:
        return index.owner == self._owner and index.term > self._term

    def _record(self, records: bytes) -> None:
        write_all(self._records, records)
        if self.index.written(len(records)):
            self._record(self._state())

    def _check_lengths(self) -> None:
        end, size = os.fstat(self._text).st_size, os.fstat(self._records).st_size
        if (end, size) == (self.index.end, self.index.size):
            return
        if self._is_later(self._load()):
            raise Superseded(self.path)
        if end < self.index.end or size < self.index.size:
            raise OSError(0, "another program has cut it")
        self._cut()  # an aggregator of an earlier term has not ended yet

    def _cut(self) -> None:
        os.ftruncate(self._text, self.index.end)
        os.ftruncate(self._records, self.index.size)
