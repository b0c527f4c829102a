"""Decisions about checkpoints in memory: which state a save replaces, what is held, whether there is room.

A rank has two states. A save never replaces the newest whole one, so a save that is cut off costs itself only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GENERATIONS = 2  # of a rank
_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(eq=False)
class Generation:
    """A state of a rank."""

    cycle: int  # that saved it: an iteration that is done again is another save
    iteration: int
    world: int  # how many ranks the job had
    memory: Any = None  # where the bytes are, for the keeper
    checksum: int = -1  # -1 = not known yet
    is_copy: bool = False  # it came from another node

    @property
    def save(self) -> tuple[int, int]:
        """Names the save in all ranks; a higher one is newer."""
        return self.cycle, self.iteration


class RankMemory:
    """The states of one rank. `held`: whole ones, newest first; `writing`: the rank copies into it, or None.

    `spare`: one that was given up, whose memory the next one may have. `copied`: it is a rank of another node.
    """

    def __init__(self) -> None:
        self.held: list[Generation] = []
        self.writing: Generation | None = None
        self.spare: Generation | None = None
        self.copied = True  # until the rank has joined
        self.source = ""  # the keeper of that node, where it has sent something

    @property
    def memories(self) -> list[Any]:
        """All that the rank has."""
        every = (*self.held, self.writing, self.spare)
        return [one.memory for one in every if one is not None and one.memory is not None]

    def make_place(self) -> Generation | None:
        """For one more state. Returns one whose memory may be used, if there is one; it is no spare any more."""
        if self.writing is not None:  # it did not end
            self.spare, self.writing = self.writing, None
        elif len(self.held) == GENERATIONS:
            self.spare = self.held.pop()
        spare, self.spare = self.spare, None
        return spare

    def complete(self, one: Generation, is_last: bool = True) -> None:
        """It is whole. `is_last`: what has the same or a higher iteration is of a training that was given up."""
        if one is self.writing:
            self.writing = None
        older = []
        for other in self.held:
            if is_last and other.iteration >= one.iteration:
                self.spare = other
            else:
                older.append(other)
        newest_first = sorted([one, *older], key=lambda each: each.save, reverse=True)
        self.held = newest_first[:GENERATIONS]

    def checked(self, one: Generation, checksum: int) -> bool:
        """Whether a new checksum (< 0: none can be made) equals the one before. A damaged state is dropped."""
        if one not in self.held:
            return False
        fits = checksum >= 0 and one.checksum in (-1, checksum)
        one.checksum = checksum
        if not fits:
            self.held.remove(one)
        return fits

    def find(self, world: int, save: tuple[int, int]) -> Generation | None:
        """The whole state of a job with `world` ranks and this save."""
        return next((one for one in self.held if (one.world, one.save) == (world, save)), None)


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
