"""The process of the health checks: started once, asked over a channel, started again when it ends.

Checks and GPU memory are in a process of their own (`health.check_server`), which can be killed. A thread of the agent
that is blocked in a driver would keep the agent from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from nvrx_slurm.child.supervised import SupervisedProcess
from nvrx_slurm.core.words import one_line
from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import outcome
from nvrx_slurm.node.preflight.head_start import PreflightSpec, Spawned, spawn
from nvrx_slurm.system import bounded

_RESPAWN_S = 5.0  # doubled for each process that ends without a single answer
_MAX_LINE_BYTES = 1 << 20
# Slurm signals every process of a step; this one ignores that once it is up.
_BY_SIGNAL = {code for signum in (1, 2, 3, 10, 12, 15) for code in (-signum, 128 + signum)}
_REFUSES = "nvrx health: "


class ChecksAnswer(NamedTuple):
    """One answer of `health.check_server`. `used_mb`: MiB in use by GPU; None: no reading of memory."""

    report: outcome.Report
    used_mb: Mapping[str, float] | None


class ChecksProcess(SupervisedProcess):
    """The process over its lives. All methods belong to the thread of the running event loop.

    `on_news(answer)` gets the lines that were not asked for. `say_once(sentence)` is for people.
    """

    longest_delay_s = 300.0
    young_s = math.inf

    def __init__(
        self,
        spec: PreflightSpec,
        state_dir: Path,
        say_once: Callable[[str], None],
        on_news: Callable[[ChecksAnswer], None],
        spawned: Spawned | None = None,
    ) -> None:
        """`spawned`: a process that has been started already."""
        super().__init__()
        self._spec = spec
        self._state_dir = state_dir
        self._say_once = say_once
        self._on_news = on_news
        self._asked: dict[str, deque[asyncio.Future[ChecksAnswer | None]]] = {"check": deque(), "memory": deque()}
        self._data = b""
        self._answered = False  # ever, by any of the processes
        self._refusal = ""
        self._delay_s = self.first_delay_s = _RESPAWN_S
        if spawned is not None:
            self._adopt(*spawned)

    def _start(self) -> Spawned:
        self._data = b""
        return spawn(self._spec, self._state_dir)

    def _on_failure(self, error: OSError) -> None:
        self._say_once(f"this node goes unchecked: no process can be made for its health checks: {error.strerror}")

    async def ask(self, question: str, timeout_s: float) -> ChecksAnswer | None:
        """The answer to "check" or "memory SECONDS"; None if the process ends without one.

        Raises asyncio.TimeoutError after `timeout_s` seconds (the process is killed then), UsageError for arguments
        that the checks refuse.
        """
        self.spawn()
        if self._child is None:
            return None
        answer: asyncio.Future[ChecksAnswer | None] = self._loop.create_future()
        self._asked[question.split()[0]].append(answer)
        self.send(f"{question}\n".encode())
        try:
            return await bounded.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            self._kill()
            await self._wait_for_end()
            raise

    def _ask_to_end(self) -> None:
        """Ask the process to end, by the end of its questions."""
        if self._channel is not None:
            with contextlib.suppress(OSError):  # it has just died
                self._channel.shutdown(socket.SHUT_WR)

    # --- its output -----------------------------------------------------------------------------------------

    def _on_message(self, data: bytes) -> None:
        *lines, self._data = (self._data + data).split(b"\n")
        try:
            if len(self._data) > _MAX_LINE_BYTES:
                raise ValueError("a line without an end")
            for line in lines:
                self._take(line.decode(errors="replace"))
        except ValueError as error:
            self._say_once(f"health checks said what they should not: {error}")
            self._kill()
            self._drop_channel()

    def _take(self, line: str) -> None:
        """An answer, or (of its stderr) a sentence, or both: a sentence may have no end."""
        said, mark, told = line.rpartition(outcome.ANSWER)
        text = one_line(said if mark else told)
        if text.startswith(_REFUSES) and not self._answered:
            self._refusal = text.removeprefix(_REFUSES)
        elif text:
            self._say_once(text)
        if not mark:
            return
        found, plain = outcome.from_json(told), json.loads(told)
        used_mb = plain.get("used_mb")
        answer = ChecksAnswer(found, used_mb)
        if not plain.get("asked"):
            self._on_news(answer)
            return
        self._answered = True
        self._delay_s = _RESPAWN_S
        asked = self._asked["check" if used_mb is None else "memory"]
        if asked and not (future := asked.popleft()).done():  # done: given up by the caller
            future.set_result(answer)

    # --- its end --------------------------------------------------------------------------------------------

    def _on_exit(self, pid: int, code: int) -> None:
        refused = code == outcome.EXIT_USAGE and not self._answered
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
            self._spawn_later()
