"""Distributed storage: Lustre's own health, mounts of Lustre and NFS, paths that the job needs.

What is read here may block for ever when a server is gone; hence the child process of each check, and one thread per
mount or path in it, so that one that hangs hides no other.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from itertools import islice
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

REMOTE_TYPES = ("lustre", "nfs", "nfs4")
_AUTOFS = "autofs"
_MOUNTINFO = "/proc/self/mountinfo"
_FIRST_BYTES = 4096  # seed: a file is readable if a small block of it is
_MAX_NAMES = 1000  # of a directory; more tells nothing new about its server
_NO_FAILURE = "; on_unknown decides whether that is a failure"  # NVRx says failure at once
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\043", "#"), ("\\134", "\\"))  # proc(5) mountinfo


class Mount(NamedTuple):
    """A line of /proc/self/mountinfo. `automounted`: at or below a target of autofs, so that it comes and goes."""

    target: str
    type: str
    source: str
    options: tuple[str, ...]
    automounted: bool = False


def mounts(node: NodeView) -> list[Mount]:
    """All mounts as this process sees them; of several on one target the last, which hides the others.

    A line that is none is left out: it must not hide all others. Raises OSError, ValueError where all are.
    """
    lines = node.text(_MOUNTINFO, 16 << 20).split("\n")  # names may hold what else str.splitlines takes for an end
    there = [mount for line in lines if (mount := _mount(line))]
    if not there:
        raise ValueError(f"{_MOUNTINFO} holds no line that is a mount")
    automatic = {mount.target for mount in there if mount.type == _AUTOFS}
    found = {mount.target: mount._replace(automounted=_below(mount, automatic)) for mount in there}
    return list(found.values())


def _mount(line: str) -> Mount | None:
    left, _, right = line.partition(" - ")
    fields, after = left.split(" "), right.split(" ")
    if len(fields) < 6 or len(after) < 3:
        return None
    options = (*fields[5].split(","), *after[2].split(","))
    return Mount(_unescaped(fields[4]), after[0], _unescaped(after[1]), options)


def _below(mount: Mount, automatic: set[str]) -> bool:
    parts = mount.target.split("/")
    above = {"/".join(parts[:end]) for end in range(2, len(parts) + 1)}
    return mount.type != _AUTOFS and not automatic.isdisjoint(above)


def _unescaped(text: str) -> str:
    for escape, char in _ESCAPES:
        text = text.replace(escape, char)
    return text


# --- lustre ---------------------------------------------------------------------------------------------------------


def gather_lustre(node: NodeView, expected: Expected) -> str:
    """The word in /sys/fs/lustre/health_check."""
    try:
        return node.text("/sys/fs/lustre/health_check", 4096).strip()
    except FileNotFoundError:
        raise Absent("no Lustre client is loaded here") from None


def judge_lustre(word: str, expected: Expected) -> tuple[Verdict, str]:
    """Lustre writes "healthy", or "NOT HEALTHY" (with details on other lines in old versions)."""
    if not word:
        return Verdict.UNKNOWN, "/sys/fs/lustre/health_check is empty"
    if word.splitlines()[0] == "healthy":
        return Verdict.PASS, "Lustre says healthy"
    return Verdict.FAIL, f"/sys/fs/lustre/health_check says {word[:60]!r} instead of healthy"


# --- mounts ---------------------------------------------------------------------------------------------------------


class MountFacts(NamedTuple):
    """`there`: all mounts by target; `problems`: why one cannot be reached; `silent`: no answer in time; `unasked`: for
    too many of those."""

    there: dict[str, Mount]
    problems: dict[str, str]
    silent: list[str]
    unasked: list[str] = []


def gather_mounts(node: NodeView, expected: Expected) -> MountFacts:
    """Lists the root of every Lustre and NFS mount, all at the same time."""
    everything = {mount.target: mount for mount in mounts(node)}
    remote = [mount.target for mount in everything.values() if mount.type in REMOTE_TYPES]
    if not remote and not expected["mounts"]:
        raise Absent("no Lustre or NFS is mounted, and none is expected")
    wanted = list(dict.fromkeys([*remote, *(target for target in expected["mounts"] if target in everything)]))
    answers = node.at_once(lambda target: reach(node, target), wanted)
    return MountFacts(everything, *_sorted_out(wanted, answers))


def reach(node: NodeView, target: str) -> None:
    """List a directory. No permission is an answer too: a server that squashes root is well. Raises OSError."""
    try:
        with os.scandir(node.path(target)) as entries:
            list(islice(entries, _MAX_NAMES))
    except PermissionError:
        return


def judge_mounts(facts: MountFacts, expected: Expected) -> tuple[Verdict, str]:
    """Fails for what is missing, unreachable or read-only against the options of `mounts`; then unknown for silence."""
    missing = [target for target in expected["mounts"] if target not in facts.there]
    if missing:
        return Verdict.FAIL, f"not mounted: {listed(missing)}"
    if facts.problems:
        return Verdict.FAIL, listed(f"{target}: {why}" for target, why in facts.problems.items())
    frozen = [target for target in expected["writable_mounts"] if "ro" in facts.there.get(target, _NONE).options]
    if frozen:
        return Verdict.FAIL, f"mounted read-only: {listed(frozen)}"
    if facts.silent or facts.unasked:
        return Verdict.UNKNOWN, _timed_out(facts)
    remote = [mount.target for mount in facts.there.values() if mount.type in REMOTE_TYPES]
    return Verdict.PASS, f"{listed(dict.fromkeys([*remote, *expected['mounts']]))} can be reached"


_NONE = Mount("", "", "", ())


def learn_mounts(facts: MountFacts) -> dict[str, tuple[str, ...]]:
    """The Lustre and NFS mounts that answer and stay, and those of them that can be written to."""
    remote = [m for m in facts.there.values() if m.type in REMOTE_TYPES and not m.automounted]
    found = [mount for mount in remote if mount.target not in (*facts.silent, *facts.unasked)]
    writable = [mount.target for mount in found if "ro" not in mount.options]
    return {"mounts": tuple(mount.target for mount in found), "writable_mounts": tuple(writable)}


# --- storage paths --------------------------------------------------------------------------------------------------


class PathFacts(NamedTuple):
    """`problems`: by path, why it cannot be read; `silent` and `unasked`: see MountFacts."""

    problems: dict[str, str]
    silent: list[str]
    unasked: list[str] = []


def gather_paths(node: NodeView, expected: Expected) -> PathFacts:
    """Reads each path of `storage_paths` as seed 000 says, all at the same time."""
    paths = expected["storage_paths"]
    answers = node.at_once(lambda path: read_path(node, path), paths)
    return PathFacts(*_sorted_out(paths, answers))


def _sorted_out(
    wanted: Iterable[str], answers: Mapping[str, None | Exception]
) -> tuple[dict[str, str], list[str], list[str]]:
    """(why each that failed did, those that did not answer, those that were not asked)."""
    unasked = [path for path in wanted if isinstance(answers.get(path), NotAsked)]
    failed = [path for path in wanted if isinstance(answers.get(path), Exception) and path not in unasked]
    return {path: reason(answers[path]) for path in failed}, [path for path in wanted if path not in answers], unasked


def _timed_out(facts: MountFacts | PathFacts) -> str:
    unasked = f", {listed(facts.unasked)} not asked" if facts.unasked else ""
    return f"timed out: {listed(facts.silent)} did not answer{unasked}{_NO_FAILURE}"


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


def judge_paths(facts: PathFacts, expected: Expected) -> tuple[Verdict, str]:
    """A path that cannot be read fails; one that does not answer is unknown."""
    if facts.problems:
        return Verdict.FAIL, listed(f"{path}: {why}" for path, why in facts.problems.items())
    if facts.silent or facts.unasked:
        return Verdict.UNKNOWN, _timed_out(facts)
    return Verdict.PASS, f"{listed(expected['storage_paths'])} can be read"


def reason(answer: object) -> str:
    """What an exception says, without the path that stands before it."""
    return getattr(answer, "strerror", None) or str(answer)


_MOUNTS = Setting("mounts", "paths", (), "mount targets that must be there and answer")
_WRITABLE = Setting("writable_mounts", "paths", (), "mount targets that must not be mounted read-only")
_PATHS = Setting("storage_paths", "paths", (), "files and directories that must be readable")

CHECKS = (
    Check(
        name="lustre",
        lane=QUICK,
        reads="/sys/fs/lustre/health_check",
        fails="Lustre says anything but healthy.",
        gather=gather_lustre,
        judge=judge_lustre,
        contexts=OUTSIDE_PREFLIGHT,
    ),
    Check(
        name="mounts",
        reads="/proc/self/mountinfo and the root of every Lustre and NFS mount",
        fails="An expected mount is missing or read-only, or a Lustre or NFS mount cannot be listed.",
        gather=gather_mounts,
        judge=judge_mounts,
        contexts=OUTSIDE_PREFLIGHT,
        settings=(_MOUNTS, _WRITABLE),
        budget_s=5.0,
        learn=learn_mounts,
        ahead_s=30.0,
    ),
    Check(
        name="storage-paths",
        reads="the paths of storage_paths: 4 KiB of a file, the names in a directory, else stat",
        fails="A path does not exist or cannot be read.",
        gather=gather_paths,
        judge=judge_paths,
        settings=(_PATHS,),
        only_if=_PATHS.name,
        budget_s=5.0,
        ahead_s=30.0,
    ),
)
