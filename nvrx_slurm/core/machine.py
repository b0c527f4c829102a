"""State machines as tables: one row per (state, event), and an event without a row is a defect.

A row names the method that handles it and the states it may lead to, so the diagrams in `docs/` are drawn from
what runs (`nvrx_slurm.core.diagram`), and a handler that wanders off its row is caught in the first test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from nvrx_slurm.errors import UnknownTransition


@dataclass(frozen=True, slots=True)
class Row:
    """What one (state, event) does: method name, the states it may lead to, and the reason in a few words."""

    do: str
    to: tuple[Enum, ...]
    why: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """The machine's own deadline has come."""


@dataclass(frozen=True, slots=True)
class Say:
    """Command: tell people this sentence."""

    text: str


class Machine:
    """Base of the cores: `step(event, now)` looks up the row, runs it, and returns the commands it emitted.

    `now` is monotonic seconds; a core never reads a clock itself.
    """

    table: ClassVar[Mapping[tuple[Enum, type], Row]]
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
        getattr(self, row.do)(event, now)
        if self.state not in row.to:
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


def earliest(*times: float | None) -> float | None:
    """The smallest of the given times that are not None."""
    known = [t for t in times if t is not None]
    return min(known) if known else None
