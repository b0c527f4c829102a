"""Storage: Lustre's own health, mounts of Lustre and NFS, paths that the job needs, room on local disks and /dev/shm.

A read may block for ever when a server is gone. Checks of mounts and paths have a process each, and each mount or path
a thread in it, so that one that hangs hides no other.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from nvrx_slurm.health.check import (
    Expected,
    Judgement,
    NodeView,
    SiteKey,
    check,
    judged,
    listed,
    system_check,
)
from nvrx_slurm.system.hardware import Absent

# --- Lustre and NFS ---------------------------------------------------------------------------------------------------

REMOTE_TYPES = ("lustre", "nfs", "nfs4")
_LUSTRE = "/sys/fs/lustre/health_check"
_MOUNTINFO = "/proc/self/mountinfo"
_FIRST_BYTES = 4096  # seed: a file is readable if a small block of it is
_MAX_NAMES = 1000  # of a directory; more tells nothing new about its server
# proc(5) mountinfo
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\043", "#"), ("\\134", "\\"))


class Mount(NamedTuple):
    """One mount, from a line of /proc/self/mountinfo."""

    type: str
    options: tuple[str, ...]


def mounts(node: NodeView) -> list[tuple[str, Mount]]:
    """(target, mount); the last one of a target hides its others, so that a dict has those in sight.

    Raises OSError, and ValueError where no line is a mount.
    """
    # str.splitlines would split names with other separators
    lines = node.text(_MOUNTINFO, 16 << 20).split("\n")
    there = [mount for line in lines if (mount := _mount(line))]
    if not there:
        raise ValueError(f"{_MOUNTINFO} holds no line that is a mount")
    return there


def _mount(line: str) -> tuple[str, Mount] | None:
    """(target, mount)."""
    left, _, right = line.partition(" - ")
    fields, after = left.split(" "), right.split(" ")
    if len(fields) < 6 or len(after) < 3:
        return None
    target = fields[4]
    for escape, char in _ESCAPES:
        target = target.replace(escape, char)
    return target, Mount(after[0], (*fields[5].split(","), *after[2].split(",")))


@system_check("lustre", _LUSTRE)
def lustre(node: NodeView, expected: Expected) -> Judgement:
    """Lustre says anything but healthy."""
    word = (
        node.text(_LUSTRE, 4096, absent="no Lustre client is loaded here")
        .strip()
        .partition("\n")[0]
    )
    wrong = (
        [f"{_LUSTRE} says {word[:60]!r} instead of healthy"] if word not in ("", "healthy") else []
    )
    return judged(wrong, "Lustre says healthy", [] if word else [f"{_LUSTRE} is empty"])


_HANG = SiteKey(
    "storage_hang_is_failure",
    "bool",
    False,
    "whether a mount or path that gives no answer in time fails",
)
_MOUNTS = (
    SiteKey("mounts", "paths", (), "mount targets that must be there and answer"),
    SiteKey("writable_mounts", "paths", (), "mount targets that must not be mounted read-only"),
    _HANG,
)


def learn_mounts(node: NodeView, expected: Expected) -> dict[str, tuple[str, ...]]:
    """The Lustre and NFS mounts that answer and stay (autofs mounts others on demand); the writable ones of them."""
    every = mounts(node)
    comes = tuple(f"{target}/" for target, mount in every if mount.type == "autofs")
    there = {target: mount for target, mount in every if not f"{target}/".startswith(comes)}
    remote = {target: mount for target, mount in there.items() if mount.type in REMOTE_TYPES}
    answers = node.at_once(lambda target: reach(node, target), remote)
    found = tuple(target for target in remote if target in answers)
    return {
        "mounts": found,
        "writable_mounts": tuple(name for name in found if "ro" not in remote[name].options),
    }


@system_check(
    "mounts",
    f"{_MOUNTINFO} and the root of every Lustre and NFS mount",
    group="",
    settings=_MOUNTS,
    budget_s=5.0,
    learn=learn_mounts,
)
def mounts_check(node: NodeView, expected: Expected) -> Judgement:
    """An expected mount is missing or read-only, or a Lustre or NFS mount cannot be listed."""
    there = dict(mounts(node))
    needed = expected["mounts"]
    remote = [target for target, mount in there.items() if mount.type in REMOTE_TYPES]
    if not remote and not needed:
        raise Absent("no Lustre or NFS is mounted, and none is expected")
    wanted = dict.fromkeys([*remote, *(target for target in needed if target in there)])
    answers = node.at_once(lambda target: reach(node, target), wanted)
    frozen = [
        target
        for target in expected["writable_mounts"]
        if target in there and "ro" in there[target].options
    ]
    wrong = [f"not mounted: {target}" for target in needed if target not in there]
    wrong += [f"mounted read-only: {target}" for target in frozen]
    return _judged(wrong, wanted, answers, f"{len(answers)} mounts can be reached", expected)


def reach(node: NodeView, target: str) -> None:
    """Read as `read_path`. "Permission denied" is an answer: a server that squashes root works. Raises OSError."""
    with suppress(PermissionError):
        read_path(node, target)


def _judged(
    wrong: list[str],
    asked: Iterable[str],
    answers: Mapping[str, Exception | None],
    well: str,
    expected: Expected,
) -> Judgement:
    """`answers`: None or why there is no access, by path, without paths that gave no answer in time."""
    wrong += [
        f"{path}: {getattr(why, 'strerror', None) or why}" for path, why in answers.items() if why
    ]
    silent = [path for path in asked if path not in answers]
    # NVRx always calls silence a failure. A slow server is silent for all nodes at once.
    said = [f"timed out: {listed(silent)} did not answer"] if silent else []
    return judged([*wrong, *said], well) if expected[_HANG.name] else judged(wrong, well, said)


@check(
    "storage-paths",
    "the paths of storage_paths: 4 KiB of a file, the names in a directory, else stat",
    settings=(
        SiteKey("storage_paths", "paths", (), "files and directories that must be readable"),
        _HANG,
    ),
    only_if="storage_paths",
    budget_s=5.0,
)
def storage_paths(node: NodeView, expected: Expected) -> Judgement:
    """A path does not exist or cannot be read."""
    paths = expected["storage_paths"]
    answers = node.at_once(lambda path: read_path(node, path), paths)
    return _judged([], paths, answers, f"{listed(paths)} can be read", expected)


def read_path(node: NodeView, path: str) -> None:
    """File: read at most 4 KiB; directory: list it; anything else: stat. Raises OSError."""
    place = node.path(path)
    kind = os.stat(place).st_mode
    if stat.S_ISDIR(kind):
        with os.scandir(place) as entries:
            list(islice(entries, _MAX_NAMES))
    elif stat.S_ISREG(kind):
        with open(place, "rb", buffering=0) as file:
            file.read(_FIRST_BYTES)


# --- local disks ------------------------------------------------------------------------------------------------------

_USERS = ("/tmp", "/var/tmp")  # users write there
_WORLD_WRITABLE = 0o002
_DISKS = (
    SiteKey("disk_paths", "paths", ("/", "/var"), "where there must be room"),
    SiteKey("disk_free_percent", "percent", 3.0, "room that must be free"),
    SiteKey("inodes_free_percent", "percent", 1.0, "inodes that must be free"),
)


def lacking(room: os.statvfs_result, expected: Expected) -> str:
    """What a file system has too little of, or "". A packed image (squashfs) has no room, nor needs it."""
    rows = (
        ("", room.f_bavail, room.f_blocks, expected["disk_free_percent"]),
        # 0: it does not count them
        (" of its inodes", room.f_favail, room.f_files, expected["inodes_free_percent"]),
    )
    for what, free, total, least in rows:
        if not room.f_flag & os.ST_RDONLY and total and 100.0 * free / total < least:
            return f"{100.0 * free / total:.1f}%{what} free, at least {least:g}% are needed"
    return ""


@system_check("disk-space", "statvfs(3) of each path of disk_paths", settings=_DISKS)
def disk_space(node: NodeView, expected: Expected) -> Judgement:
    """A local file system that only the system writes to has too little room or too few inodes."""
    there = {
        path: node.path(path) for path in expected["disk_paths"] if os.path.exists(node.path(path))
    }
    users = {os.stat(node.path(path)).st_dev for path in _USERS if os.path.exists(node.path(path))}
    rooms: dict[str, os.statvfs_result] = {}
    for path, place in there.items():
        node.doing(f"asking for the free space of {path}")
        found = os.stat(place)
        # a job may fill the others
        if found.st_dev not in users and not found.st_mode & _WORLD_WRITABLE:
            rooms[path] = os.statvfs(place)
    if not rooms:
        raise Absent("users can write to the file systems of all disk_paths")
    wrong = [
        f"{path} has {lack}" for path, room in rooms.items() if (lack := lacking(room, expected))
    ]
    return judged(wrong, f"{len(rooms)} file systems have room")


_SHM = "/dev/shm"
_GB = 1e9


def shm_gb(node: NodeView) -> tuple[float, float]:
    """(size, free room) of /dev/shm in 10^9 bytes. Raises OSError and Absent."""
    node.doing(f"asking for the free space of {_SHM}")
    try:
        found = os.statvfs(node.path(_SHM))
    except FileNotFoundError:
        raise Absent(f"there is no {_SHM}") from None
    return found.f_frsize * found.f_blocks / _GB, found.f_frsize * found.f_bavail / _GB


# By default it is half of the memory, of which other versions of the kernel keep a little more or less.
@system_check(
    "shm-space",
    "statvfs(3) of /dev/shm",
    settings=(
        SiteKey("shm_size_gb", "number", None, "size of /dev/shm, in 10^9 bytes"),
        SiteKey("shm_free_gb", "number", 0.01, "room that must be free, in 10^9 bytes"),
    ),
    learn=lambda node, expected: {"shm_size_gb": int(shm_gb(node)[0] * 0.99 * 10) / 10},
)
def shm_space(node: NodeView, expected: Expected) -> Judgement:
    """/dev/shm is smaller than it should be or has too little room, as after a job that left its segments."""
    (size_gb, free_gb), least_gb = shm_gb(node), expected["shm_size_gb"]
    wrong = []
    if least_gb is not None and size_gb < least_gb:
        wrong.append(f"{_SHM} has {size_gb:.1f} GB instead of {least_gb:g} GB")
    if free_gb < expected["shm_free_gb"]:
        wrong.append(
            f"{_SHM} has {free_gb:.1f} GB free, at least {expected['shm_free_gb']:g} are needed"
        )
    return judged(wrong, f"{_SHM} has {free_gb:.1f} of {size_gb:.1f} GB free")


CHECKS = (lustre, mounts_check, storage_paths, disk_space, shm_space)
