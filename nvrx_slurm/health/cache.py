"""Results of heavy checks, kept on the node, with a lock by which processes that come together do the work once.

The directory is in memory (/run) and its owner's alone; whatever others could have written is not believed, and said.
Ages are by CLOCK_BOOTTIME within one boot (proc(5), random/boot_id), so setting the clock makes no result fresh.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from nvrx_slurm.health.check import Check, Expected, NodeView, Verdict
from nvrx_slurm.system import files

MAX_FILE_BYTES = 1 << 20
_NOT_OURS = 0o022  # writable by group or others
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOREVER_S = 86400.0  # the deadline of the check ends the wait before


class Unusable(Exception):
    """A file or directory that cannot be used; its text says why."""


class Kept(NamedTuple):
    """A result; `began_s` (`now_s`): when the work on it began; `notes`: sentences worth saying once."""

    verdict: Verdict
    text: str
    began_s: float
    notes: list[str]


def through(check: Check, node: NodeView, expected: Expected, run: Callable[[], tuple[Verdict, str]]) -> Kept:
    """The result of `run`, or the result of another process of this user, at most `check.reuse_s` seconds old.

    A lock lets one process at a time look and run; the deadline of the check ends the wait for it. An unknown is used
    again only by processes that waited for it. Without a usable directory each process runs.
    """
    came_s = now_s()
    if check.reuse_s <= 0:
        return Kept(*run(), came_s, [])
    notes: list[str] = []
    node.doing("waiting for another run of it to end")
    with contextlib.ExitStack() as stack:
        try:
            directory = private_directory(node)
            stack.enter_context(files.file_lock(f"{directory}/{check.name}.lock", _FOREVER_S))
        except (Unusable, OSError) as error:
            return Kept(*run(), came_s, [f"results are not kept on this node: {error}"])
        path = f"{directory}/{check.name}.json"
        asked = [check.reads, {setting.name: expected.get(setting.name) for setting in check.settings}]
        question = {"boot": boot_id(node), "asked": json.dumps(asked)}  # a changed site file asks another one
        try:
            kept = _kept(path, question)
            oldest_s = min(came_s, now_s() - check.reuse_s)
            if kept and kept.began_s >= (came_s if kept.verdict is Verdict.UNKNOWN else oldest_s):
                return kept
        except Unusable as error:
            notes.append(str(error))
        node.doing("")
        began_s = now_s()
        verdict, text = run()
        try:
            write_private(path, {**question, "began_s": began_s, "verdict": verdict, "text": text})
        except OSError as error:
            notes.append(f"the result of {check.name} cannot be kept: {error.strerror}")
        return Kept(verdict, text, began_s, notes)


def _kept(path: str, question: dict[str, str]) -> Kept | None:
    """The kept answer to this question. Raises Unusable if it cannot be believed."""
    kept = read_private(path)
    try:
        if kept is None or {key: kept[key] for key in question} != question:
            return None
        found = Kept(Verdict(kept["verdict"]), str(kept["text"]), float(kept["began_s"]), [])
    except (TypeError, KeyError, ValueError):
        raise Unusable(f"{path} is ignored: it is damaged") from None
    if not found.began_s <= now_s():
        raise Unusable(f"{path} is ignored: it is from the future")
    return found


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
