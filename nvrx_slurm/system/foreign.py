"""Files that another user may have made, or a rank: opened without waiting, through no link, read up to a bound.

Root reads the log trees of all users. A FIFO, a device, a link or a file without end in one of them costs its run only.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from itertools import islice
from typing import Any

from nvrx_slurm.core.bounded_json import parsed

Place = str | os.PathLike[str]
_WAY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_END = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_NAMES = 200_000


def opened(base: Place, *names: str) -> io.FileIO:
    """The regular file of these names below the directory `base`. Raises OSError.

    Neither `base` nor what is below it may be a link. The names may come from a file of another user.
    """
    place = os.path.join(base, *names)
    if any("/" in name or not name.strip(".") for name in names):
        raise OSError(errno.EINVAL, "it leads out of its folder", place)
    here = -1
    try:
        here = os.open(base, _WAY)
        for name in names[:-1]:
            before = here
            here = os.open(name, _WAY, dir_fd=here)
            os.close(before)
        fd = os.open(names[-1], _END, dir_fd=here)
    except OSError as error:
        why = "it is a link" if os.path.islink(place) else error.strerror
        raise OSError(error.errno, why, place) from None
    finally:
        if here >= 0:
            os.close(here)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return io.FileIO(fd)
    os.close(fd)  # FileIO would raise for a directory, and leave it open
    raise OSError(errno.EINVAL, "it is no regular file", place)


def followed(path: Place) -> io.FileIO:
    """The regular file at a path of our own user's, through its links. Raises OSError."""
    return opened(*os.path.split(os.path.realpath(path)))


def first_bytes(path: Place, most: int) -> bytes:
    """At most the first `most` bytes of a regular file; links are followed. Raises OSError."""
    with followed(path) as file:
        return os.pread(file.fileno(), most, 0)


def last_bytes(path: Place, most: int) -> bytes:
    """At most the last `most` bytes of a regular file; links are followed. Raises OSError."""
    with followed(path) as file:
        return os.pread(file.fileno(), most, max(0, size_of(file) - most))


def size_of(file: io.FileIO) -> int:
    """Bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def document(most: int, base: Place, *names: str) -> dict[str, Any]:
    """The JSON object in a file of at most `most` bytes, as `opened`. Raises OSError, ValueError."""
    with opened(base, *names) as file:
        text = os.pread(file.fileno(), most + 1, 0)
    found = parsed(text) if len(text) <= most else None
    if not isinstance(found, dict):
        raise ValueError(f"{names[-1]} is no JSON object of at most {most} bytes")
    return found


def names_in(directory: Place) -> list[str]:
    """The names in a directory, in any order, at most _MOST_NAMES; [] where it cannot be read."""
    try:
        with os.scandir(directory) as entries:
            return [entry.name for entry in islice(entries, _MOST_NAMES)]
    except OSError:
        return []
