"""Folders and files of ours below a directory that others may share: made and opened through no link.

The names in a log tree can be guessed. Who makes one of its folders before us would choose where we write.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_APPEND = os.O_WRONLY | os.O_APPEND
_NEW = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def folder(path: Path, ours: int) -> int:
    """A descriptor of a directory, which is made where it is missing. Raises OSError.

    `ours`: how many names at the end of its path only we may have made. Not every user may change the one before them.
    """
    parts = path.absolute().parts
    base = Path(*parts[: max(1, len(parts) - ours)])
    base.mkdir(parents=True, exist_ok=True)
    here = os.open(base, _FOLDER)
    try:
        _require(here, base)
        for depth in range(len(base.parts), len(parts)):
            before, here = here, _entered(here, Path(*parts[: depth + 1]))
            os.close(before)
            _require(here, Path(*parts[: depth + 1]), os.geteuid())
    except OSError:
        os.close(here)
        raise
    return here


def make(path: Path, ours: int) -> None:
    """Make a `folder`. Raises OSError."""
    os.close(folder(path, ours))


def append_to(path: Path, ours: int, flags: int = _APPEND) -> int:
    """A descriptor that appends to a file, in a `folder`. Raises OSError. `ours`: with the file's own name."""
    here = folder(path.parent, ours - 1)
    try:
        return append_in(here, path, flags)
    finally:
        os.close(here)


def append_in(here: int, path: Path, flags: int = _APPEND) -> int:
    """Open as `append_to`, where the `folder` is open."""
    file = os.open(path.name, flags | _NEW, 0o664, dir_fd=here)
    try:
        _require(file, path, os.geteuid(), os.fstat(here).st_uid)
        os.set_blocking(file, True)  # what a rank inherits
    except OSError:
        os.close(file)
        raise
    return file


def _entered(here: int, path: Path) -> int:
    if path.is_symlink():
        raise OSError(errno.EPERM, f"{path} is a link", path)
    with suppress(FileNotFoundError):
        return os.open(path.name, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
    with suppress(FileExistsError):  # another agent was faster
        os.mkdir(path.name, 0o775, dir_fd=here)
    return os.open(path.name, _FOLDER | os.O_NOFOLLOW, dir_fd=here)


def _require(fd: int, path: Path, *owners: int) -> None:
    """Raises OSError, with a sentence, where another user than these and root may say what is there."""
    found = os.fstat(fd)
    is_folder = stat.S_ISDIR(found.st_mode)
    why = ""
    if owners and found.st_uid not in (0, *owners):
        why = f"{path} belongs to uid {found.st_uid}"
    elif is_folder and found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        why = f"every user can change {path}"
    elif not is_folder and not stat.S_ISREG(found.st_mode):
        why = f"{path} is no regular file"
    if why and not (is_folder and _shows_all_alike(fd, found)):
        raise OSError(errno.EPERM, why, path)


def _shows_all_alike(fd: int, folder: os.stat_result) -> bool:
    """Whether what we make in the directory has its owner and mode, too: its file system keeps none, or maps ours."""
    name = f".nvrx-{secrets.token_hex(8)}"
    try:
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=fd)
    except OSError:
        return False
    made = os.fstat(file)
    os.close(file)
    os.unlink(name, dir_fd=fd)
    return (made.st_uid, made.st_mode & stat.S_IWOTH) == (
        folder.st_uid,
        folder.st_mode & stat.S_IWOTH,
    )
