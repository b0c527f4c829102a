"""Decisions about checkpoints in memory: which generation a save replaces, what is held, whether there is room.

A rank has two generations. A save never replaces the newest whole one, so a save that is cut off costs itself only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from nvrx_slurm.errors import UnknownTransition

GENERATIONS = 2  # of a rank
_MIB, _GIB = 1 << 20, 1 << 30


class MemoryState(str, Enum):
    """What one generation holds."""

    EMPTY = "empty"
    WRITING = "writing"  # its rank copies into it
    WHOLE = "whole"  # its rank has said that all is copied
    VERIFIED = "verified"  # its checksum is known


class MemoryEvent(str, Enum):
    """What happens to a generation."""

    BEGIN = "begin"  # a save into it
    COMPLETE = "complete"  # the rank says so
    CHECKED = "checked"  # the checksum was made, or fits
    DAMAGED = "damaged"  # the checksum does not fit
    ABANDON = "abandon"  # the rank has ended, or another process has its place
    OUTDATE = (
        "outdate"  # a later save has a lower iteration: the training went on from an older one
    )


_S, _E = MemoryState, MemoryEvent
_HOLDS = (_S.WHOLE, _S.VERIFIED)
_LOSE_MEMORY = (
    _E.DAMAGED,
    _E.ABANDON,
)  # it may be bad; a process that was not killed may write into it
TABLE: dict[tuple[MemoryState, MemoryEvent], MemoryState] = {
    **{(state, _E.BEGIN): _S.WRITING for state in _S},
    **{(state, _E.OUTDATE): _S.EMPTY for state in _HOLDS},
    **{(state, _E.DAMAGED): _S.EMPTY for state in _HOLDS},
    **{(state, _E.CHECKED): _S.VERIFIED for state in _HOLDS},
    (_S.WRITING, _E.COMPLETE): _S.WHOLE,
    (_S.WRITING, _E.ABANDON): _S.EMPTY,
}


@dataclass
class Generation:
    """One of the two places for a rank's state. `serial` names the save that is in it."""

    state: MemoryState = MemoryState.EMPTY
    serial: int = -1
    cycle: int = -1  # that saved it: an iteration that is done again is another save
    iteration: int = -1
    world: int = 0  # how many ranks the job had
    checksum: int = -1  # -1 = not made yet
    memory: Any = None  # where the bytes are, for the keeper; kept for the next save

    @property
    def holds(self) -> bool:
        """Whether a whole state is in it."""
        return self.state in _HOLDS

    @property
    def save(self) -> tuple[int, int]:
        """Names the save in all ranks; a higher one is newer."""
        return self.cycle, self.iteration

    def step(self, event: MemoryEvent) -> None:
        """Raises UnknownTransition without a row."""
        try:
            self.state = TABLE[self.state, event]
        except KeyError:
            raise UnknownTransition(
                f"a generation: no row for {event.value} in {self.state.value}"
            ) from None
        if event in _LOSE_MEMORY:
            self.memory = None


class RankMemory:
    """The generations of one rank. `copied`: it is a rank of another node."""

    def __init__(self) -> None:
        self.generations = [Generation() for _ in range(GENERATIONS)]
        self.copied = True  # until the rank has joined
        self.source = ""  # the keeper of that node, where it has sent something

    def begin(self, cycle: int, iteration: int, world: int, serial: int) -> Generation:
        """The generation for a new save: one without a whole state, else the older one. Serials only grow."""
        chosen = min(self.generations, key=lambda one: (one.holds, one.save))
        for one in self.generations:
            if one.state is MemoryState.WRITING:  # the save before did not end
                chosen = one
        chosen.step(MemoryEvent.BEGIN)
        chosen.serial, chosen.world, chosen.checksum = serial, world, -1
        chosen.cycle, chosen.iteration = cycle, iteration
        return chosen

    def release(self) -> Any:
        """The memory of what is replaced next, which is empty now, for a state that comes from elsewhere.

        Not while a save is being written.
        """
        chosen = min(self.generations, key=lambda one: (one.holds, one.save))
        if chosen.holds:
            chosen.step(MemoryEvent.OUTDATE)
        memory, chosen.memory = chosen.memory, None
        return memory

    @property
    def is_written(self) -> bool:
        """Whether a save is under way."""
        return any(one.state is MemoryState.WRITING for one in self.generations)

    def complete(self, serial: int, is_last: bool = True) -> bool:
        """The save is whole; False: it is not the one that is being written.

        `is_last`: what has the same or a higher iteration belongs to a training that was given up.
        """
        written = self.of(serial)
        if written is None or written.state is not MemoryState.WRITING:
            return False
        written.step(MemoryEvent.COMPLETE)
        for one in self.generations:
            outdated = one is not written and one.holds and one.iteration >= written.iteration
            if is_last and outdated:
                one.step(MemoryEvent.OUTDATE)
        return True

    def checked(self, serial: int, checksum: int) -> bool:
        """A checksum was made (< 0: it cannot be). Whether it is the same as before; what is damaged is empty then."""
        found = self.of(serial)
        if found is None or not found.holds:
            return False
        fits = checksum >= 0 and found.checksum in (-1, checksum)
        found.checksum = checksum
        found.step(MemoryEvent.CHECKED if fits else MemoryEvent.DAMAGED)
        return fits

    def abandon(self) -> None:
        """The generation that is being written, if there is one, is empty now."""
        for one in self.generations:
            if one.state is MemoryState.WRITING:
                one.step(MemoryEvent.ABANDON)

    def of(self, serial: int) -> Generation | None:
        """The generation with this save."""
        return next((one for one in self.generations if one.serial == serial), None)

    def held(self, world: int) -> list[Generation]:
        """Whole states of a job with `world` ranks, newest first."""
        found = [one for one in self.generations if one.holds and one.world == world]
        return sorted(found, key=lambda one: one.save, reverse=True)

    def find(self, world: int, save: tuple[int, int]) -> Generation | None:
        """The whole state with this save."""
        return next((one for one in self.held(world) if one.save == save), None)

    def other_worlds(self, world: int) -> list[int]:
        """Of how many ranks the other states are."""
        return sorted({one.world for one in self.generations if one.holds and one.world != world})


def newest_common(held: list[list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The saves that all ranks hold, newest first. `held`: of each rank."""
    common = set(held[0]).intersection(*held[1:])
    return sorted(common, reverse=True)


@dataclass(frozen=True)
class Room:
    """What memory there is, in bytes."""

    free: int  # that the job may use now
    of: str  # what says so
    limit: int = 0  # of checkpoints on this node; 0 = none was given
    used: int = 0  # by checkpoints


def lacks(room: Room, size: int, own: int, missing_ranks: int) -> str:
    """Why a rank's save of `size` bytes has no place, as a sentence; "" = it has.

    `own`: bytes that the rank has already. `missing_ranks`: further ranks of the node, which are taken to need as much.
    """
    needed = GENERATIONS * size * (1 + missing_ranks) - own
    total = room.used + needed
    ranks = f"{1 + missing_ranks} rank{'s' if missing_ranks else ''}"
    what = f"checkpoints of {ranks}, two generations each, need {_shown(needed)} more memory"
    if room.limit and total > room.limit:
        left = _shown(max(0, room.limit - room.used))
        return f"{what}, and --ft-checkpoint-memory leaves {left}; give {-(-total // _MIB)}M"
    if needed > room.free:
        return f"{what}, and {room.of} leaves {_shown(room.free)}; ask Slurm for more, or save less"
    return ""


def _shown(size: int) -> str:
    return f"{size / _GIB:.3g}G"  # as Slurm writes it
