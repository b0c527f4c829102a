"""Which nodes are active and which are spares: the one place that orders members and assigns group ranks.

With `--ft-segment N` group ranks are given in segments: N of them in a row, all to nodes of one (NVLink) domain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
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


def complete_segments(nodes: Iterable[Node], segment: int) -> int:
    """How many segments of `segment` (>= 1) nodes there are, each within one domain. O(nodes)."""
    return sum(count // segment for count in Counter(node.domain for node in nodes).values())


def is_possible(ready: Collection[Node], min_nodes: int, segment: int | None) -> bool:
    """Whether `place` has enough nodes."""
    return len(ready) >= min_nodes and (not segment or complete_segments(ready, segment) * segment >= min_nodes)


def place(
    ready: Sequence[Node], previous: Mapping[int, str], min_nodes: int, segment: int | None = None
) -> Placement | None:
    """Pick `min_nodes` (>= 1, a multiple of `segment`) active nodes among `ready`, or None when that is impossible.

    `previous` maps group rank -> node_id of the last plan. Nodes that were active stay active **with the same group
    rank** (their ranks, data shards and local checkpoints keep their meaning); vacated group ranks go to the
    spares that come first in infra order. With `segment`, see `_fill_segments`.
    """
    if not is_possible(ready, min_nodes, segment):
        return None
    ordered = sorted(ready, key=infra_order)
    kept, promoted = (
        _fill_segments(ordered, previous, min_nodes, segment) if segment else _fill(ordered, previous, min_nodes)
    )
    active = tuple(kept[g] if g in kept else promoted[g].node_id for g in range(min_nodes))
    taken = set(active)
    spares = tuple(node.node_id for node in ordered if node.node_id not in taken)
    return Placement(active, spares, _why(previous, kept, promoted, len(spares)))


def _fill(
    ordered: Sequence[Node], previous: Mapping[int, str], min_nodes: int
) -> tuple[dict[int, str], dict[int, Node]]:
    """The group ranks that stay where they are, and those that change hands."""
    alive = {node.node_id for node in ordered}
    kept = {g: node_id for g, node_id in previous.items() if g < min_nodes and node_id in alive}
    taken = set(kept.values())
    waiting = iter([node for node in ordered if node.node_id not in taken])
    return kept, {g: next(waiting) for g in range(min_nodes) if g not in kept}


def _fill_segments(
    ordered: Sequence[Node], previous: Mapping[int, str], min_nodes: int, segment: int
) -> tuple[dict[int, str], dict[int, Node]]:
    """As `_fill`, in whole segments, of which there are enough.

    A segment stays in its domain as long as that has nodes for it; where it has too few, the segments with most
    survivors stay. Gaps go to spares of the domain, then to survivors of its segments that could not stay. Other
    segments go to the domains with nodes left, in the order of each domain's first node.
    """
    domains: dict[str, list[Node]] = {}
    for node in ordered:
        domains.setdefault(node.domain, []).append(node)
    domain_of = {node.node_id: node.domain for node in ordered}
    alive = {g: node_id for g, node_id in previous.items() if g < min_nodes and node_id in domain_of}
    survivors = Counter((g // segment, domain_of[node_id]) for g, node_id in alive.items())
    room = {domain: len(nodes) // segment for domain, nodes in domains.items()}
    homes: dict[int, str] = {}  # segment -> domain
    for (index, domain), _ in sorted(survivors.items(), key=lambda item: (-item[1], item[0])):
        if room[domain] and index not in homes:
            homes[index] = domain
            room[domain] -= 1
    free = (domain for domain, segments in room.items() for _ in range(segments))
    homes |= {index: next(free) for index in range(min_nodes // segment) if index not in homes}
    kept = {g: node_id for g, node_id in alive.items() if homes[g // segment] == domain_of[node_id]}
    taken, was_active = set(kept.values()), set(alive.values())
    lines = {
        domain: iter(sorted((n for n in nodes if n.node_id not in taken), key=lambda n: n.node_id in was_active))
        for domain, nodes in domains.items()
    }
    return kept, {g: next(lines[homes[g // segment]]) for g in range(min_nodes) if g not in kept}


def _why(previous: Mapping[int, str], kept: Mapping[int, str], promoted: Mapping[int, Node], spares: int) -> str:
    active = len(kept) + len(promoted)
    if not previous:
        return f"{active} active and {spares} spare nodes in infra-rank order"
    new = [f"{node.host} as group rank {g}" for g, node in promoted.items()]
    moved = "; new: " + ", ".join(new[:4]) + (", ..." if len(new) > 4 else "") if new else ""
    return f"{len(kept)} of {active} active nodes keep their group rank{moved}"
