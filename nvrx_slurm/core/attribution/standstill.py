"""Whether two looks at all ranks prove that none goes on, and where they are. Pure.

No step for long may be an evaluation, a checkpoint or a compilation. So a doubt is not enough to end
ranks: a rank that computes, reads or writes, or blocks in the kernel, may go on.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nvrx_slurm.core.attribution.hang import Doing, doing, place
from nvrx_slurm.types import RankEvidence

_TICKS_PER_S = 100
_IDLE_TICKS = 3.0  # processor time of a process that only waits
_IDLE_SHARE = 0.01
_IDLE_TRAFFIC = (
    2048.0  # bytes per second: watchdogs ask the store each second whether the job goes on
)
_READING = 3  # numbers, at the begin and at the end of each look
_STOPPED = ("T", "t")
SLEEPS = "sleeps"
_MOST_PLACES = 8

Looks = Collection[RankEvidence]
Pair = tuple[RankEvidence, RankEvidence]  # a rank in both


def proven(first: Looks, second: Looks, between_s: float) -> bool:
    """Whether some rank is stopped, or the others wait for one that does nothing, or all wait and
    nothing moves."""
    pairs = _pairs(first, second)
    if not pairs:
        return False
    if any(map(_is_stopped, pairs)):
        return True
    if not all(map(_is_at_the_same_place, pairs)):
        return False
    own = [pair for pair in pairs if doing(pair[1]) is not Doing.WAITS]
    nobody_waits = len(own) == len(pairs)
    if nobody_waits:
        return False
    decisive = own or pairs
    return all(does(one, other, between_s) == SLEEPS for one, other in decisive)


def _pairs(first: Looks, second: Looks) -> list[Pair]:
    """Both looks at each rank; () where one of them has no answer."""
    before = {rank.rank: rank for rank in first}
    now = {rank.rank: rank for rank in second}
    if before.keys() != now.keys():
        return []
    if not all(rank.state for rank in second):
        return []
    return [(before[rank], now[rank]) for rank in now]


def _is_stopped(pair: Pair) -> bool:
    return all(rank.state in _STOPPED for rank in pair)


def _is_at_the_same_place(pair: Pair) -> bool:
    before, now = pair
    if not now.frames:
        return False
    return before.frames == now.frames


def does(one: RankEvidence, other: RankEvidence, between_s: float) -> str:
    """What a rank and its children have done between the two looks."""
    if len(one.work) != 2 * _READING or len(other.work) != 2 * _READING:
        return "does something"
    before = one.work[_READING:]  # looking is work, too
    ticks, moved, sent = (now - then for now, then in zip(other.work, before, strict=False))
    idle_ticks = _IDLE_TICKS + _IDLE_SHARE * _TICKS_PER_S * between_s
    if abs(ticks) > idle_ticks:
        return "computes"
    if moved or abs(sent) > _IDLE_TRAFFIC * between_s:
        return "reads or writes"
    return "is blocked in the kernel" if other.state == "D" else SLEEPS


def where(first: Looks, second: Looks, between_s: float) -> str:
    """One clause for each place.

    "rank 3 waits at train.py:40 in step, as 2 more; rank 0 computes at eval.py:9 in evaluate"
    """
    before = {rank.rank: rank for rank in first}
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank in second:
        what = does(before.get(rank.rank, rank), rank, between_s)
        if rank.frames and doing(rank) is Doing.WAITS:
            what = "waits"
        if not rank.state:
            what = "does not answer"
        ranks.setdefault((what, place(rank)), []).append(rank.rank)
    most_first = sorted(ranks, key=lambda key: -len(ranks[key]))
    clauses = []
    for key in most_first[:_MOST_PLACES]:
        clauses.append(_clause(*key, ranks[key]))
    return "; ".join(clauses)


def _clause(what: str, at: str, ranks: Sequence[int]) -> str:
    others = len(ranks) - 1
    more = f", as {others} more" if others else ""
    at = at or "an unknown place"
    return f"rank {ranks[0]} {what} at {at}{more}"
