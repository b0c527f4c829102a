"""State machines as tables: one row per (state, event), and an event without a row is a defect.

A row names the method that handles it and the states it may lead to. The diagrams in `docs/` are drawn from these
rows (`scripts/lib/diagram.py`). A handler that leads to another state raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from nvrx_slurm.errors import UnknownTransition

Table = Mapping[tuple[Enum, type], "Row"]
Follows = Mapping[Enum, tuple[Enum, ...]]  # state -> the states that one event can lead to
Group = tuple[Enum | tuple[Enum, ...], type | tuple[type, ...], str, tuple[Enum, ...], str]


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
    through: ClassVar[Mapping[Enum, Enum]] = {}  # for the diagram: states that a step reaches through another one

    def __init__(self, state: Enum, now: float) -> None:
        self.state: Enum = state
        self.started = now  # monotonic seconds; the event log needs it to build the same machine again
        self._out: list[Any] = []

    def step(self, event: object, now: float) -> list[Any]:
        """Handle one event at monotonic time `now` (seconds). Raises UnknownTransition without a row."""
        before, kind = self.state, self.kind(event)
        row = self.table.get((before, kind))
        if row is None:
            raise UnknownTransition(f"{type(self).__name__}: no row for {kind.__name__} in {before.name}")
        getattr(self._handler(before, kind), row.do)(event, now)
        if self.state is not before and self.state not in row.to:
            told = f"{type(self).__name__}: {kind.__name__} in {before.name}"
            raise UnknownTransition(f"{told} led to {self.state.name}, which its row does not allow")
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

    def kind(self, event: object) -> type:
        """The type by which the table knows an event."""
        return type(event)

    def _handler(self, state: Enum, kind: type) -> object:
        return self


def rows(*groups: Group, follows: Follows | None = None) -> dict[tuple[Enum, type], Row]:
    """A table from groups of equal rows: states, events, method, states that it may lead to, and why.

    With `follows` a row may lead only to those of its states that can follow its own. Raises TypeError for a state and
    event with two rows.
    """
    table: dict[tuple[Enum, type], Row] = {}
    for states, events, do, to, why in groups:
        for state in states if isinstance(states, tuple) else (states,):
            after = to if follows is None else tuple(target for target in to if target in follows[state])
            for event in events if isinstance(events, tuple) else (events,):
                if (state, event) in table:
                    raise TypeError(f"two rows for {event.__name__} in {state.name}")
                table[state, event] = Row(do, after, why)
    return table


def earliest(*times: float | None) -> float | None:
    """The smallest of the given times that are not None."""
    known = [t for t in times if t is not None]
    return min(known) if known else None
