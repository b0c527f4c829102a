"""The key of a language model: read from its file for each failure, never kept, logged or passed on."""

from __future__ import annotations

import os
import stat

_MAX_BYTES = 8192


def read_key(path: str) -> str:
    """The key. Raises OSError, and ValueError for a file that others can use or that holds no key."""
    if not path:
        raise ValueError("a language model needs one")
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_mode & 0o077:
            raise ValueError("others than its owner may use it (chmod 600)")
        key = file.read(_MAX_BYTES).decode("ascii", "replace").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("it must hold the key, and nothing else")
    return key
