"""Tree against a second implementation that looks at every rank for every question."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nvrx_slurm.core.inprocess.tree import (
    DEAD,
    FILTERED,
    SPARE,
    Level,
    Places,
    Topology,
    TopologyError,
    active_order,
    healthy,
    killed_by,
)

Filter = Callable[[int], int] | None
Keys = list[tuple[str, ...]]  # by slot


class SlowTree:
    """Sets of slots. `active[i]` is the slot with the active rank i."""

    def __init__(self, levels: Sequence[Level], keys: Keys, world_size_filter: Filter = None) -> None:
        self.levels, self.keys, self.filter = levels, keys, world_size_filter
        self.alive = set(range(len(keys)))
        self.active: list[int] = []
        self.aside: set[int] = set()
        self.order = sorted(self.alive, key=lambda slot: [min(self.branch(slot, i)) for i in self.depths] + [slot])
        self.terminate()
        self.top_up(self.order)
        self.cut()

    @property
    def depths(self) -> range:
        return range(len(self.levels))

    def branch(self, slot: int, level: int) -> set[int]:
        mine = self.keys[slot][: level + 1]
        return {other for other, keys in enumerate(self.keys) if keys[: level + 1] == mine}

    def room(self, slot: int, active: Sequence[int]) -> bool:
        def free(level: int) -> bool:
            limit = self.levels[level].max_ranks
            return limit is None or len(self.branch(slot, level) & self.alive & set(active)) < limit

        return all(free(level) for level in self.depths)

    def terminate(self) -> None:
        for level in reversed(self.depths):
            for slot in range(len(self.keys)):
                healthy_here = self.branch(slot, level) & self.alive
                if len(healthy_here) < self.levels[level].min_ranks:
                    self.alive -= healthy_here

    def top_up(self, candidates: Sequence[int]) -> None:
        for slot in candidates:
            if slot in self.alive and slot not in self.active and self.room(slot, self.active):
                self.active.append(slot)

    def cut(self) -> None:
        if self.filter is not None and self.active:
            size = self.filter(len(self.active))
            self.aside = (self.aside | set(self.active[size:])) - set(self.active[:size])
            self.active = self.active[:size]

    def nearest_spare(self, dead: int, active: Sequence[int]) -> int | None:
        for level in reversed(self.depths):
            if not self.levels[level].reserve:
                return None
            for slot in self.order:
                if slot in self.branch(dead, level) & self.alive - set(active) and self.room(slot, active):
                    return slot
        return None

    def lose(self, died: set[int]) -> None:
        self.alive -= died
        self.terminate()
        was = self.active
        now = {rank: slot for rank, slot in enumerate(was) if slot in self.alive}
        gaps = [rank for rank in range(len(was)) if rank not in now]
        for gap in gaps:
            spare = self.nearest_spare(was[gap], list(now.values()))
            if spare is not None:
                now[gap] = spare
        self.backfill(was, now, [gap for gap in gaps if gap not in now])
        self.active = [now[rank] for rank in sorted(now)]
        if self.filter is not None:
            self.top_up([slot for slot in self.order if slot in self.aside])
            self.aside &= self.alive
        self.cut()

    def backfill(self, was: Sequence[int], now: dict[int, int], gaps: Sequence[int]) -> None:
        flagged = [level for level in self.depths if all(lower.backfill for lower in self.levels[level:])]
        if flagged:
            for gap in gaps:
                domain = self.branch(was[gap], min(flagged))
                highest = max((rank for rank, slot in now.items() if slot in domain), default=-1)
                if highest > gap:
                    now[gap] = now.pop(highest)


LEVELS = st.builds(
    lambda least, more, reserve, backfill: Level(
        least, None if more is None else max(1, least + more), reserve, backfill
    ),
    st.sampled_from([0, 1, 1, 1, 2, 3]),
    st.none() | st.integers(0, 4),
    st.booleans(),
    st.booleans(),
)
FILTERS = st.sampled_from([None, 1, 2, 3, 4, 5])


@st.composite
def stories(draw: st.DrawFn) -> tuple[list[Level], Keys, int | None, list[set[int]]]:
    """Levels, keys of each slot, divisor of the filter, and who dies in which round (any slots, dead ones too)."""
    size = draw(st.integers(1, 24))
    levels = draw(st.lists(LEVELS, min_size=1, max_size=3))
    inner = st.lists(st.sampled_from("abcd"), min_size=size, max_size=size)
    columns = [["root"] * size, *(draw(inner) for _ in levels[1:])]
    if draw(st.booleans()):
        columns[1:] = [sorted(column) for column in columns[1:]]
    rounds = draw(st.lists(st.sets(st.integers(0, size - 1), max_size=5), max_size=6))
    return levels, list(zip(*columns, strict=True)), draw(FILTERS), rounds


def multiple_of(divisor: int | None) -> Filter:
    return None if divisor is None else lambda size: size - size % divisor


class Fast:
    """The real one, with slots instead of leaves."""

    def __init__(self, levels: Sequence[Level], keys: Keys, world_size_filter: Filter = None) -> None:
        self.topology = Topology(levels, dict(enumerate(keys)))
        self.filter = world_size_filter
        self.places: Places = self.topology.first_places(world_size_filter)

    def lose(self, died: set[int]) -> None:
        before = list(self.places)
        leaves = [leaf for leaf, slot in enumerate(self.topology.slots) if slot in died and self.places[leaf] > DEAD]
        self.places = self.topology.next_places(before, leaves, self.filter)

    @property
    def active(self) -> list[int]:
        return [self.topology.slots[leaf] for leaf in active_order(self.places)]

    @property
    def alive(self) -> set[int]:
        return {self.topology.slots[leaf] for leaf in healthy(self.places)}


@settings(max_examples=120, deadline=None)
@given(stories())
def test_equal_to_the_slow_one(
    story: tuple[list[Level], Keys, int | None, list[set[int]]],
) -> None:
    levels, keys, divisor, rounds = story
    fast, slow = (kind(levels, keys, multiple_of(divisor)) for kind in (Fast, SlowTree))
    assert isinstance(fast, Fast)
    for died in [set(), *rounds]:
        if died:
            fast.lose(died)
            slow.lose(died)
        assert (fast.active, fast.alive) == (slow.active, slow.alive)
        assert [fast.topology.slots[leaf] for leaf in range(len(keys))] == slow.order


@settings(max_examples=50, deadline=None)
@given(stories())
@example(([Level(1, None), Level(1, None)], [("root", "a")] * 8, 4, [{7}, {1}, {2}]))
def test_the_filter_never_takes_more_than_it_must(story: tuple[list[Level], Keys, int | None, list[set[int]]]) -> None:
    """Without limits, as many are active as if the survivors began anew."""
    levels, keys, divisor, rounds = story
    levels = [Level(level.min_ranks, None, level.reserve, level.backfill) for level in levels]
    divisor = divisor or 2  # without a filter there is nothing that could bring a rank back
    fast = Fast(levels, keys, multiple_of(divisor))
    for died in rounds:
        fast.lose(died)
        assert len(fast.active) == len(fast.alive) - len(fast.alive) % divisor


# --- examples, by hand ------------------------------------------------------------------------------------------------


def hosts(*sizes: int) -> Keys:
    return [("root", f"host{host}") for host, size in enumerate(sizes) for _ in range(size)]


ONE_HOST = [("root",)] * 8


def test_the_places_of_spares_and_filtered_ranks() -> None:
    fast = Fast([Level(1, 5), Level(1, 2)], hosts(3, 3, 3))
    assert fast.places == [0, 1, SPARE, 2, 3, SPARE, 4, SPARE, SPARE]
    fast = Fast([Level()], ONE_HOST, multiple_of(4))
    fast.lose({7})
    assert fast.places.count(FILTERED) == 3


def test_a_branch_below_its_minimum_dies_with_its_reason() -> None:
    fast = Fast([Level(), Level(3)], hosts(3, 3))
    fast.lose({4})
    assert [killed_by(place) for place in fast.places[3:]] == [1, -1, 1]
    all_of_them = Fast([Level(5), Level(1)], hosts(3, 3))
    all_of_them.lose({0, 5})
    assert all_of_them.alive == set() and killed_by(all_of_them.places[1]) == 0


@pytest.mark.parametrize("wanted", [9, -1, 2.0, None])
def test_a_filter_that_cannot_be_met(wanted: object) -> None:
    with pytest.raises(TopologyError, match=r"world_size_filter\(8\)"):
        Fast([Level()], ONE_HOST, lambda size: wanted)  # type: ignore[arg-type, return-value]
