"""Whom we trust: the one rule for every file that is executed, imported or obeyed (docs/administrators.md).

Standard library only: prolog/start.py runs this file by its path before it may import anything of ours.
"""

from __future__ import annotations

import os
import stat

_MAX_LINKS = 40  # as the kernel
_PROC = "/proc"  # /proc/PID/root, cwd, fd/N: links that say one thing and lead into what a user has mounted


def require(path: str, refused: type[Exception], known: set[str] | None = None) -> str:
    """The same place without links. Raises `refused` if there is none, or if others could have written or replaced it:

    * for root: each directory and link on the way must be root's, and only root's to write to;
    * where we are not root: a file must be ours or root's, and neither it nor a directory on the way everybody's to
      write to. Whose the directories are, and which group may write, is the user's choice: projects share both.

    A sticky directory (/tmp) is as good, as what is ours in it stays; to write to a socket is to connect, no change.
    `known`: places found good before are not looked at again, and new ones added; for a process that ends soon.
    """
    try:
        place = _walk(path, refused, set() if known is None else known)
        owner = os.lstat(place)
    except OSError as error:
        raise refused(f"{path} cannot be used: {error.strerror}; correct or remove it") from None
    ours = owner.st_uid in (0, os.geteuid()) or os.geteuid() == 0  # for root the whole way was looked at
    if not ours and not stat.S_ISDIR(owner.st_mode):
        raise refused(f"{path} is not trusted, as it is uid {owner.st_uid}'s, neither ours nor root's; use a copy")
    return place


def as_root() -> bool:
    """Whether we are root among other users. In a namespace that has one user (containers that map him to root, as
    enroot does) uid 0 is he, and all that is root's outside looks like nobody's."""
    return os.geteuid() == 0 and not _ONE_USER


def _one_user() -> bool:
    """Whether this process is in a namespace of one user."""
    try:
        with open("/proc/self/uid_map", "rb") as file:
            return file.read().split()[2:] == [b"1"]
    except OSError:
        return False


_ONE_USER = _one_user()


def _walk(path: str, refused: type[Exception], known: set[str]) -> str:
    place, links = "/", 0
    _mode_of(place, path, refused)
    todo = _parts(os.path.join(os.getcwd(), path))
    while todo:
        name = todo.pop()
        if name == "..":
            place = os.path.dirname(place)
            continue
        here = os.path.join(place, name)
        if here in known or not stat.S_ISLNK(_mode_of(here, path, refused)):
            known.add(here)
            place = here
            continue
        links += 1
        if links > _MAX_LINKS:
            raise refused(f"{path} cannot be used: too many links; correct or remove it")
        target = os.readlink(here)
        place = "/" if target.startswith("/") else place
        todo += _parts(target)
    return place


def _parts(path: str) -> list[str]:
    """The names in it, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _mode_of(here: str, path: str, refused: type[Exception]) -> int:
    """Of a place on the way to `path`."""
    found = os.lstat(here)
    kept = stat.S_ISLNK(found.st_mode) or stat.S_ISSOCK(found.st_mode)
    kept = kept or (stat.S_ISDIR(found.st_mode) and bool(found.st_mode & stat.S_ISVTX))
    if not as_root():
        if found.st_mode & 0o002 and not kept:
            raise refused(f"{path} is not trusted, as everybody can change {here}; correct its mode")
        return found.st_mode
    if here == _PROC:
        raise refused(f"{path} is not trusted by root, as it leads into {_PROC}; give the path of the file itself")
    if found.st_uid != 0 or (found.st_mode & 0o022 and not kept):
        raise refused(
            f"{path} is not trusted by root, as {here} can be changed by others than root; correct owner and mode"
        )
    return found.st_mode
