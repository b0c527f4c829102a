"""The loop that every core runs in: event in, commands out, one line in the event log, next deadline."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvrx_slurm.core import record
from nvrx_slurm.core.machine import Machine, Tick
from nvrx_slurm.errors import ProtocolError

QUEUED_LINES = 10_000  # that wait for the file system
CLOSE_TIMEOUT_S = 1.0


class EventLog:
    """One JSON line per step, replayable with `nvrx replay`. A disk that is full or hangs costs the log, not the job.

    Lines are written by a thread of its own, which may hang in a file system for as long as it likes.
    """

    def __init__(self, path: Path, core: Machine, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._header = record.header_line(core)
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUED_LINES)  # None: the end
        self._writer: threading.Thread | None = None
        self._broken = False

    def step(self, event: Any, now: float, core: Machine, commands: list[Any]) -> None:
        """Append one step; before the first one goes what is needed to build the core anew. Never blocks."""
        if self._broken:
            return
        try:
            line = record.step_line(event, now, time.time(), core, commands)
            if self._writer is None:
                self._start()
            self._lines.put_nowait(line)
        except queue.Full:
            self._end(f"its file system does not take {QUEUED_LINES} lines")
        except (ProtocolError, RuntimeError) as error:  # RuntimeError: no thread can be started
            self._end(error)

    def close(self) -> None:
        """Have the last lines written and the file closed; waits CLOSE_TIMEOUT_S at most. No step follows."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            self._end(f"its file system does not take {QUEUED_LINES} lines")
            return
        writer.join(CLOSE_TIMEOUT_S)
        if writer.is_alive():
            self._end(f"its file system has not taken the last lines within {CLOSE_TIMEOUT_S:g} s")

    def _start(self) -> None:
        self._lines.put_nowait(self._header)
        writer = threading.Thread(target=self._write, name="event log", daemon=True)
        writer.start()
        self._writer = writer

    def _end(self, why: object) -> None:
        if not self._broken:
            self._broken = True
            self._say(f"the event log {self._path} ends here: {why}")

    # --- the thread -----------------------------------------------------------------------------------------

    def _write(self) -> None:
        try:
            with self._path.open("a", encoding="utf-8", buffering=1) as file:
                while not self._broken and (line := self._lines.get()) is not None:
                    file.write(line + "\n")
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be encoded
            self._end(error)


class Shell:
    """Feeds one core on the running asyncio loop; subclasses carry out the commands in `do`.

    `post` runs the core at once (or, from within a command, right after it), so an event never waits for a task switch.
    The core's deadline is a timer at exactly that time; nothing is polled.
    """

    def __init__(self, core: Machine, log: EventLog) -> None:
        self.core = core
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._events: deque[Any] = deque()
        self._draining = False
        self._timer: asyncio.TimerHandle | None = None
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self._set_timer()

    def post(self, event: Any) -> None:
        """Hand an event to the core."""
        self._events.append(event)
        if self._draining:
            return
        self._draining = True
        try:
            while self._events and not self.result.done():
                self._step(self._events.popleft())
        except Exception as error:  # a defect: end with it instead of going on half-done
            self.finish_with(error)
        finally:
            self._draining = False
        self._set_timer()

    def do(self, command: Any) -> None:
        """Carry out one command."""
        raise NotImplementedError

    def finish(self, value: Any) -> None:
        """The core is done."""
        if not self.result.done():
            self.result.set_result(value)
            self._log.close()

    def finish_with(self, error: Exception) -> None:
        """The core, or a command, broke."""
        if not self.result.done():
            self.result.set_exception(error)
            self._log.close()

    def _step(self, event: Any) -> None:
        now = self._loop.time()
        commands = self.core.step(event, now)
        self._log.step(event, now, self.core, commands)
        for command in commands:
            self.do(command)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = None if self.result.done() else self.core.deadline()
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self.post, Tick())
