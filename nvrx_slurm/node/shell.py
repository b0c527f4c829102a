"""The loop that every core runs in: event in, commands out, one line in the event log, next deadline."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from nvrx_slurm.core.machine import Machine, Say, Tick
from nvrx_slurm.node.roles import Role


class Log(Protocol):
    """Gets every step; `event_log.EventLog` is one."""

    def step(self, event: Any, now: float, core: Machine, commands: list[Any]) -> None:
        """One step."""

    def close(self) -> None:
        """No step follows."""


class Shell:
    """Feeds one core on the running asyncio loop and hands each command to the receiver of its type.

    `post` runs the core at once (or, from within a command, right after it), so an event never waits for a task switch.
    The core's deadline is a timer at exactly that time; nothing is polled.

    Events wait until `begin`. Therefore no command can be carried out before its receiver exists.
    """

    def __init__(self, core: Machine, log: Log, end: type, say: Callable[[str], None]) -> None:
        """`end`: the command that ends the core; it becomes `result`."""
        self.core = core
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._events: deque[Any] = deque()
        self._waits = True  # for begin(), or for the step under way
        self._timer: asyncio.TimerHandle | None = None
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self._receivers: dict[type, list[Callable[[Any], None]]] = {}
        self.on(end, self.finish)
        self.on(Say, lambda command: say(command.text))

    def on(self, command: type, receiver: Callable[[Any], None]) -> None:
        """Have `receiver` called with each command of this type."""
        self._receivers.setdefault(command, []).append(receiver)

    def add(self, role: Role) -> None:
        """Have `role` handle the commands that it names. A role can be added at any time."""
        for command in role.commands:
            self.on(command, role.handle)

    def begin(self) -> None:
        """Process the events posted until now, and from now on each one at once.

        Raises TypeError if a command of the core has no receiver.
        """
        if missing := [command.__name__ for command in self.core.commands if command not in self._receivers]:
            raise TypeError(f"{type(self.core).__name__}: no role handles {', '.join(missing)}")
        self._waits = False
        self._process()

    def post(self, event: Any) -> None:
        """Hand an event to the core."""
        self._events.append(event)
        if not self._waits:
            self._process()

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

    def retire(self) -> None:
        """The core decides nothing more, and has no result."""
        if self.result.cancel():
            self._log.close()

    def _process(self) -> None:
        self._waits = True
        try:
            while self._events and not self.result.done():
                self._step(self._events.popleft())
        except Exception as error:  # a defect: end with it instead of going on half-done
            self.finish_with(error)
        finally:
            self._waits = False
        self._set_timer()

    def _step(self, event: Any) -> None:
        now = self._loop.time()
        commands = self.core.step(event, now)
        self._log.step(event, now, self.core, commands)
        for command in commands:
            for receiver in self._receivers[type(command)]:
                receiver(command)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = None if self.result.done() else self.core.deadline()
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self.post, Tick())
