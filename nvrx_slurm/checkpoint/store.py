"""What a keeper has, by rank, and whether there is room for more. For the thread that decides."""

from __future__ import annotations

from nvrx_slurm.checkpoint.memory import Memory
from nvrx_slurm.core.checkpoint.memory import GENERATIONS, Generation, RankMemory, Room, lacks
from nvrx_slurm.records import Kept
from nvrx_slurm.system.memory import free_bytes

_MAX_RANKS = 128
_SENDING = GENERATIONS + 1  # where a send takes longer than a save


class Store:
    """`limit`: bytes, 0 = what the cgroup and the machine allow. `has_copies`: also of other nodes' ranks."""

    def __init__(self, limit: int) -> None:
        self.ranks: dict[int, RankMemory] = {}
        self.has_copies = False
        self.moving: set[Memory] = set()  # what threads allocate, send or receive
        self._limit = limit
        self._serial = 0

    def rank(self, number: int) -> RankMemory | None:
        """None: there are too many."""
        if number not in self.ranks and (number < 0 or len(self.ranks) >= _MAX_RANKS):
            return None
        return self.ranks.setdefault(number, RankMemory())

    def leave_all_but(self, owned: set[int]) -> None:
        """All ranks of the node are known: others run elsewhere by now, and may want what is here."""
        for number in self.ranks.keys() - owned:
            self.ranks[number].copied = True
            if not self.has_copies:
                del self.ranks[number]

    def lacks(self, number: int, size: int, local_world: int) -> str:
        """Why a save of `size` bytes has no place; "" = it has."""
        sizes = {other: _bytes(rank) for other, rank in self.ranks.items()}
        known = [other for other, held in sizes.items() if held and other != number]
        copies = sum(self.ranks[other].copied for other in known)
        missing = max(0, local_world - 1 - (len(known) - copies))
        if self.has_copies:
            missing += max(0, local_world - copies)
        generations = (one for rank in self.ranks.values() for one in rank.generations)
        memories = self.moving | {one.memory for one in generations if one.memory is not None}
        used = sum(memory.size for memory in memories)
        promised = sum(memory.size for memory in self.moving if not memory.is_there)
        free, of = free_bytes()
        return lacks(Room(free - promised, of, self._limit, used), size, sizes[number], missing)

    def next_serial(self) -> int:
        """Names a save."""
        self._serial += 1
        return self._serial

    def begin(self, number: int, save: tuple[int, int], world: int, size: int) -> Generation:
        """The place for a save, with memory where it has enough.

        What is being sent from there gets other memory where there is some, else it is torn.
        """
        chosen = self.ranks[number].begin(*save, world, self.next_serial())
        memory = chosen.memory
        if memory is None:
            return chosen
        third = size * _SENDING // GENERATIONS
        if memory.size < size or (memory in self.moving and not self.lacks(number, third, 1)):
            chosen.memory = None
        else:
            memory.used = size
        return chosen

    def forget(self, before: int, source: str) -> None:
        """Copies of earlier cycles whose node now sends them elsewhere."""
        for number, rank in list(self.ranks.items()):
            newest = max(one.cycle for one in rank.generations)
            if rank.copied and rank.source != source and newest < before:
                del self.ranks[number]

    def kept(self) -> tuple[Kept, ...]:
        """All whole states."""
        return tuple(
            Kept(number, one.world, *one.save)
            for number, rank in self.ranks.items()
            for one in rank.generations
            if one.holds
        )


def _bytes(rank: RankMemory) -> int:
    return sum(one.memory.size for one in rank.generations if one.memory is not None)
