"""What comes back, and where: judged without a word of any log. Pure.

A node that alone fails in two of three cycles is suspected, and so are a few that do so together. Where another node
then fails like that with the same rank, the failure has moved with the rank: it is the script, or its data, and never
a node.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import permutations

from nvrx_slurm.types import RERUN, VERDICT_S, FaultKind, Node, RankFault, RestartRecord

Place = tuple[int, str]
NEAR = 1  # iterations: a training loop may report one before or after the step that fails
_WINDOW = 3  # cycles; once may be chance
_SLACK_S = 60.0
_ALIKE_S = 3.0  # ranks that load the same modules reach the same line
_CRASHES = (-4, -7, -8, -11)  # SIGILL, SIGBUS, SIGFPE, SIGSEGV


def place(one: Node | RestartRecord) -> Place:
    """A node over all lives of its agent: infra rank and host."""
    return one.infra_rank, one.host


def grace_s(fault: RankFault, past: Sequence[RestartRecord]) -> float:
    """How long the other ranks may end by themselves: they may have more to say, or (at the second failure of a kind)
    fail in the same way."""
    print_ = fault.finding.fingerprint if fault.finding is not None else ""
    same = [one.fingerprint == print_ for one in past[-2:]]
    own = fault.kind is FaultKind.EXIT or fault.exit_code in _CRASHES
    second = own and same in ([True], [False, True])
    return VERDICT_S if fault.rejects else _ALIKE_S if second else 0.0


def repeats(fingerprint: str, restarts: Sequence[RestartRecord]) -> int:
    """How often in a row the job has failed like this with this one: the same failure of the user's code, on whichever
    rank, after about the same time. A cycle that lasted much longer has got further."""
    ran_s: list[float] = []
    for one in reversed(restarts):
        if not fingerprint or one.fingerprint != fingerprint:
            break
        ran_s.append(one.ran_s)
    return 1 if ran_s and _longer(max(ran_s), min(ran_s)) else 1 + len(ran_s)


def nodes_of(one: RestartRecord) -> dict[Place, int]:
    """The nodes that showed this failure, the first cause first, each with a rank that did."""
    return {place(one): one.rank} | {
        (other.infra_rank, other.host): other.rank for other in one.alike
    }


def suspects(past: Sequence[RestartRecord]) -> list[Place]:
    """Nodes that have failed twice within three cycles, alone or with the same few others; those first that did so with
    most of their ranks, then the first suspected. Not if another node has shown the same: in these cycles, or ever
    with the same rank."""
    found = [node for at in range(len(past)) for node in _suspects(past, at)]
    ranks = {(node, rank) for one in past if one.alone for node, rank in nodes_of(one).items()}
    return sorted(dict.fromkeys(found), key=lambda node: -sum(where == node for where, _ in ranks))


def _suspects(past: Sequence[RestartRecord], at: int) -> list[Place]:
    """Those of one failure."""
    one, window = past[at], past[max(0, at + 1 - _WINDOW) : at + 1]
    found = []
    for node in nodes_of(one) if one.alone and not _of_a_rank(one, past) else ():
        shown = [nodes_of(other) for other in window if other.alone and node in nodes_of(other)]
        company = {node}.union(*shown)
        if len(shown) > 1 and not any(_has_moved(one, other, company) for other in window):
            found.append(node)
    return found


def _of_a_rank(one: RestartRecord, past: Sequence[RestartRecord]) -> bool:
    """Whether this failure has come to one rank on two nodes that have never shown it together."""
    alike = [nodes_of(other) for other in past if _has_moved(one, other, frozenset())]
    together = {pair for nodes in alike for pair in permutations(nodes, 2)}
    held: dict[int, set[Place]] = {}
    for nodes in alike:
        for node, rank in nodes.items():
            held.setdefault(rank, set()).add(node)
    return any(pair not in together for nodes in held.values() for pair in permutations(nodes, 2))


def followed(past: Sequence[RestartRecord]) -> bool:
    """Whether the last failure is the one before, of the same rank on another node."""
    if len(past) < 2:
        return False
    one, other = past[-2:]
    ranks, company = set(nodes_of(one).values()), nodes_of(one).keys()
    same_rank = any(rank in ranks and node not in company for node, rank in nodes_of(other).items())
    return one.elsewhere and same_rank and _has_moved(one, other, company)


def _has_moved(one: RestartRecord, other: RestartRecord, company: Set[Place]) -> bool:
    """Whether a node out of this company has failed in the same way, after about the same time."""
    same = one.fingerprint == other.fingerprint != "" and not nodes_of(other).keys() <= company
    return same and not _longer(max(one.ran_s, other.ran_s), min(one.ran_s, other.ran_s))


def struck(
    past: Sequence[RestartRecord], reached: int | None, ran_s: float
) -> tuple[Sequence[str], str]:
    """The hosts whose failure is gone since other nodes run the ranks, and the sentence about it; () = none.
    `reached`: iteration that the next cycle has got to, in `ran_s` seconds; None = the job has succeeded."""
    last = past[-1] if past else None
    if last is None or not last.elsewhere or last.exit_code == RERUN:
        return (), ""
    if reached is not None and min(reached, last.iteration) >= 0:
        further = reached > last.iteration + NEAR
    else:
        further = reached is None or _longer(ran_s, last.ran_s)
    hosts = last.replaced or (last.host,)
    return (hosts, f"{last.cause}: gone since other nodes run its ranks") if further else ((), "")


def _longer(long_s: float, short_s: float) -> bool:
    """Whether a cycle has got further, as far as time tells."""
    return long_s > 2 * short_s + _SLACK_S
