"""Distributed storage: Lustre's own health, mounts of Lustre and NFS, paths that the job needs.

A read may block for ever when a server is gone. Each check has a process, and each mount or path a thread in it, so
that one that hangs hides no other.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from nvrx_slurm.health.check import Expected, NodeView, Setting, Verdict, check, judged, listed, system_check
from nvrx_slurm.system.hardware import Absent

REMOTE_TYPES = ("lustre", "nfs", "nfs4")
_AUTOFS = "autofs"
_LUSTRE = "/sys/fs/lustre/health_check"
_MOUNTINFO = "/proc/self/mountinfo"
_FIRST_BYTES = 4096  # seed: a file is readable if a small block of it is
_MAX_NAMES = 1000  # of a directory; more tells nothing new about its server
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\043", "#"), ("\\134", "\\"))  # proc(5) mountinfo


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo. `device`: "major:minor". `automounted`: below a target of autofs, or such a
    target, so that it comes and goes."""

    target: str
    device: str
    type: str
    options: tuple[str, ...]
    automounted: bool = False


def mounts(node: NodeView) -> dict[str, Mount]:
    """The visible mount of each target: the last one hides the others. Other lines are left out.

    Raises OSError, and ValueError where no line is a mount.
    """
    lines = node.text(_MOUNTINFO, 16 << 20).split("\n")  # str.splitlines would split names with other separators
    there = [mount for line in lines if (mount := _mount(line))]
    if not there:
        raise ValueError(f"{_MOUNTINFO} holds no line that is a mount")
    automatic = tuple(f"{mount.target}/" for mount in there if mount.type == _AUTOFS)
    comes = [m.type != _AUTOFS and f"{m.target}/".startswith(automatic) for m in there]
    return {m.target: m._replace(automounted=on_demand) for m, on_demand in zip(there, comes, strict=True)}


def _mount(line: str) -> Mount | None:
    left, _, right = line.partition(" - ")
    fields, after = left.split(" "), right.split(" ")
    if len(fields) < 6 or len(after) < 3:
        return None
    target = fields[4]
    for escape, char in _ESCAPES:
        target = target.replace(escape, char)
    return Mount(target, fields[2], after[0], (*fields[5].split(","), *after[2].split(",")))


def gather_lustre(node: NodeView, expected: Expected) -> str:
    """The first line of Lustre's health_check."""
    try:
        return node.text(_LUSTRE, 4096).strip().partition("\n")[0]
    except FileNotFoundError:
        raise Absent("no Lustre client is loaded here") from None


@system_check("lustre", gather_lustre, _LUSTRE)
def lustre(word: str, expected: Expected) -> tuple[Verdict, str]:
    """Lustre says anything but healthy."""
    wrong = [f"{_LUSTRE} says {word[:60]!r} instead of healthy"] if word != "healthy" else []
    return judged(wrong if word else [], "Lustre says healthy", [] if word else [f"{_LUSTRE} is empty"])


class MountFacts(NamedTuple):
    """`there`: all mounts by target. `answers`: by target, why it cannot be reached, None if it can; without those
    that gave no answer in time (`silent`)."""

    there: Mapping[str, Mount]
    answers: Mapping[str, Exception | None]
    silent: Sequence[str]


def gather_mounts(node: NodeView, expected: Expected) -> MountFacts:
    """Lists the root of every Lustre and NFS mount, all at the same time."""
    there = mounts(node)
    remote = [mount.target for mount in there.values() if mount.type in REMOTE_TYPES]
    if not remote and not expected["mounts"]:
        raise Absent("no Lustre or NFS is mounted, and none is expected")
    wanted = list(dict.fromkeys([*remote, *(target for target in expected["mounts"] if target in there)]))
    answers = node.at_once(lambda target: reach(node, target), wanted)
    return MountFacts(there, answers, [target for target in wanted if target not in answers])


