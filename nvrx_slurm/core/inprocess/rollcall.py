"""What all ranks of one iteration said at its barrier, and what follows from it for the next one.

A rank is called here by the rank it had at the start (its initial rank), because that never changes. What the dead had
been assigned is found by elimination: the ranks of the iteration that nobody alive has. So a rank may die at any
moment, even before anybody could learn the rank it had just been given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from nvrx_slurm.core.inprocess.ranks import from_runs, to_runs

_FIELDS = 5


class Stand(Enum):
    """What a rank says at the barrier."""

    READY = "r"  # for another iteration
    UNASSIGNED = "u"  # ready too, but ranks could not be assigned in this one
    FINISHED = "x"  # the function has returned everywhere
    TERMINATED = "t"  # gone


@dataclass(frozen=True, slots=True)
class Word:
    """One rank's word: its place in this iteration, and in the one before (None: as in this one)."""

    stand: Stand
    rank: int = -1
    world_size: int = -1
    rank_before: int = -1
    world_size_before: int = -1

    def __str__(self) -> str:
        numbers = (self.rank, self.world_size, self.rank_before, self.world_size_before)
        return " ".join([self.stand.value, *map(str, numbers)]) if self.stand is not Stand.TERMINATED else "t"

    @classmethod
    def parse(cls, text: str) -> Word:
        """What `str` made; raises ValueError for anything else."""
        if text == Stand.TERMINATED.value:
            return cls(Stand.TERMINATED)
        stand, *numbers = text.split(" ")
        if len(numbers) != _FIELDS - 1:
            raise ValueError(f"not a word of a rank: {text[:80]!r}")
        return cls(Stand(stand), *map(int, numbers))


class Outcome(Enum):
    """What comes after the barrier."""

    NEXT = "n"  # another iteration
    FINISHED = "x"  # all return
    EMPTY = "e"  # nobody is left
    REFUSED = "!"  # nobody may begin: `why` says it


@dataclass(frozen=True, slots=True)
class Verdict:
    """The same for all ranks. `terminated` are ranks of the iteration (or of the one before it, if `again`); `gone`
    initial ranks that have left since the start; `why` what interrupted the iteration first."""

    outcome: Outcome
    terminated: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    again: bool = False
    why: str = ""

    def to_text(self) -> str:
        """For the store: about 60 bytes and the reason, ranks as runs."""
        head = f"{self.outcome.value}{int(self.again)}"
        return "\n".join([head, to_runs(self.terminated), to_runs(self.gone), self.why])

    @classmethod
    def from_text(cls, text: str) -> Verdict:
        """What `to_text` made; raises ValueError for anything else."""
        head, terminated, gone, why = text.split("\n", 3)
        return cls(
            Outcome(head[:1]), frozenset(from_runs(terminated)), frozenset(from_runs(gone)), head[1:] == "1", why
        )


def call_roll(words: Mapping[int, Word], gone: Iterable[int], why: str = "") -> Verdict:
    """Verdict from the words of all members, by initial rank; `gone` are those that were no members any more.

    If one could not be assigned, the ranks of the iteration before hold again for all. Refuses if the ranks alive do
    not agree on the world size (they were started differently).
    """
    alive = {initial: word for initial, word in words.items() if word.stand is not Stand.TERMINATED}
    left = frozenset(gone) | (words.keys() - alive.keys())
    if not alive:
        return Verdict(Outcome.EMPTY, gone=left, why=why)
    again = any(word.stand is Stand.UNASSIGNED for word in alive.values())
    places = {(w.rank_before, w.world_size_before) if again else (w.rank, w.world_size) for w in alive.values()}
    sizes = {size for _, size in places}
    if len(sizes) != 1 or len(places) != len(alive):
        return Verdict(Outcome.REFUSED, gone=left, why=_disagreement(sizes, alive))
    terminated = frozenset(range(sizes.pop())) - {rank for rank, _ in places}
    finished = any(word.stand is Stand.FINISHED for word in alive.values())
    return Verdict(Outcome.FINISHED if finished else Outcome.NEXT, terminated, left, again, why)


def _disagreement(sizes: set[int], alive: Mapping[int, Word]) -> str:
    if len(sizes) > 1:
        by_size = {size: to_runs(i for i, w in alive.items() if w.world_size == size) for size in sorted(sizes)}
        said = "; ".join(f"ranks {ranks}: {size}" for size, ranks in list(by_size.items())[:4])
        return f"ranks do not agree on the world size ({said}): rank assignment must give the same result everywhere"
    return "two ranks were assigned the same rank: rank assignment must give the same result everywhere"
