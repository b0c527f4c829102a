"""State machines as tables: one row per (state, event), and an event without a row is a defect.

A row names the method that handles it and the states to which it may lead. A handler puts commands into the outbox
and returns the next state, or None to stay. The machine applies one transition at a time. What follows from one is
posted as an inner event; the machine handles it after the handler has returned, in the same step.
The diagrams in `docs/` are drawn from these rows (`scripts/lib/diagram.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, ClassVar

from nvrx_slurm.declared import Record
from nvrx_slurm.errors import UnknownTransition

Table = Mapping[tuple[Enum, type], "Row"]
Handler = Callable[[Any, float], Enum | None]
Group = tuple[Enum | tuple[Enum, ...], type | tuple[type, ...], str, tuple[Enum, ...], str]
MOST_TARGETS = 4  # states that a row may name


class Row(Record):
    """What one (state, event) does: method name, the other states it may lead to, and the reason in a few words."""

    do: str
    to: tuple[Enum, ...]
    why: str = ""


class Tick(Record):
    """The machine's own deadline has come."""


class Entered(Record):
    """Inner event: the state has changed. It needs a row only where a state begins with something to do."""

    was: Enum


class Say(Record):
    """Command: print this sentence for people."""

    text: str


class Outbox(list[Any]):
    """The commands of the present step. `posted`: inner events, handled in this order after the present handler."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[Any] = []

    def post(self, *events: Any) -> None:
        """Handle these after the present handler."""
        self.posted += events

    def take_posted(self) -> list[Any]:
        """The inner events that wait."""
        posted = self.posted
        self.posted = []
        return posted


class Machine:
    """Base of the cores: `step(event, now)` looks up the row, runs it, and returns the commands of the step.

    `now` is monotonic seconds; a core never reads a clock itself.
    """

    # its attributes that are the arguments of its class, before `now`
    made_of: ClassVar[tuple[str, ...]] = ()
    table: ClassVar[Table] = {}  # a subclass names its own rows; those of its parts are added
    homes: ClassVar[Mapping[tuple[Enum, type], type]]  # which class has the method of a row
    commands: ClassVar[tuple[type, ...]] = ()  # each of them needs a receiver before the first step
    last: ClassVar[Enum | None] = None  # in this state nothing is handled any more
    # of these events the table knows the type of their `message`
    envelope: ClassVar[tuple[type, ...]] = ()
    parts: ClassVar[tuple[type, ...]] = ()  # classes with further rows

    def __init_subclass__(cls) -> None:
        table: dict[tuple[Enum, type], Row] = {}
        homes: dict[tuple[Enum, type], type] = {}
        for home in (cls, *cls.parts):
            for key, row in home.__dict__.get("table", {}).items():
                if key in homes:
                    raise TypeError(f"{cls.__name__} has two rows for one state and event")
                table[key] = row
                homes[key] = home
        cls.table = table
        cls.homes = homes

    def __init__(self, state: Enum, now: float) -> None:
        self.state: Enum = state
        # monotonic seconds; the event log needs it to build the same machine again
        self.started = now
        self.out = Outbox()
        self.number = 0  # of the last event that was handled; inner events count
        # the events of the last step, the inner ones in their order, each with how many commands it has caused
        self.chain: list[tuple[str, int]] = []
        # told of each event, once it is handled
        self.follower: Callable[[Enum, Any, float], None] | None = None
        self._handlers: dict[tuple[Enum, type], Handler] = {}
        if not self.parts:
            self.bind()

    def follow(self, follower: Callable[[Enum, Any, float], None]) -> None:
        """Tell `follower` of each event, once it is handled."""
        self.follower = follower

    def bind(self, *parts: object) -> None:
        """The methods of the rows are those of the machine and of these parts."""
        owners = {type(part): part for part in (self, *parts)}
        for key, row in self.table.items():
            if row.do != "ignore":
                owner = owners[self.homes[key]]
                self._handlers[key] = getattr(owner, row.do)

    def step(self, event: object, now: float) -> list[Any]:
        """Handle one event at monotonic time `now` (seconds). Raises UnknownTransition without a row."""
        waiting = deque([event])
        self.chain.clear()
        while waiting:
            state = self.state
            event = waiting.popleft()
            before = len(self.out)
            posted = self._transit(event, now)
            self.number += 1
            self.chain.append((type(event).__name__, len(self.out) - before))
            if self.follower is not None:
                self.follower(state, event, now)
            if self.state is self.last:
                break
            waiting.extendleft(reversed(posted))
        commands = list(self.out)
        self.out.clear()
        return commands

    def _transit(self, event: Any, now: float) -> list[Any]:
        """One row; returns the inner events that follow, in order."""
        state = self.state
        kind = type(event.message if type(event) in self.envelope else event)
        row = self.table.get((state, kind))
        if row is None and kind is Entered:
            return []
        if row is None:
            raise self._unknown(f"no row for {kind.__name__} in {state.name}")
        to = self._handlers[state, kind](event, now) if row.do != "ignore" else None
        posted = self.out.take_posted()
        if to is None or to is state:
            return posted
        if to not in row.to:
            told = f"{kind.__name__} in {state.name} led to {to.name}"
            raise self._unknown(f"{told}, which its row does not allow")
        self.state = to
        return [Entered(state), *posted]

    def _unknown(self, what: str) -> UnknownTransition:
        return UnknownTransition(f"{type(self).__name__}: {what}")

    def deadline(self) -> float | None:
        """Monotonic time (seconds) at which the machine wants a `Tick`, or None."""
        raise NotImplementedError

    def validate(self) -> None:
        """Raise AssertionError where the machine contradicts itself. Tests and the simulation ask after each step."""
        assert not self.out and not self.out.posted, "a command or an inner event was left"

    def emit(self, command: object) -> None:
        """One command for the shell."""
        self.out.append(command)


def rows(*groups: Group) -> dict[tuple[Enum, type], Row]:
    """A table from groups of equal rows: states, events, method, states that it may lead to, and why.

    "ignore" as the method: there is nothing to do. Raises TypeError for a state and event with two rows, and for a
    row with too many targets.
    """
    table: dict[tuple[Enum, type], Row] = {}
    for states, events, do, to, why in groups:
        for state in states if isinstance(states, tuple) else (states,):
            for event in events if isinstance(events, tuple) else (events,):
                if (state, event) in table:
                    raise TypeError(f"two rows for {event.__name__} in {state.name}")
                targets = tuple(target for target in to if target is not state)
                if len(targets) > MOST_TARGETS:
                    what = f"the row for {event.__name__} in {state.name}"
                    raise TypeError(f"{what} has {len(targets)} targets")
                table[state, event] = Row(do, targets, why)
    return table


def earliest(*times: float | None) -> float | None:
    """The smallest of the given times that are not None."""
    known = [t for t in times if t is not None]
    return min(known) if known else None
