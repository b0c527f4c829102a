"""Reads what `core.checkpoint` judges: names, sizes, times, and the first and last bytes of the files of checkpoints.

All of this blocks while the file system does: for threads only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import partial

from nvrx_slurm.core.checkpoint import files
from nvrx_slurm.core.checkpoint import recognise as core
from nvrx_slurm.system.foreign import followed, last_bytes

_MOST_EXAMINED, _MOST_FILES, _MOST_DEPTH = 8, 20_000, 3
_COMPLETE = 3  # the newest, the one before it, and one more to compare that with
_MOST_DIGITS = 18
_SAMPLES = 64
_BLOCK_BYTES = 4096


def survey(root: str, pattern: str | None = None) -> list[core.Checkpoint]:
    """The newest checkpoints in the directory `root`, newest first, until three of them are complete; at most 8.

    `pattern`: see `iteration_of`. Raises OSError where the directory cannot be read.
    """
    with os.scandir(root) as entries:
        named = [(core.iteration_of(entry.name, pattern), entry.name, entry) for entry in entries]
    named = [
        one
        for one in named
        if one[0] >= 0 and (pattern or one[1].endswith(core.SUFFIXES) or one[2].is_dir())
    ]
    tracker = _tracker(root)
    read = list[tuple[str, int, list[core.SavedFile]]]()
    found = list[core.Checkpoint]()
    for iteration, name, _ in sorted(named, key=lambda one: one[:2], reverse=True)[:_MOST_EXAMINED]:
        top = os.path.join(root, name)
        try:
            content = [_saved(top, path) for path in _files(top)]
        except FileNotFoundError:  # the script removes old ones
            continue
        if not (pattern or os.path.isfile(top) or core.is_checkpoint(content)):
            continue
        read.append((name, iteration, content))
        found = []
        for told in reversed(read):
            found.insert(0, core.examine(*told, tracker, found[0].names if found else ()))
        if sum(not one.why for one in found) >= _COMPLETE:
            break
    return found


def nameless(root: str, pattern: str | None = None) -> str:
    """The newest file in `root` that looks like a checkpoint but for its name; "" = there is none. Raises OSError."""
    with os.scandir(root) as entries:
        found = [
            (entry.stat().st_mtime, entry.name)
            for entry in entries
            if core.iteration_of(entry.name, pattern) < 0 and entry.name.endswith(core.SUFFIXES)
        ]
    return max(found, default=(0.0, ""))[1]


def sample(root: str, name: str) -> bytes:
    """A digest of about 64 blocks of 4 KiB of the largest file of the checkpoint `name`; b"" where that is too small.

    Its first and last block do not count: they hold names and counters. Raises OSError.
    """
    size, path = max(
        ((os.stat(path).st_size, path) for path in _files(os.path.join(root, name))),
        default=(0, ""),
    )
    places = range(_BLOCK_BYTES, size - 2 * _BLOCK_BYTES, max(_BLOCK_BYTES, size // _SAMPLES))
    if not places:
        return b""
    digest = hashlib.sha256()
    stem = os.path.splitext(name)[0].encode()
    with followed(path) as file:
        fd = file.fileno()
        for at in places:
            digest.update(os.pread(fd, _BLOCK_BYTES, at).replace(stem, b""))
    return digest.digest()


def _files(top: str) -> Iterator[str]:
    """Paths of the files of a checkpoint, which may be a file itself. Raises OSError."""
    if not os.path.isdir(top):
        yield top
        return
    count = 0
    folders = [(top, 0)]
    while folders:
        folder, depth = folders.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                count += 1
                if entry.is_dir() and depth < _MOST_DEPTH:
                    folders.append((entry.path, depth + 1))
                elif entry.is_file() and count <= _MOST_FILES:
                    yield entry.path


def _saved(top: str, path: str) -> core.SavedFile:
    name = os.path.basename(path)
    with followed(path) as file:
        status = os.fstat(file.fileno())
        read = partial(_read, file.fileno())
        found = files.damage(name, status.st_size, read)
        needs = files.needed(name, status.st_size, read)
    return core.SavedFile(path[len(top) + 1 :], status.st_size, status.st_mtime, found, needs)


def _read(fd: int, offset: int, length: int) -> bytes:
    return os.pread(fd, length, max(0, offset))


def _tracker(root: str) -> int | None:
    """The iteration in Megatron's tracker file; None = there is none."""
    try:
        text = last_bytes(os.path.join(root, core.TRACKER), _BLOCK_BYTES).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and len(text) <= _MOST_DIGITS else None
