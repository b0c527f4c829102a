"""The last time that a hook found this node sick, for hooks that come to no verdict of their own or in time.

prolog/hook.sh reads the file, too: one number, hundredths of a second of /proc/uptime, which no setting of the clock
changes. It counts for hooks that had begun by then, so nothing has to clear it.
"""

from __future__ import annotations

import contextlib
import os

from nvrx_slurm.health import cache
from nvrx_slurm.health.check import NodeView

_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def found(node: NodeView, name: str) -> None:
    """Leave a mark, before anything that may take time. Never raises: it is for when more goes wrong."""
    with contextlib.suppress(OSError, cache.Unusable, ValueError):
        path = _path(node, name)
        mine = f"{path}.{os.getpid()}"  # several find it at a time
        try:
            fd = os.open(mine, _WRITE, 0o600)
            try:
                os.write(fd, b"%d\n" % _uptime())
            finally:
                os.close(fd)
            os.replace(mine, path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(mine)


def found_since(node: NodeView, name: str, came_s: float) -> bool:
    """Whether a hook has found the node sick since `came_s` (`cache.now_s`)."""
    try:
        fd = os.open(_path(node, name), _READ)
        try:
            ago = _uptime() - int(os.read(fd, 32))
        finally:
            os.close(fd)
    except (OSError, cache.Unusable, ValueError):
        return False
    return 0 <= ago <= (cache.now_s() - came_s) * 100


def _path(node: NodeView, name: str) -> str:
    return f"{cache.private_directory(node)}/sick-{name}"


def _uptime() -> int:
    """Hundredths of a second, as hook.sh sees them: a container may have another /proc/uptime."""
    with open("/proc/uptime", "rb") as file:
        return int(file.read(64).split()[0].replace(b".", b""))
