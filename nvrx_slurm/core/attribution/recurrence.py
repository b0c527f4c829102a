"""What comes back, and where: judged without a word of any log. Pure.

A node that alone fails in two of three cycles is suspected. Where another node then fails like that with the same
rank, the failure has moved with the rank: it is the script, or its data, and never a node.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm.types import RERUN, VERDICT_S, FaultKind, Node, RankFault, RestartRecord

Place = tuple[int, str]
NEAR = 1  # iterations: a training loop may report one before or after the step that fails
_WINDOW = 3  # cycles; once may be chance
_SLACK_S = 60.0


def place(one: Node | RankFault | RestartRecord) -> Place:
    """A node over all lives of its agent: infra rank and host."""
    return one.infra_rank, one.host


def grace_s(fault: RankFault, past: Sequence[RestartRecord]) -> float:
    """How long the other ranks may end by themselves. They may have more to say, or (at the second failure of a kind)
    fail in the same way."""
    print_ = fault.finding.fingerprint if fault.finding is not None else ""
    same = [one.fingerprint == print_ for one in past[-2:]]
    second = fault.kind is FaultKind.EXIT and same[-1:] == [True] and sum(same) == 1
    return VERDICT_S if fault.rejects or second else 0.0


def repeats(fingerprint: str, restarts: Sequence[RestartRecord]) -> int:
    """How often in a row the job has failed like this with this one: the same failure of the user's code, on whichever
    rank, after about the same time. A cycle that lasted much longer has got further."""
    if not fingerprint:
        return 1
    lasted_s: list[float] = []
    for number in range(len(restarts) - 1, -1, -1):
        if restarts[number].fingerprint != fingerprint:
            break
        lasted_s.append(_lasted_s(restarts, number))
    return 1 if lasted_s and _longer(max(lasted_s), min(lasted_s)) else 1 + len(lasted_s)


def suspects(past: Sequence[RestartRecord]) -> list[Place]:
    """Nodes that alone have failed twice within three cycles, the last suspected one last."""
    found: dict[Place, None] = {}
    for at, one in enumerate(past):
        window = range(max(0, at - _WINDOW + 1), at + 1)
        times = sum(past[n].alone and place(past[n]) == place(one) for n in window)
        if one.alone and times > 1 and not _elsewhere(past, at, window):
            found.pop(place(one), None)
            found[place(one)] = None
    return list(found)


def _elsewhere(past: Sequence[RestartRecord], at: int, window: range) -> bool:
    """Whether another node has shown the failure: within these cycles, or at any time with the same rank."""
    others = (n for n, other in enumerate(past) if n in window or other.rank == past[at].rank)
    return any(_is_elsewhere(past, at, n) for n in others)


def _is_elsewhere(past: Sequence[RestartRecord], at: int, other: int) -> bool:
    """Whether two restarts were for the same failure on two nodes, after about the same time."""
    one, two = past[at], past[other]
    same = one.fingerprint and one.fingerprint == two.fingerprint and place(one) != place(two)
    return bool(same) and not _longer(*sorted((_lasted_s(past, at), _lasted_s(past, other)), reverse=True))


def followed(past: Sequence[RestartRecord]) -> RestartRecord | None:
    """The restart before the last, if its node has lost its place and the failure has moved with the rank."""
    last = len(past) - 1
    if last < 1 or not past[last - 1].elsewhere or past[last - 1].rank != past[last].rank:
        return None
    return past[last - 1] if _is_elsewhere(past, last - 1, last) else None


def struck(past: Sequence[RestartRecord], reached: int | None, ran_s: float) -> tuple[str, str]:
    """The host whose failure is gone since other nodes run the ranks, and the sentence about it; ("", "") = none.
    `reached`: iteration that the next cycle has got to, in `ran_s` seconds; None = the job has succeeded."""
    last = past[-1] if past else None
    if last is None or not last.elsewhere or last.exit_code == RERUN:
        return "", ""
    further = _longer(ran_s, _lasted_s(past, len(past) - 1))
    if reached is not None and last.iteration >= 0 and reached >= 0:
        further = reached > last.iteration + NEAR
    return (
        (last.host, f"{last.cause}: gone since other nodes run its ranks") if reached is None or further else ("", "")
    )


def _lasted_s(past: Sequence[RestartRecord], number: int) -> float:
    """How long the cycle ran that this restart ended."""
    one, before = past[number], past[number - 1] if number else None
    return one.at_s - (before.at_s + before.down_s if before is not None else 0.0)


def _longer(long_s: float, short_s: float) -> bool:
    """Whether a cycle has got further, as far as time tells."""
    return long_s > 2 * short_s + _SLACK_S
