"""Health checks for an agent, ready to run: `python -I -m nvrx_slurm.health --serve --when preflight`.

Reads lines on stdin. The answer to "check" is one JSON line on stdout: the report, and `"asked": true`. Slow checks
(`Check.ahead_s`) run ahead: a report has their last findings with their age. A failure among them is looked at again
first, so that a mended node is not taken out. Watched checks run at an interval; a line with `"asked": false` comes
only when another check of them fails. All runs go on side by side. Only the first answer waits for one in the
background: for the first findings of slow checks. The answer to "memory SECONDS" comes within that time: a report of
the reading and `"used_mb"`: MiB in use by GPU. At the end of stdin it ends at once, with its children.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec

from nvrx_slurm.health import policy, report, runner
from nvrx_slurm.health.check import Check, Expected, Finding, NodeView, Verdict
from nvrx_slurm.health.checks.gpu import MEMORY

_STDIN, _STDOUT = 0, 1
_NODE_SERVICE = "nvrx_slurm.health.checks.node_service"
_MAX_LINE_BYTES = 4096
_NEVER = float("inf")
_MEMORY = re.compile(rb"memory ([0-9]{1,4}(?:\.[0-9]{1,6})?)")


def preload(expected: Expected) -> None:
    """Import gRPC now, which takes long, where a health service is to be asked."""
    if expected.get("node_service") and find_spec(_NODE_SERVICE):
        import_module(_NODE_SERVICE).preload()


class _Task:
    """Checks that are run in the background every `every_s` seconds, first at once; `findings`: their last ones."""

    def __init__(self, checks: Sequence[Check], every_s: float) -> None:
        self.checks = list(checks)
        self.every_s = every_s
        self.due_s = 0.0
        self.findings: list[Finding] = []
        self._at_s = 0.0  # when the last run ended,
        self._since_s = 0.0  # and began
        self._began_s = 0.0  # the run under way
        self._run: runner.Run | None = None
        self._taken = False  # its result; a process of it may be blocked in the kernel, and then no other is started

    def wake_s(self) -> float:
        """When to start the next run."""
        return self.due_s if self._run is None else _NEVER

    def failed_before(self, when_s: float) -> bool:
        """Whether it failed with a grave action in a run that began before `when_s`."""
        return self._since_s < when_s and any(
            finding.verdict is Verdict.FAIL and finding.action in report.GRAVE for finding in self.findings
        )

    @property
    def idle(self) -> bool:
        """Whether no process of it is left."""
        return self._run is None

    @property
    def stuck(self) -> bool:
        """Whether nothing but a process that is blocked in the kernel is left of its last run."""
        return self._run is not None and self._taken

    def can_look(self) -> bool:
        """Whether no run is under way; what is left of one may be blocked in the kernel."""
        return self._run is None or self._taken

    def started(self, run: runner.Run) -> None:
        """`run` is under way."""
        self._began_s = time.monotonic()
        self.due_s = self._began_s + self.every_s
        self._run, self._taken = run, False

    def news(self) -> runner.Result | None:
        """The result of a run that has just ended."""
        run, result = self._run, None
        if run and run.done and not self._taken:
            self._taken, self._at_s, self._since_s = True, time.monotonic(), self._began_s
            result = run.result()
            self.findings = result.findings
        if run and run.gone:
            self._run = None
        return result

    def aged(self) -> list[Finding]:
        """The last findings with their age."""
        age_s = time.monotonic() - self._at_s
        return [finding._replace(age_s=round(finding.age_s + age_s, 3)) for finding in self.findings]

    def keep_what_applies(self) -> None:
        """Stop scheduling checks that do not apply to this node."""
        there = {finding.check for finding in self.findings if finding.verdict is not Verdict.NOT_APPLICABLE}
        if self.findings:
            self.checks = [check for check in self.checks if check.name in there]
        if not self.checks:
            self.due_s = _NEVER


class Resident:
    """`plan.watched` are run every `interval_s` seconds, less those that do not apply to this node."""

    def __init__(self, plan: policy.Selection, node: NodeView, interval_s: float) -> None:
        self._plan, self._node = plan, node
        self._ahead = [_Task([check], check.ahead_s) for check in plan.checks if check.ahead_s]
        lanes: dict[str, list[Check]] = {}
        for check in plan.watched:
            lanes.setdefault(check.lane or f" {check.name}", []).append(check)
        self._watches = [_Task(checks, interval_s) for checks in lanes.values()]
        self._failing: frozenset[str] = frozenset()  # of the watched
        self._questions = 0  # not answered yet, the one under way included
        self._asked: runner.Run | None = None
        self._asked_s = 0.0
        self._memory = _Task([MEMORY], _NEVER)
        self._memory_s: float | None = None  # for a reading that is asked for and not answered yet
        self._runs: list[runner.Run] = []  # all that have processes
        self._data = b""

    def serve(self) -> None:
        """Until the end of stdin, or until stdout is closed."""
        gc.freeze()  # once: garbage collection in the children would copy the pages of this process
        try:
            while True:
                self._begin_what_is_due()
                if self._take_what_is_done():
                    continue  # a check may be due again, or a question may wait
                self._runs = [run for run in self._runs if not run.gone]
                fds = [_STDIN, *(fd for run in self._runs for fd in run.fds())]
                tasks = (*self._ahead, *self._watches)
                wake_s = [run.look_s() for run in self._runs] + [task.wake_s() for task in tasks]
                ready = runner.wait(fds, min(wake_s, default=_NEVER))
                if _STDIN in ready and not self._read():
                    return
                for run in self._runs:
                    run.go_on(ready)
        except BrokenPipeError:
            return
        finally:
            for run in self._runs:
                run.close()

    def _read(self) -> bool:
        """Take the questions that came; False at the end of stdin."""
        more = os.read(_STDIN, 65536)
        *lines, rest = (self._data + more).split(b"\n")
        self._data = rest[:_MAX_LINE_BYTES]
        for line in lines:
            if line.strip() == b"check":
                self._questions += 1
            elif seconds := _MEMORY.fullmatch(line.strip()):
                self._memory_s = float(seconds[1])
            else:
                said = f"nvrx health: {line[:60]!r} is no question; write: check, or: memory SECONDS"
                print(said, file=sys.stderr, flush=True)
        return bool(more)

    def _begin_what_is_due(self) -> None:
        if self._questions and self._asked is None:
            self._asked_s = time.monotonic()
            self._asked = self._begin([check for check in self._plan.checks if not check.ahead_s])
        for task in (*self._ahead, *self._watches):
            if task.wake_s() <= time.monotonic():
                task.started(self._begin(task.checks))
        for task in self._ahead if self._asked else ():
            if task.failed_before(self._asked_s) and task.can_look():
                task.started(self._begin(task.checks, time.monotonic() - self._asked_s))
        if self._memory_s is not None and self._memory.idle:
            run = runner.Run([MEMORY], self._node, self._plan.expected, self._memory_s, learning=True)
            self._memory.started(self._begun(run))

    def _begin(self, checks: Sequence[Check], later_s: float = 0.0) -> runner.Run:
        """`later_s`: so much of the time is over."""
        run = runner.Run(checks, self._node, self._plan.expected, self._plan.deadline_s - later_s)
        return self._begun(run)

    def _begun(self, run: runner.Run) -> runner.Run:
        self._runs.append(run)
        run.begin()
        return run

    def _take_what_is_done(self) -> bool:
        """Whether there was something."""
        ran_ahead = [task for task in self._ahead if task.news()]
        for task in ran_ahead:
            if task.findings[0].verdict is Verdict.NOT_APPLICABLE:
                task.due_s = _NEVER  # until the next question, see `_answer`
        news = [result for task in self._watches if (result := task.news())]
        if news:
            self._tell_news([note for result in news for note in result.notes])
        answerable = (
            self._asked is not None
            and self._asked.done
            and all(task.findings and not task.failed_before(self._asked_s) for task in self._ahead)
        )
        if self._asked and answerable:
            self._answer(self._asked.result())
            self._asked = None
        told_memory = self._tell_memory()
        return bool(ran_ahead or news or answerable or told_memory)

    def _tell_memory(self) -> bool:
        """Whether there was an answer: a new reading, or the last one if its process is still blocked in the kernel."""
        result = self._memory.news()
        if self._memory_s is None or not (result or self._memory.stuck):
            return result is not None
        self._memory_s = None
        notes, used_mb = (result.notes, result.learned) if result else ([], {})
        findings = self._memory.aged()
        self._say(findings, notes, findings[0].seconds, asked=True, used_mb=used_mb)
        return True

    def _answer(self, result: runner.Result) -> None:
        self._questions -= 1
        found = {finding.check: finding for finding in result.findings}
        found |= {finding.check: finding for task in self._ahead for finding in task.aged()}
        findings = [found[check.name] for check in self._plan.checks]
        self._say(findings, [*self._plan.notes, *result.notes], time.monotonic() - self._asked_s, asked=True)
        for task in self._ahead:
            if task.due_s == _NEVER:
                task.due_s = 0.0  # it may apply by the next question

    def _tell_news(self, notes: list[str]) -> None:
        """Report failures of the watched checks that were not reported already."""
        findings = [finding for task in self._watches for finding in task.aged()]
        for task in self._watches:
            task.keep_what_applies()
        failing = frozenset(finding.check for finding in findings if finding.action in report.GRAVE)
        if failing and failing != self._failing:
            self._say(findings, notes, max(finding.seconds for finding in findings), asked=False)
        self._failing = failing

    def _say(self, findings: list[Finding], notes: list[str], took_s: float, **more: object) -> None:
        told = report.Report(self._plan.node, self._plan.when, findings, notes, round(took_s, 4))
        line = told.as_json(**more).encode() + b"\n"
        while line:
            line = line[os.write(_STDOUT, line) :]
