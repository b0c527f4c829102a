"""Arithmetic of rank reassignment. Pure.

Ranks are 0..world_size-1; `terminated` are the ranks that are gone. Each rank computes its new number from that set.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable


def shifted(rank: int, world_size: int, terminated: Collection[int]) -> int:
    """New rank of the healthy `rank` when all healthy ranks close the gaps to the left."""
    return rank - sum(map(rank.__gt__, terminated))


def filled(rank: int, world_size: int, terminated: Collection[int]) -> int:
    """New rank of the healthy `rank` when the highest ranks move into the gaps, in order.

    A rank below the new world size keeps its number.
    """
    new_world_size = world_size - len(terminated)
    if rank < new_world_size:
        return rank
    gaps = sorted(terminated)
    gaps_between = bisect_left(gaps, rank) - bisect_left(gaps, new_world_size)
    moved_before = (rank - new_world_size) - gaps_between
    return gaps[moved_before]


def to_runs(ranks: Iterable[int]) -> str:
    """Ranks as text: `to_runs({3, 4, 5, 9})` is "3-5 9"."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def from_runs(text: str) -> set[int]:
    """The ranks in a text that `to_runs` made; raises ValueError for other texts."""
    ranks: set[int] = set()
    for run in text.split():
        first, dash, last = run.partition("-")
        ranks.update(range(int(first), int(last if dash else first) + 1))
    return ranks
