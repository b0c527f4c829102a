"""Runs checks side by side in forked children, under one deadline. No check can delay the others or the caller.

Call it in a process without threads (it forks): `nvrx health`, or `python -I -m nvrx_slurm.health` for programs.
Checks of one group share a child and run one after the other. Where one does not answer at once, those behind it move
to a child of their own. A child writes each finding as one JSON line into a pipe. Its process group is killed as soon
as all findings are there, or the time of one check is up; `child.bounded_process` tells what happens then.
"""

from __future__ import annotations

import gc
import json
import math
import mmap
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

from nvrx_slurm.child import bounded_process, descendants
from nvrx_slurm.child.bounded_process import BoundedProcess, wait
from nvrx_slurm.core.words import one_line
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.health.check import (
    NOTE_BYTES,
    NVML,
    Check,
    CheckFinding,
    Expected,
    Judgement,
    NodeView,
    Verdict,
)
from nvrx_slurm.system import gpus
from nvrx_slurm.system.files import write_all
from nvrx_slurm.system.hardware import Absent

_PROMPT_S = 0.25  # with a check that others wait behind
_MAX_UNREAD_BYTES = 1 << 20  # of answers; one read takes 64 KiB
_ALARM_S = 2  # a child ends itself that long after its budget, should this process be gone


class Result(NamedTuple):
    """Findings of a run. `notes`: sentences about no check's subject (a process has not ended). `learned`: settings by
    `Check.learn`. `seconds`: how long it took."""

    findings: list[CheckFinding]
    notes: list[str]
    learned: dict[str, Any]
    seconds: float


class _Child:
    """Checks under way in a forked process, the first of `checks` since `started_s`, all until `end_s`."""

    def __init__(
        self, checks: Sequence[Check], process: BoundedProcess, note: mmap.mmap, end_s: float
    ) -> None:
        self.checks = list(checks)
        self.process = process
        self.note = note
        self.end_s = end_s
        self.started_s = time.monotonic()

    @property
    def until_s(self) -> float:
        """When the time of the check under way is up."""
        return min(self.end_s, self.started_s + self.checks[0].budget_s)

    @property
    def wake_s(self) -> float:
        """When to inspect it, if it does not answer before."""
        return (
            min(self.until_s, self.started_s + _PROMPT_S) if len(self.checks) > 1 else self.until_s
        )

    def finding(self, verdict: Verdict, text: str) -> CheckFinding:
        """The finding of the check under way."""
        return CheckFinding(
            self.checks[0].name,
            verdict,
            one_line(text),
            round(time.monotonic() - self.started_s, 4),
        )

    def unknown(self, text: str) -> CheckFinding:
        """An UNKNOWN finding of the check under way, with what it noted last: ", reading /some/file"."""
        phrase = self.note[:NOTE_BYTES].partition(b"\0")[0].decode(errors="replace")
        return self.finding(Verdict.UNKNOWN, f"{text}, {phrase}" if phrase else text)


def run(
    checks: Sequence[Check],
    node: NodeView,
    expected: Expected,
    deadline_s: float,
    learns: bool = False,
) -> Result:
    """A finding for each check, in their order, after at most `deadline_s` seconds (and a fraction). See `Run`."""
    gc.freeze()  # garbage collection in the children would copy the pages of this process
    under_way = Run(checks, node, expected, deadline_s, learns)
    try:
        under_way.begin()
        while not under_way.done:
            under_way.go_on(wait(under_way.fds(), under_way.wake_s()))
        return under_way.result()
    finally:
        under_way.close()


