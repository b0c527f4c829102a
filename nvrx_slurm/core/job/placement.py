"""Which nodes are active and which are spares: the one place that orders members and assigns group ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nvrx_slurm.types import Node


@dataclass(frozen=True, slots=True)
class Placement:
    """`active[g]` is the node_id with group rank g; `spares` in infra order; `why` is one sentence."""

    active: tuple[str, ...]
    spares: tuple[str, ...]
    why: str


def infra_order(node: Node) -> tuple[tuple[int, ...], int, str, str]:
    """Sort key of members: network topology, then the order Slurm gave us, then the node's own descriptor."""
    return (node.order, node.infra_rank, node.addr, node.node_id)


def place(ready: Sequence[Node], previous: Mapping[int, str], min_nodes: int, segment: int = 0) -> Placement | None:
    """Pick `min_nodes` (>= 1) active nodes among `ready`, or None when there are too few.

    `previous` maps group rank -> node_id of the last plan. Nodes that were active stay active **with the same group
    rank** (their ranks, data shards and local checkpoints keep their meaning); vacated group ranks go to the
    spares that come first in infra order. `segment` > 0, which divides `min_nodes`: so many neighbouring group ranks
    are in one domain (`Node.domain`; seed 000, "--ft-segment"), and nodes stay where whole segments allow it.
    """
    ordered = sorted(ready, key=infra_order)
    alive = {node.node_id: node for node in ordered}
    kept = {g: node_id for g, node_id in previous.items() if g < min_nodes and node_id in alive}
    if segment:
        seats = _by_segments(ordered, {g: alive[node_id] for g, node_id in kept.items()}, min_nodes, segment)
        kept = {g: node_id for g, node_id in kept.items() if g in seats and seats[g].node_id == node_id}
    else:
        taken = set(kept.values())
        waiting = (node for node in ordered if node.node_id not in taken)
        vacant = (g for g in range(min_nodes) if g not in kept)
        seats = {g: alive[kept[g]] for g in kept} | dict(zip(vacant, waiting, strict=False))
    if len(seats) < min_nodes:
        return None
    active = tuple(seats[g].node_id for g in range(min_nodes))
    chosen = set(active)
    spares = tuple(node.node_id for node in ordered if node.node_id not in chosen)
    why = f"{min_nodes} active and {len(spares)} spare nodes in infra-rank order"
    if segment:
        why += f", {min_nodes // segment} segments of {segment}"
    if previous:
        new = [f"{seats[g].host} as group rank {g}" for g in range(min_nodes) if g not in kept]
        moved = "; new: " + ", ".join(new[:4]) + (", ..." if len(new) > 4 else "") if new else ""
        why = f"{len(kept)} of {min_nodes} active nodes keep their group rank{moved}"
    return Placement(active, spares, why)


def complete_segments(sizes: Iterable[int], segment: int) -> int:
    """How many segments of `segment` (>= 1) nodes there are in domains with so many nodes."""
    return sum(size // segment for size in sizes)


def _by_segments(ordered: Sequence[Node], kept: Mapping[int, Node], min_nodes: int, segment: int) -> dict[int, Node]:
    """Nodes by group rank; not all group ranks where there are too few complete segments.

    In each domain as many of its old segments stay as it can fill, those with the most survivors first. The nodes of
    the others are spares. Group ranks without a segment get one in the domain that comes first in infra order.
    """
    sizes = Counter(node.domain for node in ordered)
    stay = _segments_that_stay(kept, sizes, min_nodes, segment)
    seats = {g: node for g, node in kept.items() if stay.get(g // segment) == node.domain}
    taken = {node.node_id for node in seats.values()}
    free: dict[str, list[Node]] = {domain: [] for domain in sizes}  # in infra order of their first nodes
    for node in ordered:
        if node.node_id not in taken:
            free[node.domain].append(node)

    def fill(number: int, domain: str) -> None:
        for g in range(number * segment, (number + 1) * segment):
            if g not in seats:
                seats[g] = free[domain].pop(0)

    for number, domain in stay.items():
        fill(number, domain)
    for number in range(min_nodes // segment):
        domains = (domain for domain in free if len(free[domain]) >= segment)
        if number not in stay and (first := next(domains, "")) in free:
            fill(number, first)
    return seats


def _segments_that_stay(
    kept: Mapping[int, Node], sizes: Mapping[str, int], min_nodes: int, segment: int
) -> dict[int, str]:
    """Number and domain of the old segments that their domains can fill."""
    survivors: dict[int, Counter[str]] = {}
    for g, node in sorted(kept.items()):
        survivors.setdefault(g // segment, Counter())[node.domain] += 1
    most = {number: found.most_common(1)[0] for number, found in survivors.items()}
    room = {domain: size // segment for domain, size in sizes.items()}
    stay: dict[int, str] = {}
    for number in sorted(most, key=lambda number: (-most[number][1], number)):
        domain = most[number][0]
        if room[domain]:
            room[domain] -= 1
            stay[number] = domain
    return stay
