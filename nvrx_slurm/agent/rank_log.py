"""A rank's log file. Where it cannot be written, its output is lost and the training goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO


def open_log(path: Path) -> tuple[IO[bytes], str]:
    """(file to append to, "") or, where that is impossible, (/dev/null, why). Raises OSError for lack of descriptors.

    A full file system lets empty files be made, but then the first print() of the training raises: so it is asked.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return open(os.devnull, "ab"), error.strerror or str(error)
    if _has_room(file.fileno()):
        return file, ""
    file.close()
    return open(os.devnull, "ab"), os.strerror(errno.ENOSPC)


def _has_room(fd: int) -> bool:
    found = os.fstatvfs(fd)
    free = found.f_bfree if os.geteuid() == 0 else found.f_bavail
    return free > 0 or found.f_blocks == 0  # the latter: a file system that does not count
