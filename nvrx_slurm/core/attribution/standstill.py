"""Whether two looks at all ranks prove that none goes on, and where they are. Pure.

No step for long may be an evaluation, a checkpoint or a compilation. So a doubt is not enough to end
ranks: a rank that computes, reads or writes, or blocks in the kernel, may go on.
"""

from __future__ import annotations

from collections.abc import Collection

from nvrx_slurm.core.attribution.hang import Doing, doing, place
from nvrx_slurm.types import RankEvidence

_IDLE_TICKS = 3.0  # of 10 ms: processor time of a process that only waits, and for each second
_IDLE_TICKS_PER_S = 1.0
_IDLE_TRAFFIC = (
    2048.0  # bytes per second: watchdogs ask the store each second whether the job goes on
)
_READING = 3  # numbers, at the begin and at the end of each look
_STOPPED = {"T", "t"}
SLEEPS = "sleeps"
_MOST_PLACES = 8

Looks = Collection[RankEvidence]


def proven(first: Looks, second: Looks, between_s: float) -> bool:
    """Whether some rank is stopped, or the others wait for one that does nothing, or all wait and
    nothing moves."""
    before = {rank.rank: rank for rank in first}
    if before.keys() != {rank.rank for rank in second}:
        return False
    if not all(rank.state for rank in second):
        return False
    pairs = [(before[rank.rank], rank) for rank in second]
    if any({one.state, other.state} <= _STOPPED for one, other in pairs):
        return True
    if not all(other.frames for _, other in pairs):
        return False
    if any(one.frames != other.frames for one, other in pairs):
        return False
    own = [pair for pair in pairs if doing(pair[1]) is not Doing.WAITS]
    nobody_waits = len(own) == len(pairs)
    if nobody_waits:
        return False
    return all(does(one, other, between_s) == SLEEPS for one, other in own or pairs)


def does(one: RankEvidence, other: RankEvidence, between_s: float) -> str:
    """What a rank and its children have done between the two looks."""
    if len(one.work) != 2 * _READING or len(other.work) != 2 * _READING:
        return "does something"
    before = one.work[_READING:]  # looking is work, too
    ticks, moved, sent = (now - then for now, then in zip(other.work, before, strict=False))
    idle_ticks = _IDLE_TICKS + _IDLE_TICKS_PER_S * between_s
    if abs(ticks) > idle_ticks:
        return "computes"
    if moved or abs(sent) > _IDLE_TRAFFIC * between_s:
        return "reads or writes"
    return "is blocked in the kernel" if other.state == "D" else SLEEPS


def where(first: Looks, second: Looks, between_s: float) -> str:
    """One clause for each place; with its node, where there are several.

    "rank 3 on node 1 (n1) waits at train.py:40 in step, as 2 more; rank 0 on node 0 (n0) computes at eval.py:9 in f"
    """
    before = {rank.rank: rank for rank in first}
    ranks: dict[tuple[str, str], list[RankEvidence]] = {}
    for rank in second:
        what = does(before.get(rank.rank, rank), rank, between_s)
        if rank.frames and doing(rank) is Doing.WAITS:
            what = "waits"
        if not rank.state:
            what = "does not answer"
        ranks.setdefault((what, place(rank)), []).append(rank)
    several = len({rank.infra_rank for rank in second}) > 1
    clauses = []
    for (what, at), some in sorted(ranks.items(), key=lambda found: -len(found[1])):
        one = some[0]
        who = f"rank {one.rank}"
        if several:
            who += f" on node {one.infra_rank} ({one.host})"
        clause = f"{who} {what} at {at or 'an unknown place'}"
        if some[1:]:
            clause += f", as {len(some) - 1} more"
        clauses.append(clause)
    return "; ".join(clauses[:_MOST_PLACES])
