"""Suspicions: what an agent, as the job's user, tells the epilog about its node. At most they cause a check.

The prolog makes one file per job and node, which belongs to the job's user, in a directory that belongs to root: there
is nothing that another user could put there, and nothing to search for the epilog. One JSON object per line:
{"v": 1, "kind": one of KINDS, "check": name or "", "text": one sentence}.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from nvrx_slurm.health.cache import Unusable
from nvrx_slurm.health.check import one_line
from nvrx_slurm.system import trust

VERSION = 1
DIRECTORY = "/var/spool/nvrx"
# A check of the preflight failed; a worker died of SIGBUS or of an uncorrectable error; the node failed in several cycles.
KINDS = ("check-failed", "uncorrectable-error", "repeated-failures")
MAX_BYTES = 16384
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Suspicion(NamedTuple):
    """One line of a file. `kind` "unreadable": there was something else."""

    kind: str
    check: str
    text: str


def leave(
    kind: str, text: str, check: str = "", directory: str = DIRECTORY, env: Mapping[str, str] | None = None
) -> bool:
    """Tell this node's epilog, from within a job, that something is wrong with the node; `check`: the one to run.

    Returns whether it was written: False outside of Slurm, where our prolog is not installed (or `directory` is not
    the site's, or not in this container), and when MAX_BYTES were said already. Never blocks. Raises ValueError for
    a `kind` that is none of KINDS.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    given = os.environ if env is None else env
    line = json.dumps({"v": VERSION, "kind": kind, "check": check[:64], "text": one_line(text)}) + "\n"
    try:
        file = path(directory, given.get("SLURMD_NODENAME", ""), given.get("SLURM_JOB_ID", ""))
        fd = os.open(file, _APPEND)
    except (OSError, Unusable):
        return False
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size + len(line) > MAX_BYTES:
            return False
        return os.write(fd, line.encode()) == len(line)
    except OSError:
        return False
    finally:
        os.close(fd)


def path(directory: str, node: str, job_id: str) -> str:
    """The file of a job on a node. Raises Unusable for what is no job id or no name."""
    return f"{directory}/{_name(node, job_id)}"


def _name(node: str, job_id: str) -> str:
    if not node or "/" in node or node.startswith(".") or not (job_id.isascii() and job_id.isdigit()):
        raise Unusable(f"there is no job {job_id!r} on a node {node!r}")
    return f"{node}.{job_id}.jsonl"


def allow(directory: str, node: str, job_id: str, uid: int) -> bytes:
    """For the prolog, as root: make the job's file, empty, anew; b"". Raises Unusable and OSError."""
    file = _name(node, job_id)
    _make(directory)
    with _opened(directory) as place:
        _remove(file, place)  # of an earlier life of the job
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=place)
        try:
            os.fchown(fd, uid, -1)
        finally:
            os.close(fd)
    return b""


def take(directory: str, node: str, job_id: str, uid: int) -> bytes:
    """For the epilog, as root: what the job's user `uid` said, for `parsed`, and remove the file. Raises Unusable and
    OSError."""
    file = _name(node, job_id)
    if not os.path.lexists(directory):
        return b""
    with _opened(directory) as place:
        try:
            data = _contents(file, place, uid)[:MAX_BYTES]
        except FileNotFoundError:
            return b""
        except (OSError, Unusable) as error:
            data = one_line(error).encode()
        _remove(file, place)
    return data


def parsed(data: bytes) -> list[Suspicion]:
    """One of each line."""
    return [_parsed(line) for line in data.splitlines()]


def _contents(file: str, place: int, uid: int) -> bytes:
    fd = os.open(file, _READ, dir_fd=place)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != uid:
            raise Unusable(f"{file} is not a file of uid {uid}")
        return os.read(fd, MAX_BYTES + 1)
    finally:
        os.close(fd)


def _parsed(line: bytes) -> Suspicion:
    try:
        plain = json.loads(line)
        if plain["v"] == VERSION and plain["kind"] in KINDS and isinstance(plain["check"], str):
            return Suspicion(plain["kind"], plain["check"][:64], one_line(plain["text"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    return Suspicion("unreadable", "", one_line(line[:80].decode(errors="replace")))


def _make(directory: str) -> None:
    """With all above it, each of them in a directory that is ours to trust."""
    if os.path.lexists(directory):
        return
    parent = os.path.dirname(directory) or "."
    _make(parent)
    with contextlib.suppress(FileExistsError):  # another prolog was faster
        os.mkdir(os.path.join(trust.require(parent, Unusable), os.path.basename(directory)), 0o755)


@contextlib.contextmanager
def _opened(directory: str) -> Iterator[int]:
    """The directory itself, which nobody can exchange for another one as he could its path.

    Raises Unusable unless all on the way to it is ours to trust, and only we can write to it.
    """
    place = trust.require(directory, Unusable)
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise Unusable(f"{directory} can be written to by others; choose a directory of root's alone")
        yield fd
    finally:
        os.close(fd)


def _remove(file: str, place: int) -> None:
    try:
        os.unlink(file, dir_fd=place)
    except FileNotFoundError:
        return
