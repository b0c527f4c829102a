"""The key of a language model: read from its file for each call, never kept, logged or passed on."""

from __future__ import annotations

import os
import stat

from nvrx_slurm.errors import UsageError

_MAX_BYTES = 8192


def check_key_file(path: str, names: str) -> None:
    """Raises UsageError for a file that `read_key` would refuse. `names`: of the setting, for the sentence."""
    try:
        read_key(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"the key file {path!r} of a language model cannot be used: {why}; correct {names}") from None


def read_key(path: str) -> str:
    """The key. Raises OSError, and ValueError for a file that others can read or that holds no key."""
    if not path:
        raise ValueError("a language model needs one")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_mode & 0o077:
            raise ValueError("others than its owner may use it (chmod 600)")
        key = os.read(fd, _MAX_BYTES).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("it must hold the key, and nothing else")
    return key
