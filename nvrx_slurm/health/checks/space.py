"""Room on file systems: bytes and inodes of local disks, and /dev/shm, which data loaders and NCCL fill.

A job that fills /tmp must not drain its node. So what users can write to only warns (`scratch-space`), wherever /tmp
is: file systems are told apart by their device in /proc/self/mountinfo.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from nvrx_slurm.health.check import Expected, NodeView, Setting, Verdict, judged, system_check, whole
from nvrx_slurm.health.checks.storage import mounts
from nvrx_slurm.system.hardware import Absent

_SHM = "/dev/shm"
_GB = 1e9
_USERS = ("/tmp", "/var/tmp")  # users write there
_WORLD_WRITABLE = 0o002
_DISKS = (
    Setting("disk_paths", "paths", ("/", "/tmp", "/var"), "where there must be room"),
    Setting("disk_free_percent", "percent", 3.0, "room that must be free"),
    Setting("inodes_free_percent", "percent", 1.0, "inodes that must be free"),
)
_SHM_SETTINGS = (
    Setting("shm_size_gb", "number", None, "size of /dev/shm, in 10^9 bytes"),
    Setting("shm_free_gb", "number", 0.01, "room that must be free, in 10^9 bytes"),
)


class Room(NamedTuple):
    """The answer of statvfs(3) for ordinary users; `inodes` 0: the file system does not count them.

    `read_only`: mounted so; a packed image (squashfs) has no room, nor needs it. `scratch`: users can write to it.
    """

    path: str
    total_bytes: int
    free_bytes: int
    inodes: int
    free_inodes: int
    read_only: bool = False
    scratch: bool = False


def gather_disks(node: NodeView, expected: Expected) -> dict[str, Room | Exception]:
    """Room of each path of `disk_paths`, without those that did not answer, or OSError."""
    devices = {target: mount.device for target, mount in mounts(node).items()}
    scratch = {_device(devices, path) for path in _USERS}

    def room_of(path: str) -> Room:
        ours = os.stat(node.path(path)).st_mode & _WORLD_WRITABLE == 0 and _device(devices, path) not in scratch
        return room(node, path)._replace(scratch=not ours)

    return node.at_once(room_of, expected["disk_paths"])


def _device(devices: dict[str, str], path: str) -> str:
    """Device of the file system that holds `path`: of the mount with the longest target above it."""
    above = [target for target in devices if f"{path}/".startswith(f"{target.rstrip('/')}/")]
    return devices[max(above, key=len)] if above else ""


def room(node: NodeView, path: str) -> Room:
    """Of the file system that holds `path`. Raises OSError, ValueError.

    A recorded tree has the figures of its node in `/.statvfs`: lines of a path and f_frsize f_blocks f_bavail f_files
    f_favail f_flag.
    """
    node.doing(f"asking for the free space of {path}")
    found = os.statvfs(node.path(path))
    size, blocks, free = found.f_frsize, found.f_blocks, found.f_bavail
    inodes, free_inodes, flags = found.f_files, found.f_favail, found.f_flag
    if not node.live and os.path.exists(node.path("/.statvfs")):
        rows = {words[0]: words[1:] for words in map(str.split, node.text("/.statvfs").splitlines())}
        if path in rows:
            size, blocks, free, inodes, free_inodes, flags = (whole(word, "/.statvfs") for word in rows[path])
    return Room(path, size * blocks, size * free, inodes, free_inodes, bool(flags & os.ST_RDONLY))


def judge_disks(facts: dict[str, Room | Exception], expected: Expected, scratch: bool) -> tuple[Verdict, str]:
    """Of the file systems that users can write to, or of the others. Raises Absent where there are none."""
    for answer in facts.values():
        if isinstance(answer, Exception) and not isinstance(answer, FileNotFoundError):
            raise answer
    rooms = [one for one in facts.values() if isinstance(one, Room) and one.scratch is scratch]
    silent = [path for path in expected["disk_paths"] if path not in facts and (path in _USERS) is scratch]
    if not rooms and not silent:
        raise Absent(f"none of disk_paths is on a file system that users can{'' if scratch else 'not'} write to")
    wrong = [sentence for one in rooms if (sentence := _lack(one, expected))]
    well = f"{len(rooms)} file systems have room"
    return judged(wrong, well, [f"timed out: {path} did not answer" for path in silent])


def _lack(one: Room, expected: Expected) -> str:
    """What a file system has too little of, or ""."""
    rows = (
        ("", one.free_bytes, one.total_bytes, expected["disk_free_percent"]),
        (" of its inodes", one.free_inodes, one.inodes, expected["inodes_free_percent"]),
    )
    for what, free, total, least in rows:
        if not one.read_only and total and 100.0 * free / total < least:
            return f"{one.path} has {100.0 * free / total:.1f}%{what} free, at least {least:g}% are needed"
    return ""


@system_check(
    "disk-space",
    gather_disks,
    "statvfs(3) of each path of disk_paths; /proc/self/mountinfo",
    settings=_DISKS,
)
def disk_space(facts: dict[str, Room | Exception], expected: Expected) -> tuple[Verdict, str]:
    """A local file system that only the system writes to has too little room or too few inodes."""
    return judge_disks(facts, expected, scratch=False)


@system_check(
    "scratch-space",
    gather_disks,
    "as disk-space",
    settings=_DISKS,
    on_fail="warn",
)
def scratch_space(facts: dict[str, Room | Exception], expected: Expected) -> tuple[Verdict, str]:
    """A local file system that users can write to (that of /tmp or /var/tmp) has too little room or too few inodes."""
    return judge_disks(facts, expected, scratch=True)


def gather_shm(node: NodeView, expected: Expected) -> Room:
    """Room in /dev/shm."""
    try:
        return room(node, _SHM)
    except FileNotFoundError:
        raise Absent(f"there is no {_SHM}") from None


# By default it is half of the memory, of which other versions of the kernel keep a little more or less.
@system_check(
    "shm-space",
    gather_shm,
    "statvfs(3) of /dev/shm",
    settings=_SHM_SETTINGS,
    learn=lambda shm: {"shm_size_gb": int(shm.total_bytes / _GB * 0.99 * 10) / 10},
)
def shm_space(shm: Room, expected: Expected) -> tuple[Verdict, str]:
    """/dev/shm is smaller than it should be or has too little room, as after a job that left its segments."""
    size_gb, free_gb = shm.total_bytes / _GB, shm.free_bytes / _GB
    if expected["shm_size_gb"] is not None and size_gb < expected["shm_size_gb"]:
        return Verdict.FAIL, f"{_SHM} has {size_gb:.1f} GB instead of {expected['shm_size_gb']:g} GB"
    if free_gb < expected["shm_free_gb"]:
        return Verdict.FAIL, f"{_SHM} has {free_gb:.1f} GB free, at least {expected['shm_free_gb']:g} are needed"
    return Verdict.PASS, f"{_SHM} has {free_gb:.1f} of {size_gb:.1f} GB free"


CHECKS = (disk_space, scratch_space, shm_space)
