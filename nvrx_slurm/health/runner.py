"""Runs checks side by side in forked children, under one deadline. Nothing that a check does can hold it up.

To be called in a process without threads (fork): `nvrx health`, or `python -I -m nvrx_slurm.health` for programs.
Checks of one lane share a child and are done one after the other; where one does not answer at once, those behind it go
on in a child of their own. A child writes each finding as one JSON line into a pipe; its process group is killed as
soon as all are there or the time of one is up. A child that cannot be killed (blocked in the kernel) is not waited for:
init gets it when we end. That it is blocked is what /proc says, and not that it takes its time.
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
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.health import cache
from nvrx_slurm.health.check import NOTE_BYTES, NVML, Check, Expected, Finding, NodeView, Verdict, one_line
from nvrx_slurm.system import gpus
from nvrx_slurm.system.hardware import Absent

MAX_RESULT_BYTES = 16384
_PATIENCE_S = 0.25  # with a check that others wait behind
_REAP_S = 1.0  # for killed children to end, on a machine with too much to do; one that is blocked is seen before
_LOOK_S = 0.07  # twice: a thread that is in the kernel at both looks, and has not run in between, is blocked
_JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_ALARM_S = 2  # a child ends itself that long after its budget, should this process be gone


class Result:
    """What a run found. `notes`: sentences worth saying once, about no check's subject (a cache file was ignored)."""

    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.learned: dict[str, Any] = {}  # see `Run(learning=True)`
        self.left = 0  # children that have not ended


