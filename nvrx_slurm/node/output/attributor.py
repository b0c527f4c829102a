"""The attribution process of the job: started by the node that coordinates, told of cycles, asked for nothing.

The agent never waits for it, except for a moment at the end of the job. See `attribution.__main__` for its packets.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from nvrx_slurm.attribution.records import AttributionSpec, CycleNews
from nvrx_slurm.child.supervised import PacketProcess
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.logs.names import cycle_file
from nvrx_slurm.core.words import one_line
from nvrx_slurm.declared import plain

LAST_WORDS_S = 3.0  # how long the process may take to end once its job has ended
_MOST_OPEN = 8  # cycles without an answer that a new process is told of
_TEXT_CHARS = 600
_TRACEBACK_CHARS = 2000
# No token, and no secrets of the job.
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")


class Attributor(PacketProcess):
    """Belongs to one coordinator. It tells the process of cycles, and the coordinator what the process says."""

    def __init__(self, settings: AttributionSpec, say: Callable[[str], None], post: Callable[[object], None]) -> None:
        super().__init__(
            "attribution process",
            "nvrx_slurm.attribution.__main__",
            lambda: asdict(settings),
            self._say_line,
            lambda: self._open.values(),
            env={name: os.environ[name] for name in _INHERITED if name in os.environ},
        )
        self._of_job = settings
        self._print = say
        self._post = post
        self._open: dict[int, dict[str, Any]] = {}  # cycles without an answer: what the process was told
        self._late: asyncio.TimerHandle | None = None
        self._ends: asyncio.Future[bool] | None = None

    def begun(self, command: ev.CycleBegan) -> None:
        """A cycle runs. Coordinators before this one may not have submitted theirs: a service elsewhere hears again."""
        if self._late is None and self._of_job.endpoint:
            first = max(0, command.cycle - _MOST_OPEN + 1)
            for cycle in range(first, command.cycle):
                self._tell_of(cycle, over=True)
        self._tell_of(command.cycle)

    def over(self, command: ev.CycleOver) -> None:
        """A cycle is over."""
        fault = dict[str, Any]()
        cause = command.cause
        if cause is not None:
            fault = plain(cause) | {"traceback": cause.traceback[-_TRACEBACK_CHARS:]}
        self._tell_of(command.cycle, over=True, lasted_s=command.lasted_s, fault=fault)

    def _tell_of(self, cycle: int, **more: Any) -> None:
        if self._ends is not None:
            return
        log = cycle_file(self._of_job.prefix, cycle)
        self._open[cycle] = packet = asdict(CycleNews(cycle, log, **more))
        while len(self._open) > _MOST_OPEN:
            del self._open[min(self._open)]
        if self._late is None:
            self._late = self._loop.call_later(self._of_job.startup_s, self._say_late)
            self.spawn()
        else:
            self.tell(packet)

    def _say_late(self) -> None:
        self._print(f"attribution is not up after {self._of_job.startup_s:g} s; the training goes on without it")

    def _say_line(self, sentence: str) -> None:
        self._print(one_line(sentence[:_TEXT_CHARS]))

    def _on_packet(self, packet: dict[str, Any]) -> None:
        if "ready" in packet and self._late is not None:
            self._late.cancel()
        cycle = packet.get("cycle")
        text = one_line(str(packet.get("text", ""))[:_TEXT_CHARS])
        was_open = isinstance(cycle, int) and self._open.pop(cycle, {})
        if not was_open or not text:
            return
        assert isinstance(cycle, int)
        if self._ends is None:
            self._post(ev.Advised(cycle, packet.get("stop") is True, text))
        else:  # about the failure that ended the job
            self._print(f"attribution of cycle {cycle}: {text}")

    def end(self) -> None:
        """This node coordinates no more, or the job has ended: the process may say its last words, then it is killed.
        Does not wait; a second call does nothing."""
        if self._late is not None and self._ends is None:
            self._late.cancel()
            self._ends = asyncio.ensure_future(self.finish(LAST_WORDS_S))
            self._loop.call_later(LAST_WORDS_S, self._kill)

    async def close(self) -> None:
        """Wait until the process has ended: LAST_WORDS_S and a moment."""
        self.end()
        if self._ends is not None:
            await asyncio.wait({self._ends})
