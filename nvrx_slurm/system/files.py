"""A private directory per process that others cannot guess, cleared away by the next one if its owner was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from itertools import islice
from pathlib import Path

from nvrx_slurm.errors import UsageError

BOARD_NAME = "board"  # see agent.board
HEALTH_NAME = "health"  # directory of the health checks, see agent.preflight
_PREFIX = "nvrx-agent-"  # so long that nobody's own directory, nor our cluster's, has it by chance
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_MAX_LOOKED_AT = 10_000  # entries of a crowded /tmp
_RANDOM = 8  # characters that mkdtemp appends
_MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path less its 0
_SOCKET_NAME_BYTES = 24  # room for one below the directory ("/rank127.1000000")
_SHORT = ("/tmp", "/dev/shm")  # where a socket's path fits if it does not below $TMPDIR


class PrivateDir:
    """A fresh directory of mode 0700 below $TMPDIR, locked by its owner for as long as that lives.

    Where $TMPDIR is too long for a Unix socket below it: in /tmp or /dev/shm.
    flock(2) tells across PID namespaces whether the owner is alive, which a pid in the name would not.
    Raises UsageError when nothing can be made there.
    """

    def __init__(self) -> None:
        made = _make()
        self._lock = os.open(made, _OPEN)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.with_name(f"{_PREFIX}{made.name[-_RANDOM:]}")
        os.rename(made, self.path)  # only now, locked, does it look like one that can be swept

    def remove(self) -> None:
        """Remove it with all that is in it; a second call does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _make() -> Path:
    """A directory, under its first name, in the first place that is short enough and takes it."""
    problem = ""
    try:
        preferred = tempfile.gettempdir()
    except OSError as error:  # neither $TMPDIR nor any of the usual places can be written to
        preferred, problem = "", f"in {os.environ.get('TMPDIR', '/tmp')}: {error.strerror}"
    if preferred and not _fits(preferred):
        problem = f"in {preferred}: it is too long for a Unix socket ({_MAX_SOCKET_PATH_BYTES} bytes)"
        places = [place for place in _SHORT if place != preferred]
    else:
        places = [preferred] if preferred else []
    for place in places:
        try:
            _sweep(Path(place))
            return Path(tempfile.mkdtemp(prefix=f".new-{_PREFIX}", dir=place))
        except OSError as error:
            problem = problem or f"in {place}: {error.strerror}"
    raise UsageError(f"no private directory can be made {problem}; set a TMPDIR that is short and can be written to")


def _fits(base: str) -> bool:
    below = 1 + len(_PREFIX) + _RANDOM + _SOCKET_NAME_BYTES
    return len(os.fsencode(base)) + below <= _MAX_SOCKET_PATH_BYTES


def _sweep(base: Path) -> None:
    """Remove the directories of our own that nobody owns any more."""
    try:
        with os.scandir(base) as entries:
            names = [e.name for e in islice(entries, _MAX_LOOKED_AT) if e.name.startswith(_PREFIX)]
    except OSError:
        return
    for name in names:
        directory = base / name
        try:
            found = directory.lstat()
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
            lock = os.open(directory, _OPEN) if ours else -1
        except OSError:
            continue  # not ours, or gone this moment
        if lock >= 0:
            _remove_if_free(directory, lock)


def _remove_if_free(directory: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # its owner lives
    else:
        _remove_sockets(directory)
    finally:
        os.close(lock)


def _remove_sockets(directory: Path) -> None:
    """Sockets, the board and what health checks keep are all that an agent has there; with anything else, it is
    somebody's and stays."""
    try:
        entries = list(directory.iterdir())
        ours = (BOARD_NAME, HEALTH_NAME)
        if all(stat.S_ISSOCK(entry.lstat().st_mode) or entry.name in ours for entry in entries):
            shutil.rmtree(directory)
    except OSError:
        return  # somebody else was faster
