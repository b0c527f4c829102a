"""Health checks for an agent, ready to run: `python -I -m nvrx_slurm.health --serve --when preflight`.

Reads lines on stdin. The answer to "check" is one JSON line on stdout, which begins with outcome.ANSWER: the report,
and `"asked": true`. Watched checks run at an interval; a line with `"asked": false` comes only when another check of
them fails. All runs go on side by side. The answer to "memory SECONDS" comes within that time: a report of the
reading and `"used_mb"`: MiB in use by GPU. At the end of stdin it ends at once, with its children.
"""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Sequence

from nvrx_slurm.health import outcome, policy, runner
from nvrx_slurm.health.check import Check, CheckFinding, NodeView, Verdict
from nvrx_slurm.health.checks.gpu import MEMORY
from nvrx_slurm.system.files import write_all

_STDIN = 0
_STDOUT = 1
_MAX_LINE_BYTES = 4096
_NEVER = float("inf")
_MEMORY = re.compile(rb"memory ([0-9]{1,4}(?:\.[0-9]{1,6})?)")


class _Task:
    """Checks that run one run at a time: `due_s` is when to begin the next one. `findings`: those of the last run."""

    def __init__(self, checks: Sequence[Check], deadline_s: float, due_s: float = _NEVER) -> None:
        self.checks = list(checks)
        self.deadline_s = deadline_s
        self.due_s = due_s
        self.questions = 0  # without an answer
        self.findings: list[CheckFinding] = []
        self.run: runner.Run | None = None
        self.is_answered = True  # a process of the last run may still be blocked in the kernel

    @property
    def is_blocked(self) -> bool:
        """Whether nothing but a process that is blocked in the kernel is left of the last run."""
        return self.is_answered and self.run is not None and not self.run.gone

    def news(self) -> runner.Result | None:
        """The result of a run that has just ended."""
        if self.is_answered or self.run is None or not self.run.done:
            return None
        self.is_answered = True
        result = self.run.result()
        self.findings = result.findings
        return result


class CheckServer:
    """`plan.watched` are run every `interval_s` seconds, less those that do not apply to this node."""

    def __init__(self, plan: policy.Selection, node: NodeView, interval_s: float) -> None:
        self._plan = plan
        self._node = node
        self._interval_s = interval_s
        self._check = _Task(plan.checks, plan.deadline_s)
        self._memory = _Task([MEMORY], _NEVER)
        self._watches = [
            _Task(checks, plan.deadline_s, due_s=0.0) for checks in runner.grouped(plan.watched)
        ]
        self._failing: frozenset[str] = frozenset()  # names of the watched checks that failed last
        self._runs: list[runner.Run] = []  # all that have processes
        self._data = b""

    def serve(self) -> None:
        """Serve until the end of stdin, or until stdout is closed."""
        gc.freeze()  # once: garbage collection in the children would copy the pages of this process
        try:
            while True:
                wake_s = self._begin_what_is_due()
                if self._tell_what_is_done():
                    continue  # a check may be due again, or a question may wait
                self._runs = [run for run in self._runs if not run.gone]
                fds = [_STDIN, *(fd for run in self._runs for fd in run.fds())]
                ready = runner.wait(fds, min([wake_s, *(run.wake_s() for run in self._runs)]))
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
                self._check.questions += 1
                self._check.due_s = 0.0
            elif seconds := _MEMORY.fullmatch(line.strip()):
                self._memory.questions = 1
                self._memory.deadline_s = float(seconds[1])
                self._memory.due_s = 0.0
        return bool(more)

    def _begin_what_is_due(self) -> float:
        """Returns when the next run is to begin."""
        wake_s = _NEVER
        for task in (self._check, self._memory, *self._watches):
            # Beside a blocked process of the same checks none is started, but the preflight has to be answered.
            if not task.is_answered or (task.is_blocked and task is not self._check):
                continue
            if task.due_s <= time.monotonic():
                task.due_s = (
                    time.monotonic() + self._interval_s if task in self._watches else _NEVER
                )
                task.is_answered = False
                learns = task is self._memory
                task.run = runner.Run(
                    task.checks, self._node, self._plan.expected, task.deadline_s, learns=learns
                )
                self._runs.append(task.run)
                task.run.begin()
            wake_s = min(wake_s, task.due_s)
        return wake_s

    def _tell_what_is_done(self) -> bool:
        """Print the answers that are due; return whether there was one."""
        news = [result for task in self._watches if (result := task.news())]
        if news:
            self._tell_failures([note for result in news for note in result.notes])
        if checked := self._check.news():
            self._check.questions -= 1
            self._check.due_s = 0.0 if self._check.questions else _NEVER
            self._say(checked.findings, [*self._plan.notes, *checked.notes], asked=True)
        memory = self._memory.news()
        if self._memory.questions and (memory or self._memory.is_blocked):
            self._memory.questions = 0
            self._memory.due_s = _NEVER
            notes, used_mb = (memory.notes, memory.learned) if memory else ([], {})
            self._say(self._memory.findings, notes, asked=True, used_mb=used_mb)
        return bool(news or checked or memory)

    def _tell_failures(self, notes: list[str]) -> None:
        """Report failures of the watched checks that were not reported already."""
        findings = [finding for task in self._watches for finding in task.findings]
        absent = {
            finding.check for finding in findings if finding.verdict is Verdict.NOT_APPLICABLE
        }
        for task in self._watches:  # what does not apply to this node is not run again
            task.checks = [check for check in task.checks if check.name not in absent]
        self._watches = [task for task in self._watches if task.checks]
        failing = frozenset(
            finding.check for finding in findings if finding.action in outcome.GRAVE
        )
        if failing and failing != self._failing:
            self._say(findings, notes, asked=False)
        self._failing = failing

    def _say(self, findings: list[CheckFinding], notes: list[str], **more: object) -> None:
        took_s = max((finding.seconds for finding in findings), default=0.0)
        told = outcome.Report(self._plan.node, self._plan.when, findings, notes, took_s)
        write_all(_STDOUT, f"{outcome.ANSWER}{told.as_json(**more)}\n".encode())
