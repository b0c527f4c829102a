"""Active ranks in a tree of failure domains (hosts, racks, the whole job). Pure.

A `Topology` is built once, from the keys of all ranks. Its leaves are the ranks in depth-first order. The only changing
state is `places`, the place of each leaf; a pure function computes the next places from the last ones and the deaths.
Any rank that has the keys and the last places can therefore continue.

Terms: a *slot* is a rank's number when the tree was built, a *leaf* its position in depth-first order. The *level* of
a branch is the number of its layer (0: the root).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TypeAlias

from nvrx_slurm.declared import Record

SPARE, FILTERED, DEAD = -1, -2, -3
Places: TypeAlias = list[int]
"""By leaf: an active rank (>= 0), SPARE, FILTERED (out by the world size filter), DEAD, or less: see `killed_by`."""


class TopologyError(ValueError):
    """The keys make no tree, or the world size filter returned an impossible size."""


class Level(Record):
    """Bounds of every branch at one depth; flags as in `LayerFlag`."""

    min_ranks: int = 1
    max_ranks: int | None = None
    reserve: bool = False
    backfill: bool = False


def killed_by(place: int) -> int:
    """Level of the branch that had too few healthy ranks left, for a `place` below DEAD."""
    return DEAD - 1 - place


class Topology:
    """The tree. Branches are numbered, parents before children; `spans[branch]` are its leaves."""

    def __init__(self, levels: Sequence[Level], keys: Mapping[int, Sequence[str]]) -> None:
        """`keys[slot]` has one key per level; raises TopologyError unless the first is the same for all."""
        self.levels = list(levels)
        self.slots: list[int] = []  # by leaf
        # by leaf: the branches around it, from the innermost to the root
        self.lineages: list[list[int]] = []
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
        # of the branches, in the order of their first slots
        numbers: dict[tuple[str, ...], int] = {}
        down = {
            path: [numbers.setdefault(path[: n + 1], len(numbers)) for n in range(len(path))]
            for path in paths
        }
        self.depth = [len(path) - 1 for path in numbers]  # by branch: its level
        self.spans = [range(0)] * len(numbers)
        for path in sorted(paths, key=down.__getitem__):
            self.slots += paths[path]
            self.lineages += [down[path][::-1]] * len(paths[path])
            for branch in down[path]:
                span = self.spans[branch] or range(len(self.slots) - len(paths[path]), 0)
                self.spans[branch] = range(span.start, len(self.slots))
        maxima = [self.levels[depth].max_ranks for depth in self.depth]
        self.limit = [
            len(span) if most is None else most
            for most, span in zip(maxima, self.spans, strict=True)
        ]

    def first_places(self, world_size_filter: Callable[[int], int] | None = None) -> Places:
        """Activate leaves in depth-first order, up to the `max_ranks` of every branch around them."""
        step = _Reassignment(self, [SPARE] * len(self.slots))
        step.activate_in_order(SPARE)
        return step.finish(world_size_filter)

    def next_places(
        self,
        places: Places,
        died: Iterable[int],
        world_size_filter: Callable[[int], int] | None = None,
    ) -> Places:
        """The places after the deaths of the leaves in `died`. `world_size_filter(n)` returns a number from 0 to n.

        Spares replace the dead, in rank order, nearest domain first, as far out as RESERVE allows. The highest active
        ranks of a BACKFILL domain then fill its gaps. The remaining ranks close up.
        """
        after = list(places)
        for leaf in died:
            after[leaf] = DEAD
        step = _Reassignment(self, after, active_order(places))
        step.replace_from_reserve()
        step.backfill()
        # close up the remaining gaps
        step.order = [leaf for leaf in step.order if after[leaf] > DEAD]
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
        # by branch: its leaves that were not yet looked at for a spare
        self._left: dict[int, Iterator[int]] = {}
        self._terminate_below_minimum()
        self.active = [
            sum(map((0).__le__, places[span.start : span.stop])) for span in topology.spans
        ]

    def _terminate_below_minimum(self) -> None:
        """Terminate branches with too few healthy leaves, children before parents."""
        for depth, span in zip(
            reversed(self.topology.depth), reversed(self.topology.spans), strict=True
        ):
            inside = self.places[span.start : span.stop]
            if sum(map(DEAD.__lt__, inside)) < self.topology.levels[depth].min_ranks:
                gone = DEAD - 1 - depth
                self.places[span.start : span.stop] = [
                    gone if place > DEAD else place for place in inside
                ]

    def _activate(self, leaf: int, active_rank: int) -> None:
        self.places[leaf] = active_rank
        for branch in self.topology.lineages[leaf]:
            self.active[branch] += 1

    def _fits(self, leaf: int) -> bool:
        """Whether no branch around `leaf` has its maximum of active leaves."""
        limit = self.topology.limit
        active = self.active
        return all(active[branch] < limit[branch] for branch in self.topology.lineages[leaf])

    def activate_in_order(self, status: int) -> None:
        """Append all leaves with this status to the active ranks, as far as the maxima allow."""
        for leaf, place in enumerate(self.places):
            if place == status and self._fits(leaf):
                self._activate(leaf, len(self.order))
                self.order.append(leaf)

    def replace_from_reserve(self) -> None:
        """Give the gaps to spares, lowest gap first."""
        for active_rank, leaf in enumerate(self.order):
            if self.places[leaf] <= DEAD and (spare := self._nearest_spare(leaf)) is not None:
                self.order[active_rank] = spare
                self._activate(spare, active_rank)

    def _nearest_spare(self, leaf: int) -> int | None:
        """The nearest spare: of the innermost branch that has one. Candidates only disappear: no branch looks at a leaf
        twice."""
        topology = self.topology
        places = self.places
        for branch in topology.lineages[leaf]:
            if not topology.levels[topology.depth[branch]].reserve:
                return None
            left = self._left.setdefault(branch, iter(topology.spans[branch]))
            spares = (
                leaf for leaf in left if places[leaf] in (SPARE, FILTERED) and self._fits(leaf)
            )
            if (spare := next(spares, None)) is not None:
                return spare
        return None

    def backfill(self) -> None:
        """In each BACKFILL domain, swap the lowest gaps with the highest active ranks."""
        levels = reversed(self.topology.levels)
        reach = sum(1 for _ in takewhile(lambda level: level.backfill, levels))
        if not reach:
            return
        # active ranks by the outermost branch to which the flag reaches
        domains: dict[int, list[int]] = {}
        order = self.order
        for rank, leaf in enumerate(order):
            domains.setdefault(self.topology.lineages[leaf][reach - 1], []).append(rank)
        for ranks in domains.values():
            is_gap = {rank: self.places[order[rank]] <= DEAD for rank in ranks}
            gaps = [rank for rank in ranks if is_gap[rank]]
            highest = [rank for rank in reversed(ranks) if not is_gap[rank]]
            for gap, rank in zip(gaps, highest, strict=False):
                if gap < rank:
                    order[gap], order[rank] = order[rank], order[gap]

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
