"""Health checks for an agent, ready to run: `python -I -m nvrx_slurm.health --serve --when preflight`.

Reads lines on stdin. The answer to "check" is one JSON line on stdout: the report, and `"asked": true`. Watched checks
run at an interval; a line with `"asked": false` comes only when another check of them fails. All runs go on side by
side. The answer to "memory SECONDS" comes within that time: a report of the reading and `"used_mb"`: MiB in use by GPU.
At the end of stdin it ends at once, with its children.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import time
from collections.abc import Sequence

from nvrx_slurm.health import policy, report, runner
from nvrx_slurm.health.check import Check, Finding, NodeView, Verdict
from nvrx_slurm.health.checks.gpu import MEMORY
from nvrx_slurm.system.files import write_all

_STDIN, _STDOUT = 0, 1
_MAX_LINE_BYTES = 4096
_NEVER = float("inf")
_MEMORY = re.compile(rb"memory ([0-9]{1,4}(?:\.[0-9]{1,6})?)")


class _Task:
    """Checks that are run one run at a time. `findings`: those of the last run; `due_s`: when to begin the next one."""

    def __init__(self, checks: Sequence[Check], every_s: float) -> None:
        self.checks = list(checks)
        self.every_s = every_s
        self.due_s = 0.0
        self.findings: list[Finding] = []
        self._run: runner.Run | None = None
        self._taken = False  # its result; a process of it may be blocked in the kernel, and then no other is started

    @property
    def idle(self) -> bool:
        """Whether no process of it is left."""
        return self._run is None

    @property
    def stuck(self) -> bool:
        """Whether nothing but a process that is blocked in the kernel is left of its last run."""
        return self._run is not None and self._taken

    def wake_s(self) -> float:
        """When to start the next run."""
        return self.due_s if self.idle else _NEVER

    def started(self, run: runner.Run) -> None:
        """`run` is under way."""
        self.due_s = time.monotonic() + self.every_s
        self._run, self._taken = run, False

    def news(self) -> runner.Result | None:
        """The result of a run that has just ended."""
        run, result = self._run, None
        if run and run.done and not self._taken:
            self._taken, result = True, run.result()
            self.findings = result.findings
        if run and run.gone:
            self._run = None
        return result

    def keep_what_applies(self) -> None:
        """Stop scheduling checks that do not apply to this node."""
        there = {finding.check for finding in self.findings if finding.verdict is not Verdict.NOT_APPLICABLE}
        if self.findings:
            self.checks = [check for check in self.checks if check.name in there]
        if not self.checks:
            self.due_s = _NEVER


class CheckServer:
    """`plan.watched` are run every `interval_s` seconds, less those that do not apply to this node."""

    def __init__(self, plan: policy.Selection, node: NodeView, interval_s: float) -> None:
        self._plan, self._node = plan, node
        groups: dict[str, list[Check]] = {}
        for check in plan.watched:
            groups.setdefault(check.group or f" {check.name}", []).append(check)
        self._watches = [_Task(checks, interval_s) for checks in groups.values()]
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
                wake_s = [run.wake_s() for run in self._runs] + [task.wake_s() for task in self._watches]
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
            self._asked = self._begin(self._plan.checks, self._plan.deadline_s)
        for task in self._watches:
            if task.wake_s() <= time.monotonic():
                task.started(self._begin(task.checks, self._plan.deadline_s))
        if self._memory_s is not None and self._memory.idle:
            self._memory.started(self._begin(self._memory.checks, self._memory_s))

    def _begin(self, checks: Sequence[Check], deadline_s: float) -> runner.Run:
        run = runner.Run(checks, self._node, self._plan.expected, deadline_s)
        self._runs.append(run)
        run.begin()
        return run

    def _take_what_is_done(self) -> bool:
        """Whether there was something."""
        news = [result for task in self._watches if (result := task.news())]
        if news:
            self._tell_news([note for result in news for note in result.notes])
        answered = self._asked is not None and self._asked.done
        if self._asked and answered:
            self._questions -= 1
            result, self._asked = self._asked.result(), None
            notes = [*self._plan.notes, *result.notes]
            self._say(result.findings, notes, time.monotonic() - self._asked_s, asked=True)
        return self._tell_memory() or bool(news) or answered

    def _tell_memory(self) -> bool:
        """Whether there was an answer: a new reading, or the last one if its process is still blocked in the kernel."""
        result = self._memory.news()
        if self._memory_s is None or not (result or self._memory.stuck):
            return result is not None
        self._memory_s = None
        notes, used_mb = (result.notes, result.learned) if result else ([], {})
        findings = self._memory.findings
        self._say(findings, notes, findings[0].seconds, asked=True, used_mb=used_mb)
        return True

    def _tell_news(self, notes: list[str]) -> None:
        """Report failures of the watched checks that were not reported already."""
        findings = [finding for task in self._watches for finding in task.findings]
        for task in self._watches:
            task.keep_what_applies()
        failing = frozenset(finding.check for finding in findings if finding.action in report.GRAVE)
        if failing and failing != self._failing:
            self._say(findings, notes, max(finding.seconds for finding in findings), asked=False)
        self._failing = failing

    def _say(self, findings: list[Finding], notes: list[str], took_s: float, **more: object) -> None:
        told = report.Report(self._plan.node, self._plan.when, findings, notes, round(took_s, 4))
        write_all(_STDOUT, told.as_json(**more).encode() + b"\n")
