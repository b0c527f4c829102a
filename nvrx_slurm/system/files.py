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

_PREFIX = "nvrx-agent-"  # so long that nobody's own directory, nor our cluster's, has it by chance
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_MAX_LOOKED_AT = 10_000  # entries of a crowded /tmp


class PrivateDir:
    """A fresh directory of mode 0700 below $TMPDIR, locked by its owner for as long as that lives.

    flock(2) tells across PID namespaces whether the owner is alive, which a pid in the name would not.
    Raises UsageError when nothing can be made there.
    """

    def __init__(self) -> None:
        try:
            base = Path(tempfile.gettempdir())
            _sweep(base)
            made = Path(tempfile.mkdtemp(prefix=f".new-{_PREFIX}", dir=base))
        except OSError as error:
            where = error.filename or os.environ.get("TMPDIR", "/tmp")
            raise UsageError(f"no private directory can be made in {where}: {error.strerror}; set TMPDIR") from None
        self._lock = os.open(made, _OPEN)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = base / f"{_PREFIX}{made.name[-8:]}"
        os.rename(made, self.path)  # only now, locked, does it look like one that can be swept

    def remove(self) -> None:
        """Remove it with all that is in it; a second call does nothing."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


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
    """Sockets are all that an agent keeps there; with anything else in it, it is somebody's and stays as it is."""
    try:
        entries = list(directory.iterdir())
        if all(stat.S_ISSOCK(entry.lstat().st_mode) for entry in entries):
            for entry in entries:
                entry.unlink()
            directory.rmdir()
    except OSError:
        return  # somebody else was faster
