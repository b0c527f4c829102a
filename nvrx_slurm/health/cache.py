"""Small files that checks and hooks keep on the node from one look to the next.

The directory is in memory (/run) and its owner's alone; files that others could have written are not believed.
Ages are by CLOCK_BOOTTIME within one boot (proc(5), random/boot_id), so setting the clock makes nothing fresh.
"""

from __future__ import annotations

import json
import os
import stat
import time
from typing import Any

from nvrx_slurm.health.check import NodeView
from nvrx_slurm.system import files

MAX_FILE_BYTES = 1 << 20
_NOT_OURS = 0o022  # writable by group or others
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Unusable(Exception):
    """A file or directory that cannot be used; its text says why."""


def now_s() -> float:
    """Seconds since boot, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def private_directory(node: NodeView) -> str:
    """`node.state_dir`, else root's /run/nvrx-health, other users' /run/user/UID/nvrx-health; it is created.

    Raises Unusable unless it is a directory that only its owner, this user, can write to.
    """
    uid = os.geteuid()
    usual = "/run/nvrx-health" if uid == 0 else f"/run/user/{uid}/nvrx-health"
    directory = node.state_dir or node.path(usual)
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    except OSError as error:
        raise Unusable(f"{directory} cannot be made ({error.strerror})") from None
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & _NOT_OURS:
        raise Unusable(f"{directory} is not a directory that only its owner (uid {uid}) can write to; remove it")
    return directory


def read_private(path: str) -> Any:
    """JSON of a file that only this user can write to; None if there is none. Raises Unusable with the reason."""
    try:
        fd = os.open(path, _READ)
    except FileNotFoundError:
        return None
    except OSError as error:  # ELOOP: a symbolic link
        raise Unusable(f"{path} is ignored: {error.strerror}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _NOT_OURS:
            raise Unusable(f"{path} is ignored: it is not a file that only its owner (uid {os.geteuid()}) can write to")
        data = os.read(fd, MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise Unusable(f"{path} is ignored: it is longer than {MAX_FILE_BYTES} bytes")
        return json.loads(data)
    except (ValueError, RecursionError):
        raise Unusable(f"{path} is ignored: it is damaged") from None
    finally:
        os.close(fd)


def write_private(path: str, plain: object) -> None:
    """Replace the file `path` by `plain` as JSON, with mode 0600. Raises OSError."""
    files.write_atomic(path, json.dumps(plain).encode(), 0o600)


def boot_id(node: NodeView) -> str:
    """What names this boot of the node; "" where the kernel does not tell."""
    try:
        return node.text("/proc/sys/kernel/random/boot_id", 64).strip()
    except OSError:
        return ""
