"""Active ranks in a tree of failure domains (hosts, racks, the whole job). Pure.

A `Topology` is built once, from the keys of all ranks. Its leaves are the ranks in depth-first order. The only changing
state is `places`, the place of each leaf; a pure function computes the next places from the last ones and the deaths.
Any rank that has the keys and the last places can therefore continue.

Terms: a *slot* is a rank's number when the tree was built, a *leaf* its position in depth-first order, a *node* a
branch of the tree, its *level* the number of its layer (0: the root).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from nvrx_slurm.frozen import frozen

SPARE, FILTERED, DEAD = -1, -2, -3
Places: TypeAlias = list[int]
"""By leaf: an active rank (>= 0), SPARE, FILTERED (out by the world size filter), DEAD, or less: see `killed_by`."""


class TopologyError(ValueError):
    """The keys make no tree, or the world size filter returned an impossible size."""


@frozen
class Level:
    """Bounds of every branch at one depth; flags as in `LayerFlag`."""

    min_ranks: int = 1
    max_ranks: int | None = None
    reserve: bool = False
    backfill: bool = False


def killed_by(place: int) -> int:
    """Level of the branch that had too few healthy ranks left, for a `place` below DEAD."""
    return DEAD - 1 - place


class Topology:
    """The tree. Nodes are numbered parents first; node n holds the leaves `first[n]` to `end[n] - 1`."""

    def __init__(self, levels: Sequence[Level], keys: Mapping[int, Sequence[str]]) -> None:
        """`keys[slot]` has one key per level; raises TopologyError unless the first is the same for all."""
        self.levels = list(levels)
        self.slots: list[int] = []  # by leaf
        self.home: list[int] = []  # by leaf: its innermost node
        self.level: list[int] = []  # by node, as all that follow
        self.lineage: list[tuple[int, ...]] = []  # itself, its parent, ..., the root
        self.first: list[int] = []
        self.end: list[int] = []
        paths: dict[tuple[str, ...], list[int]] = {}
        for slot in sorted(keys):
            paths.setdefault(tuple(keys[slot]), []).append(slot)
        (root, ranks), *others = paths.items()
        for path, slots in others:
            if path[0] != root[0]:
                raise TopologyError(
                    "the key of the first layer must be the same on all ranks, "
                    f"but rank {ranks[0]} has {root[0]!r} and rank {slots[0]} has {path[0]!r}"
                )
        self._grow((), list(paths.items()))
        maxima = [self.levels[level].max_ranks for level in self.level]
        spans = map(range, self.first, self.end)
        self.limit = [len(span) if most is None else most for most, span in zip(maxima, spans, strict=True)]

    def _grow(self, above: tuple[int, ...], paths: list[tuple[tuple[str, ...], list[int]]]) -> None:
        node, level = len(self.level), len(above)
        lineage = (node, *above)
        self.level.append(level)
        self.lineage.append(lineage)
        self.first.append(len(self.slots))
        self.end.append(0)
        if level + 1 == len(self.levels):
            for _, slots in paths:
                self.slots += slots
                self.home += [node] * len(slots)
        else:
            branches: dict[str, list[tuple[tuple[str, ...], list[int]]]] = {}
            for path in paths:
                branches.setdefault(path[0][level + 1], []).append(path)
            for branch in branches.values():
                self._grow(lineage, branch)
        self.end[node] = len(self.slots)

    def first_places(self, world_size_filter: Callable[[int], int] | None = None) -> Places:
        """Activate leaves in depth-first order, up to the `max_ranks` of every branch around them."""
        step = _Reassignment(self, [SPARE] * len(self.slots))
        step.activate_in_order(SPARE)
        return step.finish(world_size_filter)

    def next_places(
        self, places: Places, died: Iterable[int], world_size_filter: Callable[[int], int] | None = None
    ) -> Places:
        """The places after the deaths of the leaves in `died`. `world_size_filter(n)` returns a number from 0 to n.

        Spares replace the dead, in rank order, nearest domain first, as far out as RESERVE allows. The highest active
        ranks of a BACKFILL domain then fill its gaps. The remaining ranks close up.
        """
        after = list(places)
        for leaf in died:
            after[leaf] = DEAD
        order = active_order(places)
        step = _Reassignment(self, after, order)
        step.replace_from_reserve()
        step.backfill()
        step.order = [leaf for leaf in step.order if after[leaf] > DEAD]  # close up the remaining gaps
        return step.finish(world_size_filter)


def active_order(places: Places) -> list[int]:
    """The leaf of each active rank."""
    order = [-1] * sum(map((0).__le__, places))
    for leaf, place in enumerate(places):
        if place >= 0:
            order[place] = leaf
    return order


def healthy(places: Places) -> list[int]:
    """Leaves that are not dead, in depth-first order: index r is the leaf of the rank r."""
    return [leaf for leaf, place in enumerate(places) if place > DEAD]


class _Reassignment:
    """One reassignment. `order[active_rank]` is a leaf; a dead one is a gap that is not filled yet."""

    def __init__(self, topology: Topology, places: Places, order: Sequence[int] = ()) -> None:
        self.topology = topology
        self.places = places
        self.order = list(order)
        self.active = [0] * len(topology.level)
        self._searched: dict[int, int] = {}  # node -> the first of its leaves that may still become active
        self._terminate_below_minimum()

    def _terminate_below_minimum(self) -> None:
        """Terminate branches with too few healthy leaves, children before parents; count the active leaves."""
        topology, places, active = self.topology, self.places, self.active
        alive = [0] * len(topology.level)
        innermost = len(topology.levels) - 1
        for node in reversed(range(len(topology.level))):
            first, end, level = topology.first[node], topology.end[node], topology.level[node]
            if level == innermost:
                inside = places[first:end]
                alive[node] = sum(map(DEAD.__lt__, inside))
                active[node] = sum(map((0).__le__, inside))
            if alive[node] < topology.levels[level].min_ranks:
                for leaf in range(first, end):
                    if places[leaf] > DEAD:
                        places[leaf] = DEAD - 1 - level
                alive[node] = active[node] = 0
            if level:
                parent = topology.lineage[node][1]
                alive[parent] += alive[node]
                active[parent] += active[node]

    def _count(self, leaf: int) -> None:
        for node in self.topology.lineage[self.topology.home[leaf]]:
            self.active[node] += 1

    def _full(self, leaf: int) -> int | None:
        """A branch around `leaf` that has its maximum of active leaves, None if there is none."""
        limit, active = self.topology.limit, self.active
        for node in self.topology.lineage[self.topology.home[leaf]]:
            if active[node] >= limit[node]:
                return node
        return None

    def activate_in_order(self, status: int) -> None:
        """Append all leaves with this status to the active ranks, as far as the maxima allow."""
        topology, active = self.topology, self.active
        for node, level in enumerate(topology.level):
            if level + 1 == len(topology.levels):
                lineage, leaves = topology.lineage[node], range(topology.first[node], topology.end[node])
                room = min(topology.limit[around] - active[around] for around in lineage)
                chosen = [leaf for leaf in leaves if self.places[leaf] == status][:room]
                for active_rank, leaf in enumerate(chosen, start=len(self.order)):
                    self.places[leaf] = active_rank
                self.order += chosen
                for around in lineage:
                    active[around] += len(chosen)

    def replace_from_reserve(self) -> None:
        """Give the gaps to spares, lowest gap first."""
        for active_rank, leaf in enumerate(self.order):
            if self.places[leaf] <= DEAD and (spare := self._nearest_spare(leaf)) is not None:
                self.order[active_rank] = spare
                self.places[spare] = active_rank
                self._count(spare)

    def _nearest_spare(self, leaf: int) -> int | None:
        topology = self.topology
        for node in topology.lineage[topology.home[leaf]]:
            if not topology.levels[topology.level[node]].reserve:
                return None
            if (spare := self._first_spare(node)) is not None:
                return spare
        return None

    def _first_spare(self, node: int) -> int | None:
        """The lowest leaf of the branch that can become active. Candidates only disappear: no leaf is visited twice."""
        leaf, end = self._searched.get(node, self.topology.first[node]), self.topology.end[node]
        while leaf < end:
            if (full := self._full(leaf)) is not None:
                leaf = self.topology.end[full]
            elif self.places[leaf] in (SPARE, FILTERED):
                break
            else:
                leaf += 1
        self._searched[node] = leaf
        return leaf if leaf < end else None

    def backfill(self) -> None:
        """In each BACKFILL domain, swap the lowest gaps with the highest active ranks."""
        topology = self.topology
        depth = 0  # how many layers, from the innermost, the domain goes up
        while depth < len(topology.levels) and topology.levels[-1 - depth].backfill:
            depth += 1
        if not depth:
            return
        gaps: dict[int, list[int]] = {}  # by domain, the lowest last
        for active_rank in reversed(range(len(self.order))):
            if self.places[self.order[active_rank]] <= DEAD:
                domain = topology.lineage[topology.home[self.order[active_rank]]][depth - 1]
                gaps.setdefault(domain, []).append(active_rank)
        for highest in reversed(range(len(self.order))):
            if not gaps:
                break
            leaf = self.order[highest]
            domain = topology.lineage[topology.home[leaf]][depth - 1]
            if domain not in gaps or self.places[leaf] <= DEAD:
                continue
            gap = gaps[domain].pop()
            if gap < highest:
                self.order[gap], self.order[highest] = leaf, self.order[gap]
            if gap > highest or not gaps[domain]:
                del gaps[domain]

    def finish(self, world_size_filter: Callable[[int], int] | None) -> Places:
        """Apply the filter and number the active leaves.

        Leaves that it filtered out earlier are candidates again, so that it decides anew.
        """
        size = len(self.order)
        if world_size_filter is not None:
            self.activate_in_order(FILTERED)
            size = _filtered(world_size_filter, len(self.order)) if self.order else 0
        for active_rank, leaf in enumerate(self.order):
            self.places[leaf] = active_rank if active_rank < size else FILTERED
        return self.places


def _filtered(world_size_filter: Callable[[int], int], size: int) -> int:
    wanted = world_size_filter(size)
    if not isinstance(wanted, int) or not 0 <= wanted <= size:
        raise TopologyError(
            f"world_size_filter({size}) returned {wanted!r}; it must return a whole number from 0 to its argument"
        )
    return wanted