def grouped(checks: Iterable[Check]) -> list[list[Check]]:
    """Checks that share a child process, in lists."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        groups.setdefault(check.group or f" {check.name}", []).append(check)
    return list(groups.values())


class Run:
    """Checks under way. Only `close` waits, so several runs can go on at once. `learns`: call `Check.learn`, too.

    The caller calls `begin`, then `go_on` with those of `fds` that can be read, or at `wake_s`, until it is `done`;
    and `close` in any case.
    """

    def __init__(
        self,
        checks: Sequence[Check],
        node: NodeView,
        expected: Expected,
        deadline_s: float,
        learns: bool = False,
    ) -> None:
        self._checks = checks
        self._node = node
        self._expected = expected
        self._learns = learns
        self._started_s = time.monotonic()
        self._end_s = self._started_s + deadline_s
        self._findings: dict[str, CheckFinding] = {}
        self._learned: dict[str, Any] = {}
        self._children: list[_Child] = []
        self._killed: list[BoundedProcess] = []

    def begin(self) -> None:
        """Start all groups."""
        absent = {
            check.name: why
            for check in self._checks
            if (why := _absent(check, self._node, self._expected))
        }
        for name, why in absent.items():
            self._findings[name] = CheckFinding(name, Verdict.NOT_APPLICABLE, why)
        for group in grouped(check for check in self._checks if check.name not in absent):
            self._start(group)

    @property
    def done(self) -> bool:
        """Whether all findings are there, and all children reaped or given up."""
        return not self._children and all(process.done for process in self._killed)

    @property
    def gone(self) -> bool:
        """Whether no process is left."""
        return not self._children and not self._killed

    def fds(self) -> list[int]:
        """What to wait for."""
        pipes = [child.process.stdout.fd for child in self._children]
        return pipes + [fd for process in self._killed for fd in process.fds()]

    def wake_s(self) -> float:
        """When `go_on` is to be called at the latest, by time.monotonic()."""
        wakes_s = [child.wake_s for child in self._children] + [
            process.wake_s() for process in self._killed
        ]
        return min(wakes_s, default=math.inf)

    def go_on(self, ready: set[int]) -> None:
        """Take the findings that came, end what is overdue."""
        for child in list(self._children):
            self._inspect(child, child.process.stdout.fd in ready)
        for process in self._killed:
            process.go_on(ready)
        self._killed = [process for process in self._killed if not process.gone]

    def result(self) -> Result:
        """The result, once it is done."""
        left = len(self._killed)
        within = f"within {bounded_process.REAP_S:g} s"
        notes = (
            [f"{left} check process(es) were killed and have not ended {within}"] if left else []
        )
        findings = []
        for check, finding in ((check, self._findings[check.name]) for check in self._checks):
            action = {Verdict.FAIL: check.on_fail, Verdict.UNKNOWN: check.on_unknown}.get(
                finding.verdict, ""
            )
            findings.append(finding._replace(action=action))
        return Result(findings, notes, self._learned, round(time.monotonic() - self._started_s, 4))

    def close(self) -> None:
        """End it as it is. Waits for killed children, at most bounded_process.REAP_S."""
        for child in list(self._children):
            self._end(child)
        for process in self._killed:
            process.end()
        self._killed.clear()

    # --- one child ----------------------------------------------------------------------------------------------------

    def _start(self, checks: Sequence[Check]) -> None:
        """One child for all of them; without one they have their findings."""
        why = "timed out before it could begin"
        if checks and time.monotonic() < self._end_s:
            note = mmap.mmap(-1, NOTE_BYTES)
            try:
                process = bounded_process.fork(
                    partial(self._answer, checks, note), limit=_MAX_UNREAD_BYTES
                )
                self._children.append(_Child(checks, process, note, self._end_s))
                return
            except OSError as error:
                why = f"no process could be started for it: {error.strerror}"
        for check in checks:
            self._findings[check.name] = CheckFinding(check.name, Verdict.UNKNOWN, why)

    def _inspect(self, child: _Child, ready: bool) -> None:
        """Take the findings that a child has sent; see whether it ended without, or the time of a check is up."""
        output = child.process.stdout
        why = ""
        if ready:
            output.read()
        while child.checks and b"\n" in output.kept:
            line, _, output.kept[:] = output.kept.partition(b"\n")
            verdict, text, learned = json.loads(line)
            self._learned.update(learned)
            self._findings[child.checks[0].name] = child.finding(Verdict(verdict), text)
            del child.checks[0]
            child.started_s = time.monotonic()
        if child.checks and output.fd < 0:
            why = "its process ended without an answer"
        elif child.checks and time.monotonic() >= child.until_s:
            why = f"timed out after {max(0.0, child.until_s - child.started_s):.1f} s"
        elif child.checks:
            if time.monotonic() >= child.wake_s:  # those behind a slow check go on without it
                others = child.checks[1:]
                child.checks = child.checks[:1]
                self._start(others)
            return
        others = child.checks[1:]
        if why:
            self._findings[child.checks[0].name] = child.unknown(why)
        self._end(child)
        self._start(others)

    def _end(self, child: _Child) -> None:
        child.process.kill()
        child.note.close()
        self._children.remove(child)
        self._killed.append(child.process)

    def _answer(self, checks: Sequence[Check], note: mmap.mmap, pipe: int) -> None:
        """In the forked process: do one check after the other; send (verdict, sentence, learned settings) of each."""
        node = self._node
        node.note = note
        if checks[0].group == NVML:
            gpus.keep_open()
        for check in checks:
            node.deadline_s = min(self._end_s, time.monotonic() + check.budget_s)
            signal.alarm(max(1, int(node.deadline_s - time.monotonic()) + _ALARM_S))
            node.doing("")
            learned: dict[str, Any] = {}
            verdict, text = examine(check, node, self._expected, learned if self._learns else None)
            write_all(pipe, json.dumps((verdict, text, learned)).encode() + b"\n")


def _absent(check: Check, node: NodeView, expected: Expected) -> str:
    """Reason why a check does not apply, if nothing needs to be read for it."""
    if check.needs_root and node.live and os.geteuid() != 0:
        return "only root can read this"
    return (
        f"no {check.only_if} is given" if check.only_if and not expected.get(check.only_if) else ""
    )


def examine(
    check: Check, node: NodeView, expected: Expected, learned: dict[str, Any] | None = None
) -> Judgement:
    """Gather and judge in this process: the verdict and its sentence, whatever the check raises.

    The settings that the check learns from the facts are added to `learned`.
    """
    try:
        if why := _absent(check, node, expected):
            raise Absent(why)
        verdict, text = check.examine(node, expected)
        if check.learn and learned is not None:
            learned.update(check.learn(node, expected))
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


def stop_on_sigterm() -> None:
    """Make SIGTERM end this process and all its children, also one that was just forked and no `Run` knows yet."""

    def end(signum: int, frame: object) -> NoReturn:
        for pid in descendants.children(os.getpid()):
            descendants.kill_tree(pid, (os.getpid(),))
        sys.exit(128 + signum)

    signal.signal(signal.SIGTERM, end)
