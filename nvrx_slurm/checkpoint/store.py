"""What a keeper has, by rank, and whether there is room for more. For the thread that decides."""

from __future__ import annotations

from nvrx_slurm.checkpoint.memory import Memory
from nvrx_slurm.core.checkpoint.memory import RankMemory, Room, lacks
from nvrx_slurm.records import Kept
from nvrx_slurm.system.memory import free_bytes

_MAX_RANKS = 128


class Store:
    """`limit`: bytes, 0 = what the cgroup and the machine allow. `has_copies`: also of other nodes' ranks."""

    def __init__(self, limit: int) -> None:
        self.ranks: dict[int, RankMemory] = {}
        self.has_copies = False
        self.moving: set[Memory] = set()  # what threads allocate, send or receive
        self._limit = limit

    def rank(self, number: int) -> RankMemory | None:
        """None: there are too many."""
        is_full = len(self.ranks) >= _MAX_RANKS
        if number not in self.ranks and (number < 0 or is_full):
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
            memories.update(rank.memories)
        return sum(memory.size for memory in memories)

    def place(self, number: int, size: int, may_tear: bool) -> Memory | None:
        """Memory for one more state of a rank, which has `size` bytes; None: it has to be made.

        `may_tear`: what is being sent from there is torn where there is no other memory.
        """
        given_up = self.ranks[number].make_place()
        memory: Memory | None = None
        if given_up is not None:
            memory = given_up.memory
        if given_up is None or memory is None or memory.size < size:
            return None
        if memory in self.moving:
            is_last = self.lacks(number, size, local_world=0)
            if not may_tear or not is_last:
                return None
        given_up.memory = None
        return memory

    def forget(self, before: int, source: str) -> None:
        """Copies of earlier cycles whose node now sends them elsewhere."""
        for number, rank in list(self.ranks.items()):
            is_old = all(one.cycle < before for one in rank.held)
            is_elsewhere = rank.copied and rank.source != source
            if is_elsewhere and is_old:
                del self.ranks[number]

    def kept(self) -> tuple[Kept, ...]:
        """All whole states."""
        found = []
        for number, rank in self.ranks.items():
            for one in rank.held:
                kept = Kept(number, one.world, *one.save)
                found.append(kept)
        return tuple(found)


def _bytes(rank: RankMemory) -> int:
    return sum(memory.size for memory in rank.memories)
