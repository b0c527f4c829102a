"""The preflight: the node is made ready and checked before every cycle, and watched all the time (decision 012).

A node that fails its preflight asks the coordinator to be left out (`core.agent`). Only a check that fails outright
makes the node unfit; nothing else that the process of the checks does can hurt the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.words import one_line
from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import outcome
from nvrx_slurm.health.outcome import Verdict
from nvrx_slurm.node.output.console import once
from nvrx_slurm.node.preflight.checks_process import ChecksAnswer, ChecksProcess, Spawned
from nvrx_slurm.node.preflight.head_start import ANSWER_MARGIN_S, PreflightSpec
from nvrx_slurm.node.shell import Post
from nvrx_slurm.system import bounded

_READING_S = 10.0  # the most that one reading of GPU memory may take
_LEAST_READING_S = 0.1


class Preflight:
    """Role. It posts Prepared once for the start and once per Prepare, and Sick when a check fails in between.

    The node is idle from Prepared to StartWorkers: all checks run now and then, so that no sick spare is promoted.
    Settings that the checks refuse go to `refuse(error)`. `cleaned(used)`: until nothing of earlier workers runs.
    """

    def __init__(
        self,
        spec: PreflightSpec,
        infra_rank: int,
        state_dir: Path,
        say: Callable[[str], None],
        post: Post,
        refuse: Callable[[Exception], None],
        spawned: Spawned | None = None,
        cleaned: Callable[[bool], Awaitable[None]] | None = None,
    ) -> None:
        self._spec = spec
        self._infra_rank = infra_rank
        self._say, self._say_once = say, once(say)
        self._post = post
        self._refuse = refuse
        self._cleaned = cleaned
        self.checks = ChecksProcess(spec, state_dir, self._say_once, self._on_news, spawned)
        self._task: asyncio.Task[None] | None = None  # the preflight, then the checks of the idle node
        self._has_gpus = True  # until a reading says otherwise
        self._closing = asyncio.Event()

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """Check the node for the next cycle; or leave it alone, because its workers run."""
        return {ag.Prepare: self._run, ag.StartWorkers: lambda command: self._stop_task()}

    async def start(self) -> None:
        """Check the node for its first cycle."""
        if self._spec.checks:
            self.checks.spawn()
        self._run(ag.Prepare(used=False, cycle=0))

    async def close(self) -> None:
        """End the process of the checks."""
        self._closing.set()
        await self.checks.close()
        self._stop_task()

    def _run(self, command: ag.Prepare) -> None:
        self._stop_task()
        self._task = asyncio.ensure_future(self._prepare(command))

    def _stop_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _prepare(self, command: ag.Prepare) -> None:
        try:
            checking = self.prepare(command.cycle, command.used)
            why, _ = await asyncio.gather(checking, self._wait_for_helpers(command.used))
        except UsageError as error:
            self._refuse(error)
            return
        self._post(ag.Prepared(why))
        if not why and self._spec.checks:
            await self._check_while_idle()

    async def _wait_for_helpers(self, used: bool) -> None:
        if self._cleaned is not None:
            await self._cleaned(used)

    async def prepare(self, cycle: int, used: bool) -> str:
        """Make the node ready for `cycle` and check it. Returns why it is not fit, "" if it is.

        `used`: workers have run on it. Bounded by the spec's `longest_s`. Raises UsageError for settings that the
        checks refuse.
        """
        if used:
            await self._reclaim()
        if (cycle, self._infra_rank) in self._spec.injected:
            return f"a failure was injected for cycle {cycle} (NVRX_INJECT_GPU_FAILURE)"
        return await self._check()

    async def _check_while_idle(self) -> None:
        """Spares may wait for days before they are promoted."""
        why = ""
        while not why and not self._closing.is_set():
            await asyncio.sleep(self._spec.idle_s)
            with contextlib.suppress(UsageError):  # the next preflight tells
                why = await self._check()
        if why:
            self._post(ag.Sick(why))

    async def _check(self) -> str:
        """Why the node is not fit; "" if it is, or if the checks cannot tell."""
        if not self._spec.checks or self._closing.is_set():
            return ""
        try:
            found = await self.checks.ask("check", self._spec.answer_s)
        except asyncio.TimeoutError:
            self._say_once(f"health checks did not answer within {self._spec.answer_s:g} s; going on without")
            return ""
        return "" if found is None else self._judge(found)

    def _on_news(self, answer: ChecksAnswer) -> None:
        if why := self._judge(answer):
            self._post(ag.Sick(why))

    def _judge(self, answer: ChecksAnswer) -> str:
        """Why the node is not fit, or "". What the checks could not tell is said, and changes nothing."""
        found = answer.report
        unfit = []
        for finding in found.findings:
            if finding.verdict is Verdict.FAIL and finding.action in outcome.GRAVE:
                unfit.append(f"{finding.check}: {finding.text}")
            elif finding.verdict in (Verdict.FAIL, Verdict.UNKNOWN):
                word = "cannot tell" if finding.verdict is Verdict.UNKNOWN else "warns"
                self._say_once(f"health check {finding.check} {word}: {finding.text}")
        for note in found.notes:
            self._say_once(f"health checks: {note}")
        return one_line("; ".join(unfit))

    # --- GPU memory -----------------------------------------------------------------------------------------

    async def _reclaim(self) -> None:
        """Wait until no GPU holds too much memory of workers that are gone. Bounded, best effort."""
        wanted, start_s = self._spec.reclaim, time.monotonic()
        first: Mapping[str, float] = {}
        while self._has_gpus and wanted.timeout_s > 0 and not self._closing.is_set():
            left_s = start_s + wanted.timeout_s - time.monotonic()
            used_mb, why = await self._read_memory(max(_LEAST_READING_S, min(_READING_S, left_s)))
            if self._closing.is_set() or not self._has_gpus:
                return
            if not used_mb:
                self._say(f"GPU memory cannot be read: {why}; going on all the same")
                return
            used_mb = dict([*used_mb.items()][slice(*wanted.gpus)])
            first = first or used_mb
            took_s = time.monotonic() - start_s
            numbers = ", ".join(f"{gpu} {first.get(gpu, mb):.0f} -> {mb:.0f} MiB" for gpu, mb in used_mb.items())
            busy = sum(mb > wanted.tolerance_mb for mb in used_mb.values())
            if not busy:
                self._say(f"GPU memory was free after {took_s:.1f} s: {numbers}")
                return
            if took_s >= wanted.timeout_s:
                held = f"{busy} of {len(used_mb)} GPUs hold more than {wanted.tolerance_mb:g} MiB after {took_s:.1f} s"
                self._say(f"{held}: {numbers}; going on all the same")
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await bounded.wait_for(self._closing.wait(), min(wanted.poll_s, wanted.timeout_s - took_s))

    async def _read_memory(self, seconds: float) -> tuple[Mapping[str, float], str]:
        """MiB in use by GPU, or why not. The process answers within `seconds`, whatever the driver does, or is killed.

        Clears `_has_gpus` where there is nothing to read at all.
        """
        try:
            answer = await self.checks.ask(f"memory {seconds:.3f}", seconds + ANSWER_MARGIN_S)
        except asyncio.TimeoutError:
            return {}, f"its process did not answer within {seconds + ANSWER_MARGIN_S:.1f} s"
        except UsageError as error:
            return {}, str(error)
        if answer is None:
            return {}, "there is no process that reads it"
        findings = answer.report.findings
        self._has_gpus = bool(answer.used_mb) or any(one.verdict is not Verdict.NOT_APPLICABLE for one in findings)
        return answer.used_mb or {}, "; ".join(finding.text for finding in findings)
