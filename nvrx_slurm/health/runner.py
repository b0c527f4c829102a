"""Runs checks side by side, each in a forked child, under one deadline. Nothing that a check does can hold it up.

To be called in a process without threads (fork): `nvrx health`, or `python -I -m nvrx_slurm.health` for programs.
A child writes its finding as one JSON line into a pipe; its process group is killed as soon as the finding is there or
its time is up. A child that cannot be killed (blocked in the kernel) is not waited for: init gets it when we end.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.health import cache
from nvrx_slurm.health.check import NOTE_BYTES, Check, Expected, Finding, NodeView, Verdict, one_line
from nvrx_slurm.system.hardware import Absent

MAX_RESULT_BYTES = 16384
_REAP_S = 0.1  # for killed children to end
_ALARM_S = 2  # a child ends itself that long after its budget, should this process be gone


class Result:
    """What a run found. `notes`: sentences worth saying once, about no check's subject (a cache file was ignored)."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.learned: dict[str, Any] = {}  # see `run(learning=True)`
        self.left = 0  # children that could not be killed


class _Child:
    """A check under way in a forked process."""

    def __init__(self, check: Check, pid: int, pipe: int, note: mmap.mmap, started_s: float, until_s: float) -> None:
        self.check = check
        self.pid = pid
        self.pipe = pipe
        self.note = note
        self.started_s = started_s
        self.until_s = until_s
        self.data = b""

    def doing(self) -> str:
        """ ", reading /some/file" or ""."""
        phrase = self.note[:NOTE_BYTES].partition(b"\0")[0].decode(errors="replace")
        return f", {phrase}" if phrase else ""

    def finding(self, verdict: Verdict, text: str, age_s: float = 0.0) -> Finding:
        return Finding(self.check.name, verdict, one_line(text), round(time.monotonic() - self.started_s, 4), age_s)


def run(
    checks: Sequence[Check], node: NodeView, expected: Expected, deadline_s: float, learning: bool = False
) -> Result:
    """A finding for each check, in their order, after at most `deadline_s` seconds (and a fraction).

    `learning`: nothing is judged; what the checks learn from their facts is in `Result.learned`.
    """
    gc.freeze()  # the children shall not copy our pages by collecting garbage
    end_s = time.monotonic() + deadline_s
    findings: dict[str, Finding] = {}
    result = Result()
    children: dict[int, _Child] = {}
    started: list[int] = []
    poller = select.poll()
    try:
        for check in checks:
            if check.needs_root and node.live and os.geteuid() != 0:
                findings[check.name] = Finding(check.name, Verdict.NOT_APPLICABLE, "only root can read this")
                continue
            try:
                child = _start(check, node, expected, end_s, learning)
            except OSError as error:
                text = f"no process could be started for it: {error.strerror}"
                findings[check.name] = Finding(check.name, Verdict.UNKNOWN, text)
                continue
            children[child.pipe] = child
            started.append(child.pid)
            poller.register(child.pipe, select.POLLIN)
        while children:
            wait_s = min(child.until_s for child in children.values()) - time.monotonic()
            ready = {fd for fd, _ in poller.poll(max(0, int(wait_s * 1000) + 1))}
            for fd, child in list(children.items()):
                found = _look(child, fd in ready, result)
                if found is not None:
                    findings[child.check.name] = found
                    poller.unregister(fd)
                    _end(children.pop(fd))
    finally:
        for child in children.values():
            _end(child)
        result.left = _reap(started)
    if result.left:
        result.notes.append(f"{result.left} check process(es) are blocked in the kernel and could not be ended")
    result.findings = [_with_action(findings[check.name], check) for check in checks]
    return result


def _start(check: Check, node: NodeView, expected: Expected, end_s: float, learning: bool) -> _Child:
    note = mmap.mmap(-1, NOTE_BYTES)
    ours, theirs = os.pipe()
    started_s = time.monotonic()
    until_s = min(end_s, started_s + check.budget_s)
    try:
        pid = os.fork()
    except OSError:
        os.close(ours)
        os.close(theirs)
        raise
    if pid == 0:
        node.note, node.deadline_s = note, until_s
        _child(_learned if learning else _found, check, node, expected, theirs)
    os.close(theirs)
    os.set_blocking(ours, False)
    return _Child(check, pid, ours, note, started_s, until_s)


# What a child sends: verdict, sentence, age in seconds, notes, what it learned.
_Answer = tuple[str, str, float, list[str], dict[str, Any]]


