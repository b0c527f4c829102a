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
        """Why a save of `size` bytes has no place; "" = it has. `local_world`: 0 for a copy."""
        own = copies = 0  # other ranks that have their memory
        for other, rank in self.ranks.items():
            if other == number or not _bytes(rank):
                continue
            if rank.copied:
                copies += 1
            else:
                own += 1
        missing = max(0, local_world - 1 - own)
        if self.has_copies:
            missing += max(0, local_world - copies)
        free, of = free_bytes()
        promised = sum(memory.size for memory in self.moving if not memory.is_there)
        room = Room(free - promised, of, self._limit, self._used())
        return lacks(room, size, _bytes(self.ranks[number]), missing)

    def _used(self) -> int:
        memories = set(self.moving)
        for rank in self.ranks.values():
            for one in rank.generations:
                if one.memory is not None:
                    memories.add(one.memory)
        return sum(memory.size for memory in memories)

    def next_serial(self) -> int:
        """Names a save."""
        self._serial += 1
        return self._serial

    def begin(self, number: int, save: tuple[int, int], world: int, size: int) -> Generation:
        """The place for a save, with memory where it has enough.

        What is being sent from there gets other memory where there is some, else it is torn.
        """
        rank = self.ranks[number]
        chosen = rank.begin(*save, world, self.next_serial())
        memory = chosen.memory
        if memory is None:
            return chosen
        third = size * _SENDING // GENERATIONS
        is_small = memory.size < size
        is_sent = memory in self.moving
        if is_small or (is_sent and not self.lacks(number, third, local_world=0)):
            chosen.memory = None
        else:
            memory.used = size
        return chosen

    def forget(self, before: int, source: str) -> None:
        """Copies of earlier cycles whose node now sends them elsewhere."""
        for number, rank in list(self.ranks.items()):
            newest = max(one.cycle for one in rank.generations)
            is_old = newest < before
            if rank.copied and rank.source != source and is_old:
                del self.ranks[number]

    def kept(self) -> tuple[Kept, ...]:
        """All whole states."""
        found = []
        for number, rank in self.ranks.items():
            for one in rank.generations:
                if one.holds:
                    found.append(Kept(number, one.world, *one.save))
        return tuple(found)


def _bytes(rank: RankMemory) -> int:
    return sum(one.memory.size for one in rank.generations if one.memory is not None)
