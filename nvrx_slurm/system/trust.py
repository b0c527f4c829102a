"""Whom root trusts: the one rule for every file that root executes, imports or obeys (docs/administrators.md).

Standard library only: prolog/start.py runs this file by its path before it may import anything of ours.
"""

from __future__ import annotations

import os
import stat

_MAX_LINKS = 40  # as the kernel
_PROC = "/proc"  # /proc/PID/root, cwd, fd/N: links that say one thing and lead into what a user has mounted


def require(path: str, refused: type[Exception], known: set[str] | None = None) -> str:
    """The same place without links. Raises `refused` if there is none or, for root, if others could have written or
    replaced it: each directory and link on the way must be root's, and only root's to write to.

    A sticky directory (/tmp) is as good, as what is root's in it stays. Who is not root may trust whom he likes.
    `known`: places found good before are not looked at again, and new ones added; for a process that ends soon.
    """
    try:
        return _walk(path, refused, set() if known is None else known)
    except OSError as error:
        raise refused(f"{path} cannot be used: {error.strerror}; correct or remove it") from None


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
    if os.geteuid() != 0:
        return found.st_mode
    if here == _PROC:
        raise refused(f"{path} is not trusted by root, as it leads into {_PROC}; give the path of the file itself")
    kept = stat.S_ISLNK(found.st_mode) or (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX)
    if found.st_uid != 0 or (found.st_mode & 0o022 and not kept):
        raise refused(
            f"{path} is not trusted by root, as {here} can be changed by others than root; correct owner and mode"
        )
    return found.st_mode