def _child(
    work: Callable[[Check, NodeView, Expected], _Answer], check: Check, node: NodeView, expected: Expected, pipe: int
) -> NoReturn:
    """The forked process: never returns into the caller's frames."""
    try:
        os.setsid()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(signum, signal.SIG_DFL)
        signal.alarm(max(1, int(node.deadline_s - time.monotonic()) + _ALARM_S))
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        line = json.dumps(work(check, node, expected)).encode() + b"\n"
        while line:
            line = line[os.write(pipe, line) :]
    finally:
        os._exit(0)  # even with a thread of ours still blocked


def _found(check: Check, node: NodeView, expected: Expected) -> _Answer:
    return (*cache.through(check, node, expected, lambda: examine(check, node, expected)), {})


def _learned(check: Check, node: NodeView, expected: Expected) -> _Answer:
    learned: dict[str, Any] = {}

    def keep(facts: Any, expected: Expected) -> tuple[Verdict, str]:
        learned.update(check.learn(facts) if check.learn else {})
        return Verdict.PASS, ""

    verdict, text = examine(check._replace(judge=keep), node, expected)
    return verdict, text, 0.0, [], learned


def examine(check: Check, node: NodeView, expected: Expected) -> tuple[Verdict, str]:
    """Gather and judge, here and now: the verdict and its sentence, whatever the check raises."""
    try:
        verdict, text = check.judge(check.gather(node, expected), expected)
        return Verdict(verdict), one_line(text)
    except Absent as error:
        return Verdict.NOT_APPLICABLE, one_line(error)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return Verdict.UNKNOWN, one_line(f"{where}{error.strerror or error}")
    except Exception as error:  # a check of a site may raise anything
        plain = type(error) is ValueError or isinstance(error, NvrxError)  # a sentence already
        said = str(error) if plain else f"{type(error).__name__}: {error}"
        return Verdict.UNKNOWN, one_line(said)


def _look(child: _Child, ready: bool, result: Result) -> Finding | None:
    """The finding of a child that has told one, ended without, or whose time is up; None if it is still at it."""
    ended = False
    if ready:
        more = os.read(child.pipe, 65536)
        child.data += more
        ended = not more
    if child.data.endswith(b"\n") and len(child.data) <= MAX_RESULT_BYTES:
        return _parsed(child, result)
    if len(child.data) > MAX_RESULT_BYTES:
        return child.finding(Verdict.UNKNOWN, f"its answer is longer than {MAX_RESULT_BYTES} bytes")
    if ended:
        return child.finding(Verdict.UNKNOWN, f"its process ended without an answer{child.doing()}")
    if time.monotonic() >= child.until_s:
        allowed_s = child.until_s - child.started_s
        return child.finding(Verdict.UNKNOWN, f"timed out after {allowed_s:.1f} s{child.doing()}")
    return None


def _parsed(child: _Child, result: Result) -> Finding:
    verdict, text, age_s, notes, learned = json.loads(child.data)
    result.notes.extend(note for note in notes if note not in result.notes)
    result.learned.update(learned)
    return child.finding(Verdict(verdict), text, age_s)


def _end(child: _Child) -> None:
    """Kill what there is of it; it stays ours (a zombie at least), so its numbers cannot be somebody else's yet."""
    for kill in (os.killpg, os.kill):  # it may not lead a group yet
        try:
            kill(child.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # not yet, or only a zombie of another user (setuid) is left
            continue
    os.close(child.pipe)
    child.note.close()


def _reap(pids: list[int]) -> int:
    """Collect ended children, all of which were sent SIGKILL; returns how many did not end in a moment."""
    end_s = time.monotonic() + _REAP_S
    left = 0
    for pid in pids:
        pidfd = os.pidfd_open(pid)
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if poller.poll(max(0, int((end_s - time.monotonic()) * 1000))):
                os.waitpid(pid, 0)
            else:
                left += 1
        finally:
            os.close(pidfd)
    return left


def _with_action(finding: Finding, check: Check) -> Finding:
    actions = {Verdict.FAIL: check.on_fail, Verdict.UNKNOWN: check.on_unknown}
    return finding._replace(action=actions.get(finding.verdict, ""))


def stop_on_sigterm() -> None:
    """Make SIGTERM end this process by way of `finally`, so that no child is left."""
    end: Callable[[int, object], NoReturn] = lambda signum, frame: sys.exit(128 + signum)  # noqa: E731
    signal.signal(signal.SIGTERM, end)
