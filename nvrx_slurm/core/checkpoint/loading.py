"""What ranks have found in memory, from what each of them tells: one sentence for all."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from nvrx_slurm.core.checkpoint.copies import listed

Save = tuple[int, int]  # cycle and iteration
DISK = "disk"  # where a state comes from
NOTHING = "nothing is in memory"


class Found(IntEnum):
    """A rank's part of a save; below 0: it has none that can be used."""

    MEMORY = 1
    COPY = 2  # that came from another node
    LOST = -1
    MISFIT = -2


_WRONG = {Found.LOST: "is not whole on", Found.MISFIT: "does not fit on"}


def common(held: Sequence[Sequence[Save]]) -> list[Save]:
    """The saves that all ranks hold, newest first. `held`: of each rank."""
    return sorted(set(held[0]).intersection(*held[1:]), reverse=True)


def nothing(held: Sequence[Sequence[Save]], others: Sequence[int]) -> str:
    """Why ranks have no save in common. `others`: of how many ranks a state is that a rank has; 0 = of as many."""
    if any(others):
        return f"a state in memory is of {max(others)} ranks, not of {len(others)}"
    lacking = [rank for rank, saves in enumerate(held) if not saves]
    if len(lacking) == len(held):
        return NOTHING
    if lacking:
        return f"nothing of {listed(lacking)} is in memory"
    return "no iteration is in memory for all ranks"


def outcome(iteration: int, parts: Sequence[int]) -> str:
    """What happens to this iteration."""
    said = []
    for part, what in _WRONG.items():
        ranks = [rank for rank, found in enumerate(parts) if found == part]
        if ranks:
            said.append(f"{what} {listed(ranks)}")
    if said:
        return f"iteration {iteration} {' and '.join(said)}"
    copies = [rank for rank, found in enumerate(parts) if found == Found.COPY]
    some = f", with copies from other nodes for {listed(copies)}" if copies else ""
    return f"iteration {iteration} is loaded from memory{some}"


def source(parts: Sequence[int]) -> str:
    """Where the state of the job comes from."""
    if not parts or min(parts) < 0:
        return DISK
    return "peer" if Found.COPY in parts else "memory"
