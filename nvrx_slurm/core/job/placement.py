"""Which nodes are active and which are spares: the one place that orders members and assigns group ranks.

Segments by NVLink domain (`--ft-segment`, seed 000) will be a second way to pick from `ready`, here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def place(ready: Sequence[Node], previous: Mapping[int, str], min_nodes: int) -> Placement | None:
    """Pick `min_nodes` (>= 1) active nodes among `ready`, or None when there are too few.

    `previous` maps group rank -> node_id of the last plan. Nodes that were active stay active **with the same group
    rank** (their ranks, data shards and local checkpoints keep their meaning); vacated group ranks go to the
    spares that come first in infra order.
    """
    if len(ready) < min_nodes:
        return None
    ordered = sorted(ready, key=infra_order)
    alive = {node.node_id for node in ordered}
    kept = {g: node_id for g, node_id in previous.items() if g < min_nodes and node_id in alive}
    taken = set(kept.values())
    waiting = iter([node for node in ordered if node.node_id not in taken])
    promoted = {g: next(waiting) for g in range(min_nodes) if g not in kept}
    active = tuple(kept[g] if g in kept else promoted[g].node_id for g in range(min_nodes))
    spares = tuple(node.node_id for node in waiting)
    why = f"{min_nodes} active and {len(spares)} spare nodes in infra-rank order"
    if previous:
        new = [f"{node.host} as group rank {g}" for g, node in promoted.items()]
        moved = "; new: " + ", ".join(new[:4]) + (", ..." if len(new) > 4 else "") if new else ""
        why = f"{len(kept)} of {min_nodes} active nodes keep their group rank{moved}"
    return Placement(active, spares, why)
