"""Results kept on the node, and the lock by which processes that come together do the work once.

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

MAX_FILE_BYTES = 65536
_NOT_OURS = 0o022  # writable by group or others
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_FOREVER_S = 86400.0  # the deadline of the check ends the wait before


class Unusable(Exception):
    """A file or directory that cannot be used; its text says why."""


class Shared(NamedTuple):
    """A result (JSON values), seconds since the work on it began, and sentences worth saying once."""

    result: Any
    age_s: float
    notes: list[str]


def shared(
    node: NodeView, name: str, asked: object, wait_s: float, run: Callable[[], Any], fresh: Callable[[Any, float], bool]
) -> Shared:
    """What `run` returns, or the kept result of another process of this user that was `asked` the same.

    `fresh(result, began_s)` says whether a result will do whose work began at `began_s` (`now_s`). A lock lets one
    process at a time look and run. Without a usable directory each process runs. Raises TimeoutError if others hold
    the lock for `wait_s` seconds.
    """
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        try:
            directory = private_directory(node)
            stack.enter_context(files.file_lock(f"{directory}/{name}.lock", wait_s))
        except TimeoutError:
            raise
        except (Unusable, OSError) as error:
            return Shared(run(), 0.0, [f"results are not kept on this node: {error}"])
        path, question = f"{directory}/{name}.json", {"boot": boot_id(node), "asked": json.dumps(asked, default=str)}
        try:
            if kept := _kept(path, question, fresh):
                return kept
        except Unusable as error:
            notes.append(str(error))
        began_s = now_s()
        result = run()
        try:
            write_private(path, {**question, "began_s": began_s, "result": result})
        except OSError as error:
            notes.append(f"the result of {name} cannot be kept: {error.strerror}")
        return Shared(result, 0.0, notes)


def _kept(path: str, question: dict[str, str], fresh: Callable[[Any, float], bool]) -> Shared | None:
    """The kept answer to this question if it will do. Raises Unusable if it cannot be believed."""
    kept = read_private(path)
    try:
        if kept is None or {key: kept[key] for key in question} != question:
            return None  # of another boot, or the site expects something else by now
        began_s = float(kept["began_s"])
        will_do = fresh(kept["result"], began_s)
    except (TypeError, KeyError, ValueError):
        raise Unusable(f"{path} is ignored: it is damaged") from None
    age_s = now_s() - began_s
    if not age_s >= 0:
        raise Unusable(f"{path} is ignored: it is from the future")
    return Shared(kept["result"], round(age_s, 3), []) if will_do else None


def through(
    check: Check, node: NodeView, expected: Expected, run: Callable[[], tuple[Verdict, str]]
) -> tuple[Verdict, str, float, list[str]]:
    """(verdict, sentence, age in seconds, notes) of `run`, or of a result at most `check.reuse_s` seconds old.

    An unknown is used again only by processes that waited for it.
    """
    if check.reuse_s <= 0:
        return (*run(), 0.0, [])
    came_s = now_s()

    def fresh(result: Any, began_s: float) -> bool:
        verdict, text = result
        unknown = Verdict(verdict) is Verdict.UNKNOWN
        return isinstance(text, str) and began_s >= (came_s if unknown else now_s() - check.reuse_s)

    def work() -> tuple[Verdict, str]:
        node.doing("")
        return run()

    asked = [check.reads, {setting.name: expected.get(setting.name) for setting in check.settings}]
    node.doing("waiting for another run of it to end")
    found = shared(node, check.name, asked, _FOREVER_S, work, fresh)
    return Verdict(found.result[0]), found.result[1], found.age_s, found.notes


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
