"""Which nodes are active, and with which group ranks: the one place that assigns them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator.members import infra_order, is_possible
from nvrx_slurm.declared import Record


class Placement(Record):
    """`active[g]` is the node_id with group rank g; `spares` in infra order; `why` is one sentence."""

    active: tuple[str, ...]
    spares: tuple[str, ...]
    why: str


def place(
    ready: Sequence[t.Node],
    previous: Mapping[int, str],
    min_nodes: int,
    segment: int | None = None,
    last: Sequence[str] = (),
) -> Placement | None:
    """Pick `min_nodes` (>= 1, a multiple of `segment`) active nodes among `ready`, or None when that is impossible.

    `previous` maps group rank -> node_id of the last plan. Nodes that were active stay active **with the same group
    rank** (their ranks, data shards and local checkpoints keep their meaning); vacated group ranks go to the
    spares that come first in infra order. With `segment`, see `_fill`. `last`: node_ids that are active only where the
    others are not enough.
    """
    if not is_possible(ready, min_nodes, segment):
        return None
    left_out = list(last)
    while not is_possible(
        able := [node for node in ready if node.node_id not in left_out], min_nodes, segment
    ):
        left_out.pop()
    ordered = sorted(able, key=infra_order)
    kept, promoted = _fill(ordered, previous, min_nodes, segment)
    active = tuple(kept[g] if g in kept else promoted[g].node_id for g in range(min_nodes))
    taken = set(active)
    others = (*ordered, *(node for node in ready if node.node_id in left_out))
    spares = tuple(node.node_id for node in others if node.node_id not in taken)
    return Placement(active, spares, _why(previous, kept, promoted, len(spares)))


def _fill(
    ordered: Sequence[t.Node], previous: Mapping[int, str], min_nodes: int, segment: int | None
) -> tuple[dict[int, str], dict[int, t.Node]]:
    """The group ranks that stay where they are, and those that change hands; in whole segments, of which there are
    enough. Without `segment` each node is one, and all are in one domain.

    A segment stays in its domain as long as that has nodes for it; where it has too few, the segments with most
    survivors stay. Gaps go to spares of the domain, then to survivors of its segments that could not stay. Other
    segments go to the domains with nodes left, in the order of each domain's first node.
    """
    size = segment or 1
    domain_of = {node.node_id: node.domain if segment else "" for node in ordered}
    domains: dict[str, list[t.Node]] = {}
    for node in ordered:
        domains.setdefault(domain_of[node.node_id], []).append(node)
    alive = {
        g: node_id for g, node_id in previous.items() if g < min_nodes and node_id in domain_of
    }
    survivors = Counter((g // size, domain_of[node_id]) for g, node_id in alive.items())
    room = {domain: len(nodes) // size for domain, nodes in domains.items()}
    homes: dict[int, str] = {}  # segment -> domain
    for (index, domain), _ in sorted(survivors.items(), key=lambda item: (-item[1], item[0])):
        if room[domain] and index not in homes:
            homes[index] = domain
            room[domain] -= 1
    free = (domain for domain, segments in room.items() for _ in range(segments))
    homes |= {index: next(free) for index in range(min_nodes // size) if index not in homes}
    kept = {g: node_id for g, node_id in alive.items() if homes[g // size] == domain_of[node_id]}
    taken, was_active = set(kept.values()), set(alive.values())
    lines = {
        domain: iter(
            sorted(
                (n for n in nodes if n.node_id not in taken), key=lambda n: n.node_id in was_active
            )
        )
        for domain, nodes in domains.items()
    }
    return kept, {g: next(lines[homes[g // size]]) for g in range(min_nodes) if g not in kept}


def _why(
    previous: Mapping[int, str],
    kept: Mapping[int, str],
    promoted: Mapping[int, t.Node],
    spares: int,
) -> str:
    active = len(kept) + len(promoted)
    if not previous:
        return f"{active} active and {spares} spare nodes in infra-rank order"
    new = [f"{node.host} as group rank {g}" for g, node in promoted.items()]
    moved = "; new: " + ", ".join(new[:4]) + (", ..." if len(new) > 4 else "") if new else ""
    return f"{len(kept)} of {active} active nodes keep their group rank{moved}"
