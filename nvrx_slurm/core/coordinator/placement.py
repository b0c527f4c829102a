"""Which nodes are active, and with which group ranks: the one place that assigns them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator.members import infra_order, is_possible
from nvrx_slurm.declared import Record

_SHOWN = 4


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
    able = _without(ready, left_out)
    while not is_possible(able, min_nodes, segment):
        left_out.pop()
        able = _without(ready, left_out)
    ordered = sorted(able, key=infra_order)
    kept, promoted = _fill(ordered, previous, min_nodes, segment)
    holders = dict(kept)
    for g, node in promoted.items():
        holders[g] = node.node_id
    active = tuple(holders[g] for g in range(min_nodes))
    others = _without(ordered, {*active})
    others += [node for node in ready if node.node_id in left_out]
    spares = tuple(node.node_id for node in others)
    why = _why(previous, kept, promoted, len(spares))
    return Placement(active, spares, why)


def _without(nodes: Iterable[t.Node], left_out: Collection[str]) -> list[t.Node]:
    return [node for node in nodes if node.node_id not in left_out]


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
    alive: dict[int, str] = {}
    for g, node_id in previous.items():
        if g < min_nodes and node_id in domain_of:
            alive[g] = node_id
    survivors = Counter[tuple[int, str]]()
    for g, node_id in alive.items():
        survivors[g // size, domain_of[node_id]] += 1
    room = {domain: len(nodes) // size for domain, nodes in domains.items()}
    homes = _homes(survivors, room, min_nodes // size)
    kept: dict[int, str] = {}
    for g, node_id in alive.items():
        if homes[g // size] == domain_of[node_id]:
            kept[g] = node_id
    taken = set(kept.values())
    was_active = set(alive.values())
    lines: dict[str, Iterator[t.Node]] = {}
    for domain, nodes in domains.items():
        left = _without(nodes, taken)
        lines[domain] = iter(sorted(left, key=lambda n: n.node_id in was_active))
    promoted: dict[int, t.Node] = {}
    for g in range(min_nodes):
        if g not in kept:
            promoted[g] = next(lines[homes[g // size]])
    return kept, promoted


def _homes(
    survivors: Counter[tuple[int, str]],
    room: dict[str, int],
    segments: int,
) -> dict[int, str]:
    """The domain of each segment. `survivors`: how many of a segment are in a domain. `room`: for how many segments."""
    homes: dict[int, str] = {}
    ranked = sorted(survivors.items(), key=lambda item: (-item[1], item[0]))
    for (index, domain), _ in ranked:
        if room[domain] and index not in homes:
            homes[index] = domain
            room[domain] -= 1
    free: list[str] = []
    for domain in room:
        free += [domain] * room[domain]
    left = iter(free)
    for index in range(segments):
        if index not in homes:
            homes[index] = next(left)
    return homes


def _why(
    previous: Mapping[int, str],
    kept: Mapping[int, str],
    promoted: Mapping[int, t.Node],
    spares: int,
) -> str:
    active = len(kept) + len(promoted)
    if not previous:
        return f"{active} active and {spares} spare nodes in infra-rank order"
    kept_their = f"{len(kept)} of {active} active nodes keep their group rank"
    if not promoted:
        return kept_their
    shown = []
    for g, node in list(promoted.items())[:_SHOWN]:
        shown.append(f"{node.host} as group rank {g}")
    if len(promoted) > _SHOWN:
        shown.append("...")
    return f"{kept_their}; new: {', '.join(shown)}"
