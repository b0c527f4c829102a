"""Room on file systems: bytes and inodes of local disks, and /dev/shm, which data loaders and NCCL fill."""

from __future__ import annotations

import os
from typing import NamedTuple

from nvrx_slurm.health.check import (
    OUTSIDE_PREFLIGHT,
    QUICK,
    Check,
    Expected,
    NodeView,
    NotAsked,
    Setting,
    Verdict,
    listed,
)
from nvrx_slurm.system.hardware import Absent

_SHM = "/dev/shm"
_GB = 1e9
_DIGITS = 20  # of 64 bits


class Room(NamedTuple):
    """What statvfs(3) says, of what an ordinary user may take; 0 inodes in all: the file system does not count them.

    `read_only`: mounted so; a packed image (squashfs) has no room, nor needs it.
    """

    path: str
    total_bytes: int
    free_bytes: int
    inodes: int
    free_inodes: int
    read_only: bool = False


def gather_disks(node: NodeView, expected: Expected) -> tuple[list[Room], list[str]]:
    """(room of each path of `disk_paths`, paths that did not answer); paths that are not there are no disks here."""
    answers = node.at_once(lambda path: room(node, path), expected["disk_paths"])
    found, silent = [], []
    for path in expected["disk_paths"]:
        answer = answers.get(path)
        if answer is None or isinstance(answer, NotAsked):
            silent.append(path if answer is None else f"{path} (not asked)")
        elif isinstance(answer, Room):
            found.append(answer)
        elif not isinstance(answer, FileNotFoundError):
            raise answer
    if not found and not silent:
        raise Absent(f"none of {listed(expected['disk_paths']) or 'disk_paths'} is here")
    return found, silent


def gather_shm(node: NodeView, expected: Expected) -> Room:
    """Room in /dev/shm."""
    try:
        return room(node, _SHM)
    except FileNotFoundError:
        raise Absent(f"there is no {_SHM}") from None


def room(node: NodeView, path: str) -> Room:
    """Of the file system that holds `path`. Raises OSError, ValueError.

    The file `/.statvfs` of a recorded tree holds what was measured on its node, since a copied directory has the room
    of the disk that it was copied to.
    """
    node.doing(f"asking for the free space of {path}")
    numbers = None if node.live else _recorded(node, path)
    if numbers is None:
        found = os.statvfs(node.path(path))
        numbers = [found.f_frsize, found.f_blocks, found.f_bavail, found.f_files, found.f_favail, found.f_flag]
    size, blocks, free, inodes, free_inodes, flags = numbers
    return Room(path, size * blocks, size * free, inodes, free_inodes, bool(flags & os.ST_RDONLY))


def _recorded(node: NodeView, path: str) -> list[int] | None:
    """From lines of a path and f_frsize f_blocks f_bavail f_files f_favail f_flag (0 if left out); None without one."""
    try:
        lines = node.text("/.statvfs").splitlines()
    except FileNotFoundError:
        return None
    for words in map(str.split, lines):
        if words[:1] == [path]:
            numbers = words[1:] if len(words) > 6 else [*words[1:], "0"]
            if len(numbers) != 6 or not all(word.isdecimal() and len(word) <= _DIGITS for word in numbers):
                raise ValueError(f"/.statvfs holds {' '.join(words)[:40]!r} instead of five or six numbers")
            return [int(word) for word in numbers]
    return None


def judge_disks(facts: tuple[list[Room], list[str]], expected: Expected) -> tuple[Verdict, str]:
    """Fails below `disk_free_percent` or `inodes_free_percent` on any that can be written to."""
    rooms, silent = facts
    lacking = [sentence for one in rooms if (sentence := _lack(one, expected))]
    if lacking:
        return Verdict.FAIL, listed(lacking)
    if silent:
        return Verdict.UNKNOWN, f"timed out: {listed(silent)} did not answer"
    return Verdict.PASS, listed(f"{one.path} {_has(one)}" for one in rooms)


def _has(one: Room) -> str:
    return "is read-only" if one.read_only else f"has {_percent(one.free_bytes, one.total_bytes):.0f}% free"


def judge_shm(shm: Room, expected: Expected) -> tuple[Verdict, str]:
    """Fails below `shm_free_gb`, or where /dev/shm as a whole is smaller than `shm_size_gb`."""
    size_gb, free_gb = shm.total_bytes / _GB, shm.free_bytes / _GB
    if expected["shm_size_gb"] is not None and size_gb < expected["shm_size_gb"]:
        return Verdict.FAIL, f"{_SHM} has {size_gb:.1f} GB instead of {expected['shm_size_gb']:g} GB"
    if free_gb < expected["shm_free_gb"]:
        return Verdict.FAIL, f"{_SHM} has {free_gb:.1f} GB free, at least {expected['shm_free_gb']:g} are needed"
    return Verdict.PASS, f"{_SHM} has {free_gb:.1f} of {size_gb:.1f} GB free"


def _lack(one: Room, expected: Expected) -> str:
    """What a file system has too little of, or ""."""
    if one.read_only:
        return ""
    free = _percent(one.free_bytes, one.total_bytes)
    if one.total_bytes and free < expected["disk_free_percent"]:
        return f"{one.path} has {free:.1f}% free, at least {expected['disk_free_percent']:g}% are needed"
    inodes = _percent(one.free_inodes, one.inodes)
    if one.inodes and inodes < expected["inodes_free_percent"]:
        least = expected["inodes_free_percent"]
        return f"{one.path} has {inodes:.1f}% of its inodes free, at least {least:g}% are needed"
    return ""


def _percent(part: int, whole: int) -> float:
    return 100.0 * part / whole if whole else 100.0


CHECKS = (
    Check(
        name="disk-space",
        lane=QUICK,  # it has a thread for each path
        reads="statvfs(3) of each path of disk_paths",
        fails="A local file system that can be written to has too little room or too few inodes.",
        gather=gather_disks,
        judge=judge_disks,
        contexts=OUTSIDE_PREFLIGHT,
        settings=(
            Setting("disk_paths", "paths", ("/", "/tmp", "/var"), "where there must be room"),
            Setting("disk_free_percent", "percent", 3.0, "room that must be free"),
            Setting("inodes_free_percent", "percent", 1.0, "inodes that must be free"),
        ),
    ),
    Check(
        name="shm-space",
        lane=QUICK,
        reads="statvfs(3) of /dev/shm",
        fails="/dev/shm is smaller than it should be or has too little room, as after a job that left its segments.",
        gather=gather_shm,
        judge=judge_shm,
        contexts=OUTSIDE_PREFLIGHT,
        settings=(
            Setting("shm_size_gb", "number", None, "size of /dev/shm, in 10^9 bytes"),
            Setting("shm_free_gb", "number", 0.01, "room that must be free, in 10^9 bytes"),
        ),
        # By default it is half of the memory, of which kernels of other versions keep a little more or less.
        learn=lambda shm: {"shm_size_gb": int(shm.total_bytes / _GB * 0.99 * 10) / 10},
    ),
)
