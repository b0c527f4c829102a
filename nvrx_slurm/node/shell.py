"""The loop that every core runs in: event in, commands out, one line in the event log, next deadline.

A role carries out commands of a core and posts events to it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from nvrx_slurm.codec import fitted
from nvrx_slurm.core.machine import Machine, Say, Tick
from nvrx_slurm.node.event_file import EventLog

Post = Callable[[Any], None]  # hands one event to a core, see `Shell.post`


class NodeRole(Protocol):
    """One job of the program.

    A role may post events as soon as it is started. Commands come only after all roles have been started.
    """

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """What carries out each type of command; none of these blocks."""

    async def start(self) -> None:
        """Begin. Raises NvrxError where the node cannot take part."""

    async def close(self) -> None:
        """End, and reap all child processes. Bounded, never raises; a second call does nothing."""


class Shell:
    """Feeds one core on the running asyncio loop and hands each command to the receiver of its type.

    `post` runs the core at once (or, from within a command, right after it), so an event never waits for a task switch.
    The core's deadline is a timer at exactly that time; nothing is polled.

    Events wait until `begin`. Therefore no command can be carried out before its receiver exists.
    """

    def __init__(self, core: Machine, log: EventLog, end: type, say: Callable[[str], None]) -> None:
        """`end`: the command that ends the core; it becomes `result`."""
        self.core = core
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._events: deque[Any] = deque()
        self._waits = True  # for begin(), or for the step under way
        self._timer: asyncio.TimerHandle | None = None
        self.result: asyncio.Future[Any] = self._loop.create_future()
        self.after_steps: Callable[[], None] = lambda: None  # called after one or more steps
        self._receivers: dict[type, list[Callable[[Any], None]]] = {}
        self.on(end, self.finish)
        self.on(Say, lambda command: say(command.text))

    def on(self, command: type, receiver: Callable[[Any], None]) -> None:
        """Have `receiver` called with each command of this type."""
        self._receivers.setdefault(command, []).append(receiver)

    def add(self, role: NodeRole) -> None:
        """Have `role` handle its commands. A role can be added at any time."""
        for command, handler in role.handlers().items():
            self.on(command, handler)

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

    def finish_with(self, error: BaseException) -> None:
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
            self.after_steps()
        except Exception as error:  # a defect: end with it instead of going on half-done
            self.finish_with(error)
        finally:
            self._waits = False
        self._set_timer()

    def _step(self, event: Any) -> None:
        event, now = fitted(event), self._loop.time()
        commands = self.core.step(event, now)
        self._log.step(event, now, self.core, commands)
        for command in commands:
            for receiver in () if self.result.cancelled() else self._receivers[type(command)]:
                receiver(command)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = None if self.result.done() else self.core.deadline()
        if deadline is not None:
            self._timer = self._loop.call_at(deadline, self.post, Tick())