def reach(node: NodeView, target: str) -> None:
    """List a directory. "Permission denied" is an answer: a server that squashes root works. Raises OSError."""
    try:
        with os.scandir(node.path(target)) as entries:
            list(islice(entries, _MAX_NAMES))
    except PermissionError:
        return


def learn_mounts(facts: MountFacts) -> dict[str, tuple[str, ...]]:
    """The Lustre and NFS mounts that answer and stay, and those of them that can be written to."""
    remote = [m for m in facts.there.values() if m.type in REMOTE_TYPES and not m.automounted]
    found = [mount for mount in remote if mount.target not in facts.silent]
    writable = tuple(mount.target for mount in found if "ro" not in mount.options)
    return {"mounts": tuple(mount.target for mount in found), "writable_mounts": writable}


_HANG = Setting("storage_hang_is_failure", "bool", False, "whether a mount or path that gives no answer in time fails")
_MOUNTS = (
    Setting("mounts", "paths", (), "mount targets that must be there and answer"),
    Setting("writable_mounts", "paths", (), "mount targets that must not be mounted read-only"),
    _HANG,
)


@system_check(
    "mounts",
    gather_mounts,
    f"{_MOUNTINFO} and the root of every Lustre and NFS mount",
    group="",
    settings=_MOUNTS,
    budget_s=5.0,
    learn=learn_mounts,
)
def mounts_check(facts: MountFacts, expected: Expected) -> tuple[Verdict, str]:
    """An expected mount is missing or read-only, or a Lustre or NFS mount cannot be listed."""
    there = facts.there
    wrong = [f"not mounted: {target}" for target in expected["mounts"] if target not in there]
    wrong += _failed(facts.answers)
    frozen = [target for target in expected["writable_mounts"] if target in there and "ro" in there[target].options]
    wrong += [f"mounted read-only: {target}" for target in frozen]
    return _judged(wrong, f"{len(facts.answers)} mounts can be reached", facts.silent, expected)


def _failed(answers: Mapping[str, Exception | None]) -> list[str]:
    return [f"{path}: {getattr(why, 'strerror', None) or why}" for path, why in answers.items() if why]


def _judged(wrong: Sequence[str], well: str, silent: Sequence[str], expected: Expected) -> tuple[Verdict, str]:
    # NVRx always calls silence a failure. A slow server is silent for all nodes at once.
    said = [f"timed out: {listed(silent)} did not answer"] if silent else []
    return judged([*wrong, *said], well) if expected[_HANG.name] else judged(wrong, well, said)


def gather_paths(node: NodeView, expected: Expected) -> Mapping[str, Exception | None]:
    """Reads each path of `storage_paths` as seed 000 says, all at the same time; why it cannot be read."""
    return node.at_once(lambda path: read_path(node, path), expected["storage_paths"])


def read_path(node: NodeView, path: str) -> None:
    """File: read at most 4 KiB; directory: list it; anything else: stat. Raises OSError."""
    place = node.path(path)
    kind = os.stat(place).st_mode
    if stat.S_ISDIR(kind):
        with os.scandir(place) as entries:
            list(islice(entries, _MAX_NAMES))
    elif stat.S_ISREG(kind):
        fd = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.read(fd, _FIRST_BYTES)
        finally:
            os.close(fd)


@check(
    "storage-paths",
    gather_paths,
    "the paths of storage_paths: 4 KiB of a file, the names in a directory, else stat",
    settings=(Setting("storage_paths", "paths", (), "files and directories that must be readable"), _HANG),
    only_if="storage_paths",
    budget_s=5.0,
)
def storage_paths(answers: Mapping[str, Exception | None], expected: Expected) -> tuple[Verdict, str]:
    """A path does not exist or cannot be read."""
    paths = expected["storage_paths"]
    silent = [path for path in paths if path not in answers]
    return _judged(_failed(answers), f"{listed(paths)} can be read", silent, expected)


CHECKS = (lustre, mounts_check, storage_paths)