class _Child:
    """Checks under way in a forked process, the first of `checks` since `started_s`."""

    def __init__(self, checks: Sequence[Check], pid: int, pipe: int, note: mmap.mmap, end_s: float) -> None:
        self.checks = list(checks)
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)  # where that fails (too many open files) its own alarm ends it
        self.pipe = pipe
        self.note = note
        self.end_s = end_s
        self.started_s = time.monotonic()
        self.data = b""

    @property
    def until_s(self) -> float:
        """When the time of the check under way is up."""
        return min(self.end_s, self.started_s + self.checks[0].budget_s)

    @property
    def look_s(self) -> float:
        """When it is to be looked at, if it does not answer before."""
        return min(self.until_s, self.started_s + _PATIENCE_S) if len(self.checks) > 1 else self.until_s

    def doing(self) -> str:
        """ ", reading /some/file" or ""."""
        phrase = self.note[:NOTE_BYTES].partition(b"\0")[0].decode(errors="replace")
        return f", {phrase}" if phrase else ""

    def finding(self, verdict: Verdict, text: str, age_s: float = 0.0) -> Finding:
        """Of the check under way."""
        took_s = round(time.monotonic() - self.started_s, 4)
        return Finding(self.checks[0].name, verdict, one_line(text), took_s, age_s)

    def next(self) -> None:
        """The check under way has its finding."""
        del self.checks[0]
        self.started_s = time.monotonic()

    def kill(self) -> None:
        """Kill what there is of it; it stays ours (a zombie at least), so its numbers cannot be somebody else's yet."""
        for kill in (os.killpg, os.kill):  # it may not lead a group yet
            try:
                kill(self.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # not yet, or only a zombie of another user (setuid) is left
                continue
        os.close(self.pipe)
        self.note.close()


class _Dying:
    """A killed child that is not seen dead yet."""

    def __init__(self, child: _Child) -> None:
        self.pid, self.pidfd = child.pid, child.pidfd
        self.look_s = time.monotonic() + _LOOK_S
        self._until_s = time.monotonic() + _REAP_S
        self._before: set[tuple[str, ...]] = set()
        self.blocked = False
        self.given_up = False

    def look(self) -> None:
        """See whether it is to be waited for."""
        now_s = time.monotonic()
        if self.given_up or now_s < self.look_s:
            return
        blocked = _blocked_threads(self.pid)
        self.blocked = bool(blocked & self._before)
        self.given_up = self.blocked or now_s >= self._until_s
        self._before, self.look_s = blocked, now_s + _LOOK_S


def _blocked_threads(pid: int) -> set[tuple[str, ...]]:
    """Threads that are blocked in the kernel now, with how often they ran; none where /proc does not tell."""
    found = set[tuple[str, ...]]()
    try:
        for tid in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{tid}/status", encoding="utf-8", errors="replace") as file:
                lines = file.read().splitlines()
            if any(line.startswith("State:\tD") for line in lines):
                found.add((tid, *(line for line in lines if "ctxt_switches" in line)))
    except OSError:  # it has just ended
        return set()
    return found


def run(
    checks: Sequence[Check], node: NodeView, expected: Expected, deadline_s: float, learning: bool = False
) -> Result:
    """A finding for each check, in their order, after at most `deadline_s` seconds (and a fraction).

    `learning`: nothing is judged; what the checks learn from their facts is in `Result.learned`.
    """
    gc.freeze()  # the children shall not copy our pages by collecting garbage
    under_way = Run(checks, node, expected, deadline_s, learning)
    try:
        under_way.begin()
        while not under_way.done:
            under_way.go_on(wait(under_way.fds(), under_way.look_s()))
        return under_way.result()
    finally:
        under_way.close()


def wait(fds: Iterable[int], until_s: float) -> set[int]:
    """Those that can be read, at the latest at `until_s` (time.monotonic(); inf: as long as it takes)."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    left_s = until_s - time.monotonic()
    return {fd for fd, _ in poller.poll(None if left_s == float("inf") else max(0, int(left_s * 1000) + 1))}


class Run:
    """Checks under way. Never waits, so that several can go on at once.

    Whoever holds it calls `begin`, then `go_on` with those of `fds` that can be read, or at `look_s`, until it is
    `done`; and `close` in any case.
    """

    def __init__(
        self, checks: Sequence[Check], node: NodeView, expected: Expected, deadline_s: float, learning: bool = False
    ) -> None:
        self._checks, self._node, self._expected = checks, node, expected
        self._work = _learned if learning else _found
        self._end_s = time.monotonic() + deadline_s
        self._findings: dict[str, Finding] = {}
        self._result = Result()
        self._children: list[_Child] = []
        self._dying: list[_Dying] = []

    def begin(self) -> None:
        """Start all lanes."""
        lanes: dict[str, list[Check]] = {}
        for check in self._checks:
            if why := _absent(check, self._node, self._expected):
                self._findings[check.name] = Finding(check.name, Verdict.NOT_APPLICABLE, why)
            else:
                lanes.setdefault(check.lane or f" {check.name}", []).append(check)
        for lane in lanes.values():
            self._start(lane)

    @property
    def done(self) -> bool:
        """Whether all findings are there, and the children gone or not to be waited for."""
        return not self._children and all(child.given_up for child in self._dying)

    @property
    def gone(self) -> bool:
        """Whether no process is left."""
        return not self._children and not self._dying

    def fds(self) -> list[int]:
        """What to wait for."""
        return [child.pipe for child in self._children] + [child.pidfd for child in self._dying]

    def look_s(self) -> float:
        """When `go_on` is to be called at the latest, by time.monotonic()."""
        looks_s = [child.look_s for child in self._children]
        looks_s += [child.look_s for child in self._dying if not child.given_up]
        return min(looks_s, default=float("inf"))

    def go_on(self, ready: set[int]) -> None:
        """Take what was told, end what is over."""
        for child in list(self._children):
            self._look(child, child.pipe in ready)
        for dying in list(self._dying):
            if dying.pidfd in ready:
                self._bury(dying)
            else:
                dying.look()

    def result(self) -> Result:
        """When it is done."""
        self._result.left = len(self._dying)
        blocked = sum(child.blocked for child in self._dying)
        if blocked:
            self._result.notes.append(f"{blocked} check process(es) are blocked in the kernel and could not be ended")
        if slow := len(self._dying) - blocked:
            self._result.notes.append(f"{slow} check process(es) were killed and have not ended within {_REAP_S:g} s")
        self._result.findings = [_with_action(self._findings[check.name], check) for check in self._checks]
        return self._result

    def close(self) -> None:
        """End it as it is, at once but for the moment that killed children need."""
        for child in list(self._children):
            self._end(child)
        while self._dying and not self.done:
            self.go_on(wait(self.fds(), self.look_s()))
        for dying in self._dying:
            os.close(dying.pidfd)
        self._dying.clear()

    # --- one child ----------------------------------------------------------------------------------------------------

    def _start(self, checks: Sequence[Check]) -> None:
        """One child for all of them; without one they have their findings."""
        if not checks:
            return
        if time.monotonic() >= self._end_s:
            return self._without(checks, "timed out before it could begin")
        try:
            self._children.append(self._forked(checks))
        except OSError as error:
            self._without(checks, f"no process could be started for it: {error.strerror}")

    def _forked(self, checks: Sequence[Check]) -> _Child:
        note = mmap.mmap(-1, NOTE_BYTES)
        ours, theirs = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                self._node.note = note
                _child(self._work, checks, self._node, self._expected, theirs, self._end_s)
            os.set_blocking(ours, False)
            return _Child(checks, pid, ours, note, self._end_s)
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)

    def _without(self, checks: Iterable[Check], text: str) -> None:
        for check in checks:
            self._findings[check.name] = Finding(check.name, Verdict.UNKNOWN, text)

    def _look(self, child: _Child, ready: bool) -> None:
        """Take the findings that a child has told; see whether it ended without, or the time of a check is up."""
        more = os.read(child.pipe, 65536) if ready else b""
        child.data += more
        while child.checks and (line := _line(child)):
            self._take(child, line)
            child.next()
        if not child.checks:
            self._end(child)
        elif len(child.data) > MAX_RESULT_BYTES:
            self._give_up(child, f"its answer is longer than {MAX_RESULT_BYTES} bytes")
        elif ready and not more:
            self._give_up(child, f"its process ended without an answer{child.doing()}")
        elif time.monotonic() >= child.until_s:
            self._give_up(child, f"timed out after {max(0.0, child.until_s - child.started_s):.1f} s{child.doing()}")
        elif time.monotonic() >= child.look_s:
            others, child.checks = child.checks[1:], child.checks[:1]
            self._start(others)

    def _take(self, child: _Child, line: bytes) -> None:
        verdict, text, age_s, notes, learned = json.loads(line)
        self._result.notes.extend(note for note in notes if note not in self._result.notes)
        self._result.learned.update(learned)
        self._findings[child.checks[0].name] = child.finding(Verdict(verdict), text, age_s)

    def _give_up(self, child: _Child, text: str) -> None:
        """The check under way is unknown; those behind it go on without it."""
        self._findings[child.checks[0].name] = child.finding(Verdict.UNKNOWN, text)
        self._end(child)
        self._start(child.checks[1:])

    def _end(self, child: _Child) -> None:
        child.kill()
        self._children.remove(child)
        self._dying.append(_Dying(child))

    def _bury(self, child: _Dying) -> None:
        os.waitpid(child.pid, 0)
        os.close(child.pidfd)
        self._dying.remove(child)


def _line(child: _Child) -> bytes:
    """The next whole line of at most MAX_RESULT_BYTES, taken from its data; b"" if there is none."""
    line, newline, rest = child.data.partition(b"\n")
    if not newline or len(line) >= MAX_RESULT_BYTES:
        return b""
    child.data = rest
    return line


# What a child sends of a check: verdict, sentence, age in seconds, notes, what it learned.
_Answer = tuple[str, str, float, list[str], dict[str, Any]]


def _child(
    work: Callable[[Check, NodeView, Expected], _Answer],
    checks: Sequence[Check],
    node: NodeView,
    expected: Expected,
    pipe: int,
    end_s: float,
) -> NoReturn:
    """The forked process: never returns into the caller's frames."""
    try:
        os.setsid()
        for signum in (*_JOB_SIGNALS, signal.SIGALRM):
            signal.signal(signum, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        if checks[0].lane == NVML:
            gpus.keep_open()
        for check in checks:
            node.deadline_s = min(end_s, time.monotonic() + check.budget_s)
            signal.alarm(max(1, int(node.deadline_s - time.monotonic()) + _ALARM_S))
            node.doing("")
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


def _absent(check: Check, node: NodeView, expected: Expected) -> str:
    """Why a check does not apply, if that can be told without looking."""
    if check.needs_root and node.live and os.geteuid() != 0:
        return "only root can read this"
    return f"no {check.only_if} is given" if check.only_if and not expected.get(check.only_if) else ""


def examine(check: Check, node: NodeView, expected: Expected) -> tuple[Verdict, str]:
    """Gather and judge, here and now: the verdict and its sentence, whatever the check raises."""
    try:
        if why := _absent(check, node, expected):
            raise Absent(why)
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


def _with_action(finding: Finding, check: Check) -> Finding:
    actions = {Verdict.FAIL: check.on_fail, Verdict.UNKNOWN: check.on_unknown}
    return finding._replace(action=actions.get(finding.verdict, ""))


def stop_on_sigterm() -> None:
    """Make SIGTERM end this process by way of `finally`, so that no child is left."""
    end: Callable[[int, object], NoReturn] = lambda signum, frame: sys.exit(128 + signum)  # noqa: E731
    signal.signal(signal.SIGTERM, end)


def ignore_job_signals() -> None:
    """Slurm sends what ends or warns a job to every process of its step: go on. Checks, in children, may die of it."""
    for signum in _JOB_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
