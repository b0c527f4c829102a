"""The process of the health checks: started once, asked over pipes, started again when it ends.

Checks and GPU memory are in a process of their own (`health.check_server`), which can be killed. A thread of the agent
that is blocked in a driver would keep the agent from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from nvrx_slurm.child.supervised import RestartedProcess
from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import report
from nvrx_slurm.health.check import one_line
from nvrx_slurm.node.preflight.early import Spawned, spawn
from nvrx_slurm.node.preflight.preflight_settings import PreflightSpec

_RESPAWN_S = 5.0  # doubled for each process that ends without a single answer
_MAX_RESPAWN_S = 300.0
_MAX_LINE_BYTES = 1 << 20
_MAX_ERROR_LINE_BYTES = 4096
# Slurm signals every process of a step; this one ignores that once it is up.
_BY_SIGNAL = {code for signum in (1, 2, 3, 10, 12, 15) for code in (-signum, 128 + signum)}
_REFUSES = "nvrx health: "


class Answer(NamedTuple):
    """A line of `health.check_server`. `used_mb`: MiB in use by GPU; None: no reading of memory."""

    report: report.Report
    used_mb: Mapping[str, float] | None


class Resident(RestartedProcess):
    """The process over its lives. All methods belong to the thread of the running event loop.

    `on_news(answer)` gets the lines that were not asked for. `say_once(sentence)` is for people.
    """

    def __init__(
        self,
        spec: PreflightSpec,
        state_dir: Path,
        say_once: Callable[[str], None],
        on_news: Callable[[Answer], None],
        spawned: Spawned | None = None,
    ) -> None:
        """`spawned`: a process that was started early."""
        super().__init__()
        self._spec = spec
        self._state_dir = state_dir
        self._say_once = say_once
        self._on_news = on_news
        self._now: Spawned | None = None
        self._asked: dict[str, deque[asyncio.Future[Answer | None]]] = {"check": deque(), "memory": deque()}
        self._data = self._last_words = b""
        self._answered = False  # ever, by any of the processes
        self._refusal = ""
        self._delay_s = _RESPAWN_S
        if spawned is not None:
            self._take_over(spawned)

    def spawn(self) -> None:
        """Start the process if there is none; one that cannot be started is said."""
        if self._now is not None or self._closed:
            return
        try:
            self._take_over(spawn(self._spec, self._state_dir))
        except OSError as error:
            self._say_once(f"this node goes unchecked: no process can be made for its health checks: {error.strerror}")

    async def ask(self, question: str, timeout_s: float) -> Answer | None:
        """The answer to "check" or "memory SECONDS"; None if the process ends without one.

        Raises asyncio.TimeoutError after `timeout_s` seconds (the process is killed then), UsageError for arguments
        that the checks refuse.
        """
        self.spawn()
        if self._now is None:
            return None
        answer: asyncio.Future[Answer | None] = self._loop.create_future()
        self._asked[question.split()[0]].append(answer)
        with contextlib.suppress(OSError):  # it is about to end, or stopped reading
            os.write(self._now.stdin, f"{question}\n".encode())
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            self._kill()
            await self._wait_for_end()
            raise

    async def close(self) -> None:
        """End the process: by the end of its questions, then by SIGKILL. Bounded."""
        await self._close(self._end_questions)

    def _end_questions(self) -> None:
        if self._now is not None:
            os.close(self._now.stdin)
            self._now = self._now._replace(stdin=-1)

    def _take_over(self, spawned: Spawned) -> None:
        self._now = spawned
        self._data = self._last_words = b""
        for fd in spawned[1:]:
            os.set_blocking(fd, False)
        self._adopt(spawned.child, {spawned.stdout: self._on_answer, spawned.stderr: self._on_error})

    # --- its output -----------------------------------------------------------------------------------------

    def _on_answer(self) -> None:
        assert self._now is not None
        *lines, self._data = (self._data + self._read(self._now.stdout)).split(b"\n")
        try:
            if len(self._data) > _MAX_LINE_BYTES:
                raise ValueError("a line without an end")
            for line in lines:
                self._take(line.decode(errors="replace"))
        except ValueError as error:
            self._say_once(f"health checks said what they should not: {error}")
            self._kill()

    def _take(self, line: str) -> None:
        found, plain = report.from_json(line), json.loads(line)
        used_mb = plain.get("used_mb")
        answer = Answer(found, used_mb)
        if not plain.get("asked"):
            self._on_news(answer)
            return
        self._answered, self._delay_s = True, _RESPAWN_S
        asked = self._asked["check" if used_mb is None else "memory"]
        if asked and not (future := asked.popleft()).done():  # done: given up by the caller
            future.set_result(answer)

    def _on_error(self) -> None:
        assert self._now is not None
        *lines, rest = (self._last_words + self._read(self._now.stderr)).split(b"\n")
        self._last_words = rest[-_MAX_ERROR_LINE_BYTES:]
        for line in lines:
            text = one_line(line.decode(errors="replace"))
            if text.startswith(_REFUSES) and not self._answered:
                self._refusal = text.removeprefix(_REFUSES)
            else:
                self._say_once(text)

    def _read(self, fd: int) -> bytes:
        try:
            more = os.read(fd, 65536)
        except BlockingIOError:
            return b""
        if not more:
            self._loop.remove_reader(fd)
        return more

    # --- its end --------------------------------------------------------------------------------------------

    def _on_exit(self, pid: int, code: int) -> None:
        assert self._now is not None
        for fd in self._now[1:]:
            if fd >= 0:
                os.close(fd)
        self._now = None
        refused = code == report.EXIT_USAGE and not self._answered
        for asked in self._asked.values():
            while asked:
                if (future := asked.popleft()).done():
                    continue
                if refused:
                    future.set_exception(UsageError(f"the health checks cannot be run: {self._refusal}"))
                else:
                    future.set_result(None)
        if not self._closed and not refused:
            if code not in _BY_SIGNAL:
                self._say_once(f"the process of the health checks ended with {code}; it is started again")
            self._spawn_later(_RESPAWN_S, _MAX_RESPAWN_S)
