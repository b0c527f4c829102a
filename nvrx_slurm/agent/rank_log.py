"""A rank's log file. Where it cannot be written, the rank's output is lost and the training goes on."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import IO


def open_log(path: Path) -> tuple[IO[bytes], str]:
    """Open `path` to append to it: (file, "") or, where that is impossible, (/dev/null, why).

    A file on a full file system, or of a user whose quota is used up, can be opened, but the first print() of the
    training fails. Therefore one byte is written and taken back. Raises OSError for lack of descriptors.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return open(os.devnull, "ab"), error.strerror or str(error)
    size = file.tell()
    try:
        os.write(file.fileno(), b"\n")
        os.ftruncate(file.fileno(), size)
        file.seek(size)
    except OSError as error:
        file.close()
        return open(os.devnull, "ab"), error.strerror or str(error)
    return file, ""
