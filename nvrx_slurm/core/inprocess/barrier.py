"""What the ranks of one iteration reported at its barrier, and the result for the next iteration.

Ranks are named here by their rank at the start of the call (the initial rank), which never changes. The ranks that the
dead ones had been assigned are found by elimination: they are the ranks of the iteration that no living process has.
So a rank may die at any moment, even before another process could learn the rank that it had just been assigned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

from nvrx_slurm.core.inprocess.renumbering import from_runs, to_runs
from nvrx_slurm.declared import Record


class Status(Enum):
    """What a rank reports at the barrier."""

    READY = "r"  # for another iteration
    FINISHED = "x"  # the function has returned everywhere
    TERMINATED = "t"  # the rank has left or is dead: the mark of a rank that is gone


class Arrival(Record):
    """One rank's entry at the barrier, with its rank and world size."""

    status: Status
    rank: int = -1
    world_size: int = -1

    def __str__(self) -> str:
        return f"{self.status.value} {self.rank} {self.world_size}"

    @classmethod
    def parse(cls, text: str) -> Arrival:
        """The inverse of `str`."""
        status, *numbers = text.split(" ")
        return cls(Status(status), *map(int, numbers))


class Outcome(Enum):
    """What comes after the barrier."""

    NEXT = "n"  # another iteration
    FINISHED = "x"  # all ranks return
    EMPTY = "e"  # no rank is left
    REFUSED = "!"  # no rank may begin: see `why`


class BarrierResult(Record):
    """The result of a barrier, the same for all ranks.

    `terminated`: ranks of the iteration. `gone`: initial ranks that have left since the start. `why`: what interrupted
    the iteration first.
    """

    outcome: Outcome
    terminated: frozenset[int] = frozenset()
    gone: frozenset[int] = frozenset()
    why: str = ""

    def to_text(self) -> str:
        """Return text for the store: about 60 bytes and the reason, ranks as runs."""
        return "\n".join(
            [self.outcome.value, to_runs(self.terminated), to_runs(self.gone), self.why]
        )

    @classmethod
    def from_text(cls, text: str) -> BarrierResult:
        """The inverse of `to_text`."""
        outcome, terminated, gone, why = text.split("\n", 3)
        return cls(
            Outcome(outcome), frozenset(from_runs(terminated)), frozenset(from_runs(gone)), why
        )


def barrier_result(
    arrivals: Mapping[int, Arrival], gone: Iterable[int], why: str = ""
) -> BarrierResult:
    """Result from the arrivals of all members, by initial rank; `gone` are initial ranks that were no members.

    The result is REFUSED if the living ranks do not agree on the world size (they were started differently).
    """
    alive = {
        initial: one for initial, one in arrivals.items() if one.status is not Status.TERMINATED
    }
    left = frozenset(gone) | (arrivals.keys() - alive.keys())
    if not alive:
        return BarrierResult(Outcome.EMPTY, gone=left, why=why)
    places = {(one.rank, one.world_size) for one in alive.values()}
    sizes = {size for _, size in places}
    if len(sizes) != 1 or len(places) != len(alive):
        what = f"the world size ({sorted(sizes)[:4]})" if len(sizes) > 1 else "their ranks"
        why = f"ranks do not agree on {what}: rank assignment must give the same result everywhere"
        return BarrierResult(Outcome.REFUSED, gone=left, why=why)
    terminated = frozenset(range(sizes.pop())) - {rank for rank, _ in places}
    finished = any(one.status is Status.FINISHED for one in alive.values())
    return BarrierResult(Outcome.FINISHED if finished else Outcome.NEXT, terminated, left, why)
