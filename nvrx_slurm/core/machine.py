"""State machines as tables: one row per (state, event), and an event without a row is a defect.

A row names the method that handles it and the states it may lead to. The diagrams in `docs/` are drawn from these
rows (`nvrx_slurm.core.diagram`). A handler that leads to another state raises.

`Machine` handles its own rows. `Composed` is made of parts: each part has its own states, rows, data and deadline.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any, ClassVar

from nvrx_slurm.errors import UnknownTransition

Table = Mapping[tuple[Enum, type], "Row"]
Follows = Mapping[Enum, tuple[Enum, ...]]  # state -> the states that one event can lead to


@dataclass(frozen=True, slots=True)
class Row:
    """What one (state, event) does: method name, the other states it may lead to, and the reason in a few words."""

    do: str
    to: tuple[Enum, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """The machine's own deadline has come."""


@dataclass(frozen=True, slots=True)
class Say:
    """Command: print this sentence for people."""

    text: str


class Machine:
    """Base of the cores: `step(event, now)` looks up the row, runs it, and returns the commands it emitted.

    `now` is monotonic seconds; a core never reads a clock itself.
    """

    table: ClassVar[Table]
    commands: ClassVar[tuple[type, ...]] = ()  # each of them needs a receiver before the first step

    def __init__(self, state: Enum, now: float) -> None:
        self.state: Enum = state
        self.started = now  # monotonic seconds; the event log needs it to build the same machine again
        self._out: list[Any] = []

    def step(self, event: object, now: float) -> list[Any]:
        """Handle one event at monotonic time `now` (seconds). Raises UnknownTransition without a row."""
        before = self.state
        row = self.table.get((before, type(event)))
        if row is None:
            raise UnknownTransition(f"{type(self).__name__}: no row for {type(event).__name__} in {before.name}")
        getattr(self._handler(before, type(event)), row.do)(event, now)
        if self.state is not before and self.state not in row.to:
            raise UnknownTransition(
                f"{type(self).__name__}: {type(event).__name__} in {before.name} led to {self.state.name},"
                f" which its row does not allow"
            )
        out, self._out = self._out, []
        return out

    def deadline(self) -> float | None:
        """Monotonic time (seconds) at which the machine wants a `Tick`, or None."""
        raise NotImplementedError

    def emit(self, command: object) -> None:
        """Queue one command for the shell."""
        self._out.append(command)

    def ignore(self, event: object, now: float) -> None:
        """Handler of rows where nothing is to be done (the row says why)."""

    def _handler(self, state: Enum, event: type) -> object:
        return self


@dataclass(eq=False)
class Part:
    """One part of a `Composed` machine. Its fields, except those that are handed to all parts, are its own data."""

    states: ClassVar[tuple[Enum, ...]] = ()  # that it owns: it is told when the machine enters the first of them
    table: ClassVar[Table]  # rows that it handles, of its own states or of those of other parts
    core: Composed

    def enter(self, now: float) -> None:
        """The machine has come from a state of another part to one of this part's."""

    def deadline(self) -> float | None:
        """When this part wants a `Tick` (monotonic seconds) while the machine is in one of its states, or None."""
        return None

    def ignore(self, event: object, now: float) -> None:
        """Handler of rows where nothing is to be done (the row says why)."""


class Composed(Machine):
    """A machine made of parts. An event goes to the part that has its row; the owner of the state has the deadline."""

    parts: ClassVar[tuple[type[Part], ...]]
    through: ClassVar[Mapping[Enum, Enum]] = {}  # for the diagram: states that a step reaches through another one
    _part_of_row: ClassVar[dict[tuple[Enum, type], type[Part]]]

    def __init_subclass__(cls) -> None:
        cls._part_of_row = {key: part for part in cls.parts for key in part.table}
        cls.table = {key: row for part in cls.parts for key, row in part.table.items()}
        if len(cls.table) != sum(len(part.table) for part in cls.parts):
            raise TypeError(f"{cls.__name__}: two parts have a row for the same state and event")

    def __init__(self, state: Enum, now: float, *shared: Any) -> None:
        super().__init__(state, now)
        self._parts = {part: part(self, *shared) for part in self.parts}
        self._shared = len(shared)
        self._owner = {owned: self._parts[part] for part in self.parts for owned in part.states}

    @property
    def owner(self) -> Part:
        """The part that owns the current state."""
        return self._owner[self.state]

    def go(self, state: Enum, now: float) -> None:
        """Change the state; a part whose states are entered from another part's is told."""
        before, self.state = self.owner, state
        if self.owner is not before:
            self.owner.enter(now)

    def deadline(self) -> float | None:
        """That of the part that owns the state (monotonic seconds), or None."""
        return self.owner.deadline()

    def snapshot(self) -> dict[str, Any]:
        """The state, what it means, the next deadline, and the data of each part by its name, as JSON can hold them."""
        own = {"state": self.state.name, "means": self.state.value, "deadline": self.deadline()}
        first = 1 + self._shared
        parts = {
            type(part).__name__.lower(): {f.name: plain(getattr(part, f.name)) for f in fields(part)[first:]}
            for part in self._parts.values()
        }
        return {**own, "started": self.started, "parts": {name: data for name, data in parts.items() if data}}

    def _handler(self, state: Enum, event: type) -> object:
        return self._parts[self._part_of_row[state, event]]


def rows(follows: Follows, *groups: tuple[tuple[Enum, ...], type, Row]) -> dict[tuple[Enum, type], Row]:
    """A table from rows that hold for several states each; of the states in `to`, those that can follow each state.

    Raises TypeError for a state and event with two rows.
    """
    table: dict[tuple[Enum, type], Row] = {}
    for states, event, row in groups:
        for state in states:
            if (state, event) in table:
                raise TypeError(f"two rows for {event.__name__} in {state.name}")
            table[state, event] = replace(row, to=tuple(to for to in row.to if to in follows[state]))
    return table


def plain(value: Any) -> Any:
    """The data of a core as JSON: records and objects become dicts of their attributes, without leading underscores.

    Raises TypeError for functions and other things that are no data.
    """
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Set):
        return [plain(item) for item in sorted(value)]
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if not hasattr(value, "__dict__") or callable(value):
        raise TypeError(f"{type(value).__name__} is no data of a core")
    return {name.lstrip("_"): plain(item) for name, item in vars(value).items()}


def earliest(*times: float | None) -> float | None:
    """The smallest of the given times that are not None."""
    known = [t for t in times if t is not None]
    return min(known) if known else None
