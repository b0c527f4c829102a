"""Whom we trust: the one rule for every file that is executed, imported or obeyed (docs/administrators.md).

Standard library only: prolog/start.py runs this file by its path before it may import anything of ours.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys

_MAX_LINKS = 40  # as the kernel
_OVERFLOW = "/proc/sys/kernel/overflowuid"  # the number of those who have none in this user namespace
_NS_GET_OWNER_UID = 0xB704
_PROC = "/proc"  # /proc/PID/root, cwd, fd/N: links that say one thing and lead into what a user has mounted


def require(path: str, refused: type[Exception], known: set[str] | None = None) -> str:
    """The same place without links. Raises `refused` if there is none, or if others could have written or replaced it:

    * for root: each directory and link on the way must be root's, and only root's to write to;
    * where we are not root: a file must be ours or root's, and neither it nor a directory on the way everybody's to
      write to. Whose the directories are, and which group may write, is the user's choice: projects share both.

    A sticky directory (/tmp) is as good, as what is ours in it stays; to write to a socket is to connect, no change.
    In a user namespace that does not have the host's root, what is his looks like nobody's, and is root's all the same.
    `known`: places found good before are not looked at again, and new ones added; for a process that ends soon.
    """
    try:
        place = _walk(path, refused, set() if known is None else known)
        owner = os.lstat(place)
    except OSError as error:
        raise refused(f"{path} cannot be used: {error.strerror}; correct or remove it") from None
    ours = as_root() or owner.st_uid in (*_ROOTS, os.geteuid())  # for root the whole way was looked at
    if not ours and not stat.S_ISDIR(owner.st_mode):
        raise refused(f"{path} is not trusted, as it is uid {owner.st_uid}'s, neither ours nor root's; use a copy")
    return place


def as_root() -> bool:
    """Whether we are root among other users; not who is root only in a user namespace of his own, as in a container
    that maps its user to root (enroot, rootless podman)."""
    return os.geteuid() == 0 and not _OWN_NAMESPACE


def _roots() -> tuple[int, ...]:
    """Whose files nobody but root can change: 0 and, where the host's root is nobody, that number. /proc/sys is his."""
    try:
        with open(_OVERFLOW, "rb") as file:
            nobody, owner = int(file.read()), os.fstat(file.fileno()).st_uid
    except (OSError, ValueError):
        return (0,)
    return (0,) if owner != nobody else (0, nobody)


def _owns_namespace() -> bool:
    """Whether we made the user namespace that we are in (ioctl_ns(2))."""
    owner = bytearray(4)
    try:
        with open("/proc/self/ns/user", "rb") as file:
            fcntl.ioctl(file, _NS_GET_OWNER_UID, owner)
    except OSError:
        return False
    return int.from_bytes(owner, sys.byteorder) == os.geteuid()


_ROOTS = _roots()
_OWN_NAMESPACE = len(_ROOTS) > 1 and _owns_namespace()  # the host's root makes some, too, and stays root


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
    if found.st_uid not in _ROOTS or (found.st_mode & 0o022 and not kept):
        raise refused(
            f"{path} is not trusted by root, as {here} can be changed by others than root; correct owner and mode"
        )
    return found.st_mode
