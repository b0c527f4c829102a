"""Whether two looks at all ranks prove that none goes on, and where they are. Pure.

No step for long may be an evaluation, a checkpoint or a compilation. So a doubt is not enough to end
ranks: a rank that computes, reads or writes, or blocks in the kernel, may go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from nvrx_slurm.core.attribution.hang import Doing, doing, place
from nvrx_slurm.types import RankEvidence

_TICKS_PER_S = 100
_IDLE_TICKS, _IDLE_SHARE = 3.0, 0.01  # processor time of a process that only waits
_STOPPED = ("T", "t")
_MOST_PLACES = 8

Looks = Collection[RankEvidence]


def proven(first: Looks, second: Looks, between_s: float) -> bool:
    """Whether some rank is stopped, or the others wait for one that does nothing, or all wait and nothing moves."""
    before = {rank.rank: rank for rank in first}
    pairs = [(before.get(rank.rank), rank) for rank in second]
    known = [(one, other) for one, other in pairs if one is not None and other.state]
    if not known or len(known) < max(len(pairs), len(before)):
        return False
    if any(one.state in _STOPPED and other.state in _STOPPED for one, other in known):
        return True
    same = all(one.frames == other.frames and other.frames for one, other in known)
    own = [(one, other) for one, other in known if doing(other) is not Doing.WAITS]
    if not same or len(own) == len(known) or any(other.state == "D" for _, other in own):
        return False
    return all(does(one, other, between_s) == "sleeps" for one, other in own or known)


def does(one: RankEvidence, other: RankEvidence, between_s: float) -> str:
    """What a rank and its children have done between the two looks. `work`: see `RankEvidence`."""
    if len(one.work) < 4 or len(other.work) < 4:
        return "does something"
    ticks, moved = (other.work[number] - one.work[number + 2] for number in (0, 1))
    if abs(ticks) > _IDLE_TICKS + _IDLE_SHARE * _TICKS_PER_S * between_s:
        return "computes"
    if moved:
        return "reads or writes"
    return "is blocked in the kernel" if other.state == "D" else "sleeps"


def where(first: Looks, second: Looks, between_s: float) -> str:
    """One clause for each place: "3 ranks wait at train.py:40 in step, rank 0 computes at eval.py:9 in evaluate"."""
    before = {rank.rank: rank for rank in first}
    clauses = Counter[tuple[str, str]]()
    names = dict[tuple[str, str], int]()
    for rank in second:
        what = does(before.get(rank.rank, rank), rank, between_s)
        if doing(rank) is Doing.WAITS and rank.frames:
            what = "waits"
        key = what if rank.state else "does not answer", place(rank) or "an unknown place"
        clauses[key] += 1
        names.setdefault(key, rank.rank)
    told = [
        f"rank {names[key]} {key[0]} at {key[1]}" + (f", as {count - 1} more" if count > 1 else "")
        for key, count in clauses.most_common(_MOST_PLACES)
    ]
    return "; ".join(told)
