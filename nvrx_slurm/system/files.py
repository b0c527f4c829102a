"""Files: atomic and complete writes, and the private directory of an agent."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from itertools import islice
from typing import TYPE_CHECKING

from nvrx_slurm.errors import UsageError
from nvrx_slurm.system.trust import require

# pathlib, shutil and tempfile are imported where they are used: they take 10 ms, and Slurm's prologs need none of them.
if TYPE_CHECKING:
    from pathlib import Path

BOARD_NAME = "board"  # see agent.workers
HEALTH_NAME = "health"  # directory of the health checks, see agent.preflight
WARM_NAME = "warm"  # directory of the templates' program, see agent.warm
# in a cycle's directory: restarts in process, see inprocess.guard.launcher
IN_PROCESS_NAME = "inprocess.jsonl"
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path without its final zero, see unix(7)
_PREFIX = "nvrx-agent-"  # long enough that no other program uses it by chance
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_NAMES = (BOARD_NAME, HEALTH_NAME, WARM_NAME)  # what an agent has there besides sockets
_MAX_ENTRIES = 10_000  # most entries of a crowded /tmp that are read
_RANDOM = 8  # characters that mkdtemp appends
_SOCKET_NAME_BYTES = 24  # room for one below the directory ("/rank127.1000000")
_SHORT = ("/tmp", "/dev/shm")  # used where $TMPDIR is too long for a socket or has no flock(2)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data` to a blocking descriptor; write(2) may take a part at a time. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _is_device(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def write_atomic(path: str | os.PathLike[str], data: bytes, mode: int = 0o644) -> None:
    """Replace the file `path` by one with `data`: readers see the old or the new file, never a part. Raises OSError.

    The new file has the permission bits `mode`. The data is not synced to disk. A device is not replaced.
    """
    import tempfile

    target = os.fspath(path)
    if _is_device(target):
        raise OSError(errno.EINVAL, "it is a device", target)
    fd, temporary = tempfile.mkstemp(
        prefix=f".{os.path.basename(target)}.", dir=os.path.dirname(target) or "."
    )
    try:
        try:
            os.fchmod(fd, mode)
            write_all(fd, data)
        finally:
            os.close(fd)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


class PrivateDir:
    """A new directory of mode 0700 below $TMPDIR that its owner keeps locked while it lives.

    Where $TMPDIR is too long for a Unix socket, or its file system has no flock(2), /tmp and /dev/shm are tried. They
    go first where every user could rename what is in $TMPDIR. The lock tells across PID namespaces whether the owner
    lives, which a pid in the name would not. Raises UsageError when no directory can be made.
    """

    def __init__(self) -> None:
        _sweep()
        made, self._lock = _make()
        self.path = made.with_name(f"{_PREFIX}{made.name[-_RANDOM:]}")
        # the sweep of other agents sees the directory only now, when it is locked
        os.rename(made, self.path)

    def remove(self) -> None:
        """Remove the directory with its content; a second call does nothing."""
        import shutil

        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def lock_directory(path: Path) -> int:
    """Open `path`, which must be a directory, and lock it with flock(2); returns the descriptor. Raises OSError."""
    fd = os.open(path, _OPEN)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def _make() -> tuple[Path, int]:
    """A directory under its first name and its lock, in the first place that fits."""
    import shutil
    import tempfile
    from pathlib import Path

    problems = []
    for place in sorted(_places(), key=_is_open):
        if not _fits(place):
            problems.append(
                f"in {place}: it is too long for a Unix socket ({MAX_SOCKET_PATH_BYTES} bytes)"
            )
            continue
        made = None
        try:
            made = Path(tempfile.mkdtemp(prefix=f".new-{_PREFIX}", dir=place))
            return made, lock_directory(made)
        except OSError as error:
            problems.append(f"in {place}: {error.strerror}")
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
    raise UsageError(
        f"no private directory can be made {problems[0]}; set TMPDIR to a short, writable directory"
    )


def _places() -> list[str]:
    return list(dict.fromkeys([os.path.abspath(os.environ.get("TMPDIR") or "/tmp"), *_SHORT]))


def _is_open(place: str) -> bool:
    """Whether every user may rename what is in `place`, or `place` itself."""
    try:
        require(place, UsageError)
    except UsageError:
        return True
    return False


def agent_dirs() -> list[Path]:
    """The private directories of this user's agents on this node, also of dead ones."""
    from pathlib import Path

    found = []
    for place in _places():
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            found += [
                Path(e.path)
                for e in islice(entries, _MAX_ENTRIES)
                if e.name.startswith(_PREFIX) and _is_ours(e)
            ]
    return found


def _is_ours(entry: os.DirEntry[str]) -> bool:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return False
    return (
        stat.S_ISDIR(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & 0o077
    )


def _fits(base: str) -> bool:
    below = 1 + len(_PREFIX) + _RANDOM + _SOCKET_NAME_BYTES
    return len(os.fsencode(base)) + below <= MAX_SOCKET_PATH_BYTES


def _sweep() -> None:
    """Remove directories whose agents are gone, unless one holds a file of another program."""
    import shutil

    for directory in agent_dirs():
        try:
            lock = lock_directory(directory)
        except OSError:
            continue  # its owner lives, or it is gone
        with contextlib.suppress(OSError):
            if all(path.is_socket() or path.name in _NAMES for path in directory.iterdir()):
                shutil.rmtree(directory)
        os.close(lock)
