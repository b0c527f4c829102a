"""The one rule that decides which files may be executed, imported or obeyed (docs/how-to/install-slurm-hooks.md).

Standard library only, and of that only what Python has loaded or hook.sh has checked: prolog/start.py executes this
file before it imports anything of the package. hook.sh applies the same rule to what runs before Python.
"""

from __future__ import annotations

import fcntl
import os
import stat
import sys
from _frozen_importlib_external import PathFinder

TYPE_CHECKING = False  # importing typing would take as long as starting Python
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_MAX_LINKS = 40  # as in the kernel
# shown as the uid of users that have none in this user namespace
_OVERFLOW = "/proc/sys/kernel/overflowuid"
_NS_GET_OWNER_UID = 0xB704
# /proc/PID/root, cwd and fd/N lead into mounts that users made, whatever path they show
_PROC = "/proc"


def require(path: str, refused: type[Exception], known: set[str] | None = None) -> str:
    """Return `path` without links. Raise `refused` if it does not exist or others could have written or replaced it:

    * As root: each directory and link on the way must belong to root, and only root may be able to write to it.
    * As another user: a file must belong to that user or to root. Neither the file nor a directory on the way may be
      writable by everybody. Group-writable directories of other users are accepted: projects share them.

    Sticky directories such as /tmp are accepted, because users cannot replace files of others in them. So are
    writable sockets, because writing to a socket means to connect. In a user namespace without the host's root, files
    of the host's root appear with the overflow uid and count as root's.
    `known`: places that were found good before are not checked again, and new ones are added. For short processes.
    """
    try:
        place = _walk(path, refused, set() if known is None else known)
        owner = os.lstat(place)
    except OSError as error:
        raise refused(f"{path} cannot be used: {error.strerror}; correct or remove it") from None
    ours = as_root() or owner.st_uid in (*_ROOTS, os.geteuid())  # as root the whole way was checked
    if not ours and not stat.S_ISDIR(owner.st_mode):
        raise refused(
            f"{path} is not trusted, as it is uid {owner.st_uid}'s, neither ours nor root's; use a copy"
        )
    return place


def as_root() -> bool:
    """Whether this process is root among other users. False for the root of a user namespace that its own user made, as
    in containers that map their user to root (enroot, rootless podman)."""
    return os.geteuid() == 0 and not _OWN_NAMESPACE


def guard_imports() -> None:
    """Raise ImportError from now on for each module that `require` refuses. The caller must not import before."""
    known: set[str] = set()
    for index, finder in enumerate(sys.meta_path):
        if finder is PathFinder:
            sys.meta_path[index] = Finder(known)
    require(os.__file__, ImportError, known)


class Finder:
    """Finds modules as importlib.machinery.PathFinder does, and refuses those that are not trusted."""

    def __init__(self, known: set[str] | None = None) -> None:
        self._known = known

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module as PathFinder.find_spec. Raises ImportError for a module, or a compiled form of it, that is not
        trusted."""
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or not spec.has_location:
            return spec
        # its owner could add the compiled form after this check
        cache = os.path.dirname(spec.cached or "")
        archive = getattr(spec.loader, "archive", "")
        for place in (spec.origin, spec.cached, cache, archive):
            if place and os.path.lexists(place):
                require(place, ImportError, self._known)
        return spec


def _roots() -> tuple[int, ...]:
    """Uids of files that only root can change: 0, and the overflow uid where the host's root has no other number."""
    try:
        with open(_OVERFLOW, "rb") as file:
            # /proc/sys belongs to the host's root
            nobody, owner = int(file.read()), os.fstat(file.fileno()).st_uid
    except (OSError, ValueError):
        return (0,)
    return (0,) if owner != nobody else (0, nobody)


def _owns_namespace() -> bool:
    """Whether this user made the current user namespace (ioctl_ns(2))."""
    owner = bytearray(4)
    try:
        with open("/proc/self/ns/user", "rb") as file:
            fcntl.ioctl(file, _NS_GET_OWNER_UID, owner)
    except OSError:
        return False
    return int.from_bytes(owner, sys.byteorder) == os.geteuid()


_ROOTS = _roots()
# the host's root makes namespaces, too, and stays root
_OWN_NAMESPACE = len(_ROOTS) > 1 and _owns_namespace()


def _walk(path: str, refused: type[Exception], known: set[str]) -> str:
    place = "/"
    links = 0
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
    """The names in `path`, the last one first."""
    return [name for name in reversed(path.split("/")) if name not in ("", ".")]


def _mode_of(here: str, path: str, refused: type[Exception]) -> int:
    """The mode of `here`, a place on the way to `path`."""
    found = os.lstat(here)
    kept = stat.S_ISLNK(found.st_mode) or stat.S_ISSOCK(found.st_mode)
    kept = kept or (stat.S_ISDIR(found.st_mode) and bool(found.st_mode & stat.S_ISVTX))
    if not as_root():
        if found.st_mode & 0o002 and not kept:
            raise refused(
                f"{path} is not trusted, as everybody can change {here}; correct its mode"
            )
        return found.st_mode
    if here == _PROC:
        raise refused(
            f"{path} is not trusted by root, as it leads into {_PROC}; give the path of the file itself"
        )
    if found.st_uid not in _ROOTS or (found.st_mode & 0o022 and not kept):
        raise refused(
            f"{path} is not trusted by root, as {here} can be changed by others than root; correct owner and mode"
        )
    return found.st_mode
