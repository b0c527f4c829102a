"""Reads what `core.checkpoint` judges: names, sizes, times, and the first and last bytes of the files of checkpoints.

All of this blocks while the file system does: for threads only.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from functools import partial

from nvrx_slurm.core.checkpoint import files
from nvrx_slurm.core.checkpoint.recognise import SUFFIXES, TRACKER, Checkpoint, SavedFile, examine, iteration_of
from nvrx_slurm.system.files import last_bytes

_MOST_EXAMINED, _MOST_FILES, _MOST_DEPTH = 8, 20_000, 3
_COMPLETE = 3  # the newest, the one before it, and one more to compare that with
_MOST_DIGITS = 18
_SAMPLES, _SAMPLE_BYTES, _LARGEST = 64, 4096, 8


def survey(root: str, pattern: str | None = None) -> list[Checkpoint]:
    """The newest checkpoints in the directory `root`, newest first, until three of them are complete; at most 8.

    `pattern`: see `iteration_of`. Raises OSError where the directory cannot be read.
    """
    with os.scandir(root) as entries:
        named = [(iteration_of(entry.name, pattern), entry.name, entry) for entry in entries]
    named = [one for one in named if one[0] >= 0 and (pattern or one[1].endswith(SUFFIXES) or one[2].is_dir())]
    tracker, read, found = _tracker(root), list[tuple[str, int, list[SavedFile]]](), list[Checkpoint]()
    for iteration, name, _ in sorted(named, key=lambda one: one[:2], reverse=True)[:_MOST_EXAMINED]:
        top = os.path.join(root, name)
        try:
            read.append((name, iteration, [_saved(top, path) for path in _files(top)]))
        except FileNotFoundError:  # the script removes old ones
            continue
        found, before = [], frozenset[str]()
        for told in reversed(read):
            found.insert(0, examine(*told, tracker, before))
            before = before if found[0].why else found[0].names
        if sum(not one.why for one in found) >= _COMPLETE:
            break
    return found


def sample(root: str, name: str) -> bytes:
    """A digest of 64 blocks of 4 KiB, evenly from the 8 largest files of the checkpoint `name`.

    b"" where they are too small. First and last blocks do not count: they hold names and counters. Raises OSError.
    """
    top = os.path.join(root, name)
    sizes = sorted(((os.stat(path).st_size, path) for path in _files(top)), reverse=True)[:_LARGEST]
    digest, stem, blocks = hashlib.sha256(), os.path.splitext(name)[0].encode(), 0
    for size, path in sizes:
        inner = size // _SAMPLE_BYTES - 2
        for number in range(min(inner, _SAMPLES // len(sizes))):
            at = (1 + number * inner // min(inner, _SAMPLES // len(sizes))) * _SAMPLE_BYTES
            with _opened(path) as fd:
                digest.update(os.pread(fd, _SAMPLE_BYTES, at).replace(stem, b""))
            blocks += 1
    return digest.digest() if blocks else b""


def _files(top: str) -> Iterator[str]:
    """Paths of the files of a checkpoint, which may be a file itself. Raises OSError."""
    if not os.path.isdir(top):
        yield top
        return
    count, folders = 0, [(top, 0)]
    while folders:
        folder, depth = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                count += 1
                if entry.is_dir() and depth < _MOST_DEPTH:
                    folders.append((entry.path, depth + 1))
                elif entry.is_file() and count <= _MOST_FILES:
                    yield entry.path


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _saved(top: str, path: str) -> SavedFile:
    name = os.path.basename(path)
    with _opened(path) as fd:
        status = os.fstat(fd)
        read = partial(_read, fd)
        found, needs = files.damage(name, status.st_size, read), files.needed(name, status.st_size, read)
    return SavedFile(path[len(top) + 1 :], status.st_size, status.st_mtime, found, needs)


def _read(fd: int, offset: int, length: int) -> bytes:
    return os.pread(fd, length, max(0, offset))


def _tracker(root: str) -> int | None:
    """The iteration in Megatron's tracker file; None = there is none."""
    try:
        text = last_bytes(os.path.join(root, TRACKER), _SAMPLE_BYTES).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else None
