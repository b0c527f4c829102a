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
_TWICE = 2
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
    if fault.rejects:
        return VERDICT_S
    print_ = fault.finding.fingerprint if fault.finding is not None else ""
    same = [one.fingerprint == print_ for one in past[-2:]]
    is_own = fault.kind is FaultKind.EXIT or fault.exit_code in _CRASHES
    is_second = same in ([True], [False, True])
    if is_own and is_second:
        return _ALIKE_S
    return 0.0


def repeats(fingerprint: str, restarts: Sequence[RestartRecord]) -> int:
    """How often in a row the job has failed like this with this one: the same failure of the user's code, on whichever
    rank, after about the same time. A cycle that lasted much longer has got further."""
    ran_s: list[float] = []
    for one in reversed(restarts):
        if not fingerprint or one.fingerprint != fingerprint:
            break
        ran_s.append(one.ran_s)
    if ran_s and _longer(max(ran_s), min(ran_s)):
        return 1
    return 1 + len(ran_s)


def nodes_of(one: RestartRecord) -> dict[Place, int]:
    """The nodes that showed this failure, the first cause first, each with a rank that did."""
    nodes = {place(one): one.rank}
    for other in one.alike:
        nodes[other.infra_rank, other.host] = other.rank
    return nodes


def suspects(past: Sequence[RestartRecord]) -> list[Place]:
    """Nodes that have failed twice within three cycles, alone or with the same few others; those first that did so with
    most of their ranks, then the first suspected. Not if another node has shown the same: in these cycles, or ever
    with the same rank."""
    found = dict[Place, None]()
    ranks: dict[Place, set[int]] = {}
    for at, one in enumerate(past):
        found.update(dict.fromkeys(_suspects(past, at)))
        shown = nodes_of(one) if one.alone else {}
        for node, rank in shown.items():
            ranks.setdefault(node, set()).add(rank)
    return sorted(found, key=lambda node: -len(ranks[node]))


def _suspects(past: Sequence[RestartRecord], at: int) -> list[Place]:
    """Those of one failure."""
    one = past[at]
    window = past[max(0, at + 1 - _WINDOW) : at + 1]
    if not one.alone or _of_a_rank(one, past):
        return []
    alone = [nodes_of(other) for other in window if other.alone]
    found = []
    for node in nodes_of(one):
        shown = [nodes for nodes in alone if node in nodes]
        if len(shown) < _TWICE:
            continue
        company = {node}.union(*shown)
        moved = [other for other in window if _has_moved(one, other, company)]
        if not moved:
            found.append(node)
    return found


def _of_a_rank(one: RestartRecord, past: Sequence[RestartRecord]) -> bool:
    """Whether this failure has come to one rank on two nodes that have never shown it together."""
    together = set[tuple[Place, Place]]()
    held: dict[int, set[Place]] = {}
    for other in past:
        if not _has_moved(one, other, frozenset()):
            continue
        nodes = nodes_of(other)
        together.update(permutations(nodes, 2))
        for node, rank in nodes.items():
            held.setdefault(rank, set()).add(node)
    apart = set[tuple[Place, Place]]()
    for holders in held.values():
        apart.update(permutations(holders, 2))
    return not apart <= together


def followed(past: Sequence[RestartRecord]) -> bool:
    """Whether the last failure is the one before, of the same rank on another node."""
    if len(past) < 2:
        return False
    one, other = past[-2:]
    before = nodes_of(one)
    ranks = set(before.values())
    company = before.keys()
    moved = [rank for node, rank in nodes_of(other).items() if node not in company]
    same_rank = not ranks.isdisjoint(moved)
    if not one.elsewhere or not same_rank:
        return False
    return _has_moved(one, other, company)


def _has_moved(one: RestartRecord, other: RestartRecord, company: Set[Place]) -> bool:
    """Whether a node out of this company has failed in the same way, after about the same time."""
    is_same = one.fingerprint == other.fingerprint != ""
    is_outside = not nodes_of(other).keys() <= company
    if not is_same or not is_outside:
        return False
    short_s, long_s = sorted((one.ran_s, other.ran_s))
    return not _longer(long_s, short_s)


def struck(
    past: Sequence[RestartRecord], reached: int | None, ran_s: float
) -> tuple[Sequence[str], str]:
    """The hosts whose failure is gone since other nodes run the ranks, and the sentence about it; () = none.
    `reached`: iteration that the next cycle has got to, in `ran_s` seconds; None = the job has succeeded."""
    last = past[-1] if past else None
    if last is None or not last.elsewhere or last.exit_code == RERUN:
        return (), ""
    if reached is None:
        further = True
    elif min(reached, last.iteration) >= 0:
        further = reached > last.iteration + NEAR
    else:
        further = _longer(ran_s, last.ran_s)
    if not further:
        return (), ""
    hosts = last.replaced or (last.host,)
    return hosts, f"{last.cause}: gone since other nodes run its ranks"


def _longer(long_s: float, short_s: float) -> bool:
    """Whether a cycle has got further, as far as time tells."""
    return long_s > 2 * short_s + _SLACK_S
