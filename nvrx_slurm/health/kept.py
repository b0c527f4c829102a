"""Small files that checks and hooks keep on the node from one run to the next, and how much counters rose meanwhile.

The directory is in memory (/run) and its owner's alone; files that others could have written are not believed. Facts
count for one boot (proc(5), random/boot_id). Ages are by CLOCK_BOOTTIME, so setting the clock makes nothing fresh.

All functions with a `node` raise OSError, and Absent where nothing can be kept.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Mapping
from typing import Any

from nvrx_slurm.health.check import NodeView
from nvrx_slurm.system import files
from nvrx_slurm.system.hardware import Absent

MAX_FILE_BYTES = 1 << 20
_NOT_OURS = 0o022  # writable by group or others
_LOCK = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def now_s() -> float:
    """Seconds since boot, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def rises(node: NodeView, check: str, now: Mapping[str, int], window_s: float) -> dict[str, int]:
    """How much each counter rose within the window (only those that did); `now` is kept for the next run.

    A counter that goes back was reset, or its device was: the next run counts from there.
    """
    node.doing("waiting for another run to end")
    with open(os.open(f"{_path(node, check)}.lock", _LOCK, 0o600), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = recall(node, check)
        last, at_s = before.get("last", {}), now_s()
        recent = [rise for rise in before.get("rises", []) if at_s - rise[0] <= window_s]
        recent += [
            (at_s, name, count - last[name])
            for name, count in now.items()
            if count > last.get(name, count)
        ]
        remember(node, check, {"last": {**last, **now}, "rises": recent})
    risen: dict[str, int] = {}
    for _, name, by in recent:
        risen[name] = risen.get(name, 0) + by
    return risen


def recall(node: NodeView, name: str) -> dict[str, Any]:
    """What `remember` kept under this name since the node was booted; {} where nothing can be believed."""
    path = _path(node, name)
    try:
        fd = os.open(path, _READ)
    except OSError:  # also ELOOP: a symbolic link
        return {}
    try:
        private = _is_private(os.fstat(fd), stat.S_ISREG)
        found = json.loads(os.read(fd, MAX_FILE_BYTES)) if private else None
    except (ValueError, RecursionError):
        found = None
    finally:
        os.close(fd)
    return found if isinstance(found, dict) and found.get("boot") == _boot_id(node) else {}


def remember(node: NodeView, name: str, facts: Mapping[str, object]) -> None:
    """Keep JSON under this name, whole or not at all."""
    files.write_atomic(
        _path(node, name), json.dumps({"boot": _boot_id(node), **facts}).encode(), 0o600
    )


def _path(node: NodeView, name: str) -> str:
    """The path of the file: in `node.state_dir`, else in root's /run/nvrx-health or other users'
    /run/user/UID/nvrx-health."""
    parent = "/run" if os.geteuid() == 0 else f"/run/user/{os.geteuid()}"
    if not node.state_dir and not os.path.isdir(node.path(parent)):
        raise Absent(f"there is nothing to compare with: no {parent} to keep it in")
    directory = node.state_dir or node.path(f"{parent}/nvrx-health")
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        pass
    if not _is_private(os.lstat(directory), stat.S_ISDIR):
        raise OSError(
            0,
            f"{directory} is not a directory that only its owner (this user) can write to; remove it",
        )
    return f"{directory}/{name}.kept"


def _is_private(found: os.stat_result, has_type: Any) -> bool:
    """Whether a file has this type and only this user can write to it."""
    return (
        has_type(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _NOT_OURS
    )


def _boot_id(node: NodeView) -> str:
    """What names this boot of the node; "" where the kernel does not tell."""
    try:
        return node.text("/proc/sys/kernel/random/boot_id", 64).strip()
    except OSError:
        return ""
