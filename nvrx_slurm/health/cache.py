"""Results of heavy checks, kept on the node: one JSON file per check, with a lock, so that runs side by side share one.

The directory is in memory (/run) and its owner's alone; whatever else is found there is not trusted, and said.
Ages are by CLOCK_BOOTTIME within one boot (proc(5), random/boot_id): no setting of the clock makes a result fresh.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from typing import Any

from nvrx_slurm.health.check import Check, Expected, NodeView, Verdict

MAX_FILE_BYTES = 65536
_AGAIN_S = 0.03  # between two tries to get a lock that others have
_NOT_OURS = 0o022  # writable by group or others
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC

Kept = tuple[Verdict, str, float, list[str]]  # verdict, sentence, age in seconds, what is worth saying


class Unusable(Exception):
    """A file or directory that cannot be used; its text says why."""


def through(check: Check, node: NodeView, expected: Expected, run: Callable[[], tuple[Verdict, str]]) -> Kept:
    """What `run` returns, or what it returned at most `check.reuse_s` seconds ago in any process of this user.

    Of runs that begin at the same time one does the work and the others wait for it, as long as their time allows
    (the caller's deadline ends the wait). A result is as old as the look at the node, which begins before `run`
    returns. Without a usable directory everybody runs.
    """
    if check.reuse_s <= 0:
        return (*run(), 0.0, [])
    notes: list[str] = []
    try:
        directory = private_directory(node)
        since_s = now_s()
        if kept := _fresh(directory, check, node, expected, since_s, notes):
            return kept
        lock = os.open(f"{directory}/{check.name}.lock", _WRITE, 0o600)
    except (Unusable, OSError) as error:
        return (*run(), 0.0, [*notes, f"results are not kept on this node: {error}"])
    node.doing("waiting for another run of it to end")
    # Blocks; whoever holds it and is killed lets it go, and our own time is watched by the runner.
    fcntl.flock(lock, fcntl.LOCK_EX)
    if kept := _fresh(directory, check, node, expected, since_s, [] if notes else notes):
        return kept
    began_s = now_s()
    verdict, text = run()
    try:
        _keep(directory, check, node, expected, began_s, verdict, text)
    except OSError as error:
        notes.append(f"the result of {check.name} cannot be kept: {error.strerror}")
    return verdict, text, 0.0, notes


def together(
    node: NodeView,
    name: str,
    asked: object,
    came_s: float,
    wait_s: float,
    run: Callable[[], str],
    grave: Callable[[str], bool] = lambda result: False,
) -> tuple[str, float] | None:
    """(what `run` returns, 0.0); or, of processes of this user that come with the same `asked` while one is at it,
    (what that one was given, its age), so that a node with many of them does the work once, or twice if some of them
    come while it is being done.

    `came_s`: when this process came, as of `now_s`: what began before that may be older than what has broken since,
    and will only do if it is `grave`. None: `wait_s` seconds were not enough for the others to be done. Without a
    usable directory nobody waits.
    """
    try:
        directory = private_directory(node)
        lock = os.open(f"{directory}/{name}.lock", _WRITE, 0o600)
    except (Unusable, OSError):
        return run(), 0.0  # a check whose result is kept says why
    try:
        if not taken(lock, wait_s):
            return None
        known = {"boot": boot_id(node), "asked": json.dumps(asked, default=str)}
        if given := _given(f"{directory}/{name}.json", known, came_s):
            return given
        began_s = now_s()
        result = run()
        counts_s = {"counts_s": now_s() if grave(result) else began_s, "at_s": now_s()}
        with contextlib.suppress(OSError):  # then the next one does the work once more
            write_private(f"{directory}/{name}.json", {**known, **counts_s, "result": result})
        return result, 0.0
    finally:
        os.close(lock)


def taken(lock: int, wait_s: float) -> bool:
    """Whether we get the lock of this open file within `wait_s` seconds.

    Not flock(2): our forked checks would have that, too, and may be stuck in the kernel.
    """
    until_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:  # an alarm of our own would be lost if it came just before we block
            if time.monotonic() >= until_s:
                return False
            time.sleep(_AGAIN_S)


def _given(path: str, known: Mapping[str, object], came_s: float) -> tuple[str, float] | None:
    try:
        kept = read_private(path)
        if not kept or kept["counts_s"] < came_s or any(kept[name] != value for name, value in known.items()):
            return None
        return str(kept["result"]), max(0.0, now_s() - kept["at_s"])
    except (Unusable, TypeError, KeyError):
        return None  # it is written anew


def now_s() -> float:
    """Seconds since boot, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def private_directory(node: NodeView) -> str:
    """`node.state_dir`, else root's /run/nvrx-health, other users' /run/user/UID/nvrx-health; made if need be.

    Raises Unusable where it is not a directory that only its owner, us, can write to.
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
    """JSON of a file that only we can write to; None if there is none. Raises Unusable with the reason."""
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
    """Put `plain` there as JSON, whole or not at all, over whatever is there but a directory that is not empty.

    Raises OSError.
    """
    new = f"{path}.new"  # nobody else writes: the caller holds the lock, in a directory of our own
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new)
    try:
        _write(new, json.dumps(plain).encode())
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.rmdir(path)  # rename(2) puts no file in a directory's place
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def _write(path: str, data: bytes) -> None:
    fd = os.open(path, _WRITE | os.O_EXCL, 0o600)
    try:
        while data:  # a disk that is nearly full takes a part, and says that it is full only when asked again
            data = data[os.write(fd, data) :]
    finally:
        os.close(fd)


def _fresh(
    directory: str, check: Check, node: NodeView, expected: Expected, since_s: float, notes: list[str]
) -> Kept | None:
    """A kept result that is young enough; one that was begun while we waited is. UNKNOWN is only for who waited."""
    path = f"{directory}/{check.name}.json"
    try:
        kept = read_private(path)
    except Unusable as error:
        notes.append(str(error))
        return None
    if kept is None:
        return None
    try:
        known = kept["boot"] == boot_id(node) and kept["asked"] == _asked(check, expected)
        at_s, ended_s = float(kept["at_s"]), float(kept["ended_s"])
        verdict, text = Verdict(kept["verdict"]), str(kept["text"])
    except (TypeError, KeyError, ValueError):
        notes.append(f"{path} is ignored: it is damaged")
        return None
    age_s = now_s() - at_s
    if not known:
        return None  # of another boot, or the site expects something else by now
    if not age_s >= 0:
        notes.append(f"{path} is ignored: it is from the future")
        return None
    waited = ended_s >= since_s
    young = at_s >= since_s or (age_s <= check.reuse_s and (waited or verdict is not Verdict.UNKNOWN))
    return (verdict, text, round(age_s, 3), notes) if young else None


def _keep(
    directory: str, check: Check, node: NodeView, expected: Expected, began_s: float, verdict: Verdict, text: str
) -> None:
    plain: Mapping[str, object] = {
        "boot": boot_id(node),
        "asked": _asked(check, expected),
        "at_s": began_s,
        "ended_s": now_s(),
        "verdict": verdict,
        "text": text,
    }
    write_private(f"{directory}/{check.name}.json", plain)


def _asked(check: Check, expected: Expected) -> str:
    """What the check was asked, so that a changed site file is asked anew."""
    return json.dumps([check.reads, {setting.name: expected.get(setting.name) for setting in check.settings}])


def boot_id(node: NodeView) -> str:
    """What names this boot of the node; "" where the kernel does not tell."""
    try:
        return node.text("/proc/sys/kernel/random/boot_id", 64).strip()
    except OSError:
        return ""
