"""State of this rank in the current iteration of the wrapper."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from nvrx_slurm.errors import UsageError
from nvrx_slurm.inprocess.checks import variable


class Mode(Enum):
    """The part of this rank in the current iteration."""

    INITIALIZED = auto()  # rank assignment has not decided yet
    ACTIVE = auto()  # calls the wrapped function
    INACTIVE = auto()  # healthy, waits as a spare
    TERMINATED = auto()  # leaves, or has left


@dataclass
class State:
    """The rank's own view. Rank assignments get this and may change it; all other plug-ins get a `FrozenState`.

    `rank` (0 <= rank < `world_size`) counts all healthy ranks. `active_rank` (0 <= active_rank < `active_world_size`)
    counts the ranks that call the wrapped function, and is None on all others. The `initial_` pair never changes.
    `fn_exception`: the exception of the wrapped function on this rank in this iteration.
    """

    rank: int
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None

    def __post_init__(self) -> None:
        if self.initial_rank is None:
            self.initial_rank = self.rank
        if self.initial_world_size is None:
            self.initial_world_size = self.world_size

    @classmethod
    def from_env(cls) -> State:
        """From RANK and WORLD_SIZE; raises UsageError if one is missing or they make no sense together."""
        rank, world_size = _number("RANK"), _number("WORLD_SIZE")
        if not 0 <= rank < world_size:
            raise UsageError(f"RANK={rank} is not within 0..WORLD_SIZE-1 (WORLD_SIZE={world_size})")
        return cls(rank=rank, world_size=world_size)

    def set_distributed_vars(self) -> None:
        """Set RANK and WORLD_SIZE, which `init_process_group` reads.

        An active rank gets its active pair; any other gets `rank` and `world_size`, which are never None.
        """
        active = self.active_rank is not None and self.active_world_size is not None
        os.environ["RANK"] = str(self.active_rank if active else self.rank)
        os.environ["WORLD_SIZE"] = str(self.active_world_size if active else self.world_size)

    def advance(self) -> None:
        """Begin the next iteration. Ranks and mode stay as they are until they are assigned."""
        self.iteration += 1
        self.fn_exception = None

    def freeze(self) -> FrozenState:
        """A copy that cannot be changed."""
        return FrozenState(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        )

    def copy_from(self, other: State | FrozenState, fields: Iterable[str] | None = None) -> None:
        """Copy the fields with these names (None: all) from `other`; raises AttributeError for an unknown name."""
        for name in (
            [field.name for field in dataclasses.fields(self)] if fields is None else fields
        ):
            setattr(self, name, getattr(other, name))


@dataclass(frozen=True)
class FrozenState:
    """`State` for reading."""

    rank: int
    world_size: int
    active_rank: int | None = None
    active_world_size: int | None = None
    initial_rank: int | None = None
    initial_world_size: int | None = None
    iteration: int = 0
    mode: Mode = Mode.INITIALIZED
    fn_exception: Exception | None = None


def _number(name: str) -> int:
    text = variable(name)
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number") from None
