"""The event log of one core: one JSON line per step, written by a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvrx_slurm.core import event_log
from nvrx_slurm.core.machine import Machine
from nvrx_slurm.errors import ProtocolError
from nvrx_slurm.system import bounded, owned

QUEUED_LINES = 10_000  # most lines that wait for the file system
CLOSE_TIMEOUT_S = 1.0
_DEPTH = 4  # names below the log directory


class EventLog:
    """One JSON line per step, which `nvrx replay` can replay. A disk that is full or hangs costs the log, not the job.

    A thread writes the lines, so that a file system that hangs delays nothing. Where none can be made, lines wait.
    """

    def __init__(self, path: Path, core: Machine, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUED_LINES)  # None: the end
        self._lines.put_nowait(event_log.header_line(core))
        self._writer: threading.Thread | None = None
        self._broken = False

    def step(self, event: Any, now: float, core: Machine, commands: list[Any]) -> None:
        """Append one step; a header from which the core can be built anew goes before the first. Never blocks."""
        if self._broken:
            return
        try:
            self._lines.put_nowait(event_log.step_line(event, now, time.time(), core, commands))
            if self._writer is None:
                self._writer = bounded.begin(self._write, "event log")
        except queue.Full:
            self._end(f"its file system does not take {QUEUED_LINES} lines")
        except ProtocolError as error:
            self._end(error)

    def close(self) -> None:
        """Have the last lines written and the file closed; waits CLOSE_TIMEOUT_S at most. No step follows."""
        writer = self._writer
        self._writer = None
        if writer is None and self._lines.qsize() > 1:
            self._end("no thread can be made")
        if writer is None:
            return
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        writer.join(CLOSE_TIMEOUT_S)
        if writer.is_alive():
            self._end(f"its file system has not taken the last lines within {CLOSE_TIMEOUT_S:g} s")

    def _end(self, why: object) -> None:
        if not self._broken:
            self._broken = True
            self._say(f"the event log {self._path} ends here: {why}")

    # --- the thread -----------------------------------------------------------------------------------------

    def _write(self) -> None:
        try:
            with open(owned.append_to(self._path, _DEPTH), "a", encoding="utf-8", buffering=1) as file:
                while not self._broken and (line := self._lines.get()) is not None:
                    file.write(line + "\n")
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be encoded
            self._end(error)
