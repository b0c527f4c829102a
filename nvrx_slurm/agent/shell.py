"""The loop that every core runs in: event in, commands out, one line in the event log, next deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from nvrx_slurm.agent.event_log import EventLog
from nvrx_slurm.core.machine import Machine, Tick


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
