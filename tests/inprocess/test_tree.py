"""Tree: what holds after any deaths, and each step of the algorithm by an example."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nvrx_slurm.core.inprocess.tree import (
    DEAD,
    FILTERED,
    SPARE,
    Level,
    Topology,
    TopologyError,
    active_order,
    healthy,
    killed_by,
)

pytestmark = pytest.mark.process


class Tree:
    """Slots instead of leaves."""

    def __init__(self, levels, keys, world_size_filter=None):
        self.levels, self.keys, self.filter = levels, keys, world_size_filter
        self.topology = Topology(levels, dict(enumerate(keys)))
        self.places = self.topology.first_places(world_size_filter)

    def lose(self, *died):
        leaves = [leaf for leaf, slot in enumerate(self.topology.slots) if slot in died and self.places[leaf] > DEAD]
        self.places = self.topology.next_places(self.places, leaves, self.filter)
        return self

    @property
    def active(self):
        return [self.topology.slots[leaf] for leaf in active_order(self.places)]

    @property
    def alive(self):
        return {self.topology.slots[leaf] for leaf in healthy(self.places)}

    def branches(self):
        """All branches of all levels, as slots."""
        found = {}
        for slot, keys in enumerate(self.keys):
            for depth in range(len(self.levels)):
                found.setdefault(keys[: depth + 1], set()).add(slot)
        return [(self.levels[len(path) - 1], slots) for path, slots in found.items()]


LEVELS = st.builds(
    lambda least, more, reserve, backfill: Level(
        least, None if more is None else max(1, least + more), reserve, backfill
    ),
    st.sampled_from([0, 1, 1, 1, 2, 3]),
    st.none() | st.integers(0, 4),
    st.booleans(),
    st.booleans(),
)


@st.composite
def stories(draw):
    """Levels, keys of each slot, divisor of the filter, and who dies in which round (any slots, dead ones too)."""
    size = draw(st.integers(1, 24))
    levels = draw(st.lists(LEVELS, min_size=1, max_size=3))
    inner = st.lists(st.sampled_from("abcd"), min_size=size, max_size=size)
    columns = [["root"] * size, *(draw(inner) for _ in levels[1:])]
    rounds = draw(st.lists(st.sets(st.integers(0, size - 1), max_size=5), max_size=6))
    divisor = draw(st.sampled_from([None, 1, 2, 3, 4, 5]))
    return levels, list(zip(*columns, strict=True)), divisor, rounds


def multiple_of(divisor):
    return None if divisor is None else lambda size: size - size % divisor


@settings(max_examples=80, deadline=None)
@given(stories())
def test_after_any_deaths(story):
    levels, keys, divisor, rounds = story
    tree = Tree(levels, keys, multiple_of(divisor))
    for died in [set(), *rounds]:
        before, was_alive = tree.active, tree.alive
        tree.lose(*died)
        assert tree.alive <= was_alive - died and set(tree.active) <= tree.alive
        assert len(tree.active) % (divisor or 1) == 0
        for level, slots in tree.branches():
            assert not 0 < len(slots & tree.alive) < level.min_ranks
            assert len(slots & set(tree.active)) <= (level.max_ranks or len(slots))
        if died.isdisjoint(was_alive):
            assert tree.active == before, "nothing happened, nothing moves"


@settings(max_examples=30, deadline=None)
@given(stories())
@example(([Level(1, None), Level(1, None)], [("root", "a")] * 8, 4, [{7}, {1}, {2}]))
def test_the_filter_never_takes_more_than_it_must(story):
    """Without limits, as many are active as if the survivors began anew."""
    levels, keys, divisor, rounds = story
    levels = [Level(level.min_ranks, None, level.reserve, level.backfill) for level in levels]
    divisor = divisor or 2  # without a filter there is nothing that could bring a rank back
    tree = Tree(levels, keys, multiple_of(divisor))
    for died in rounds:
        tree.lose(*died)
        assert len(tree.active) == len(tree.alive) - len(tree.alive) % divisor


def hosts(*sizes):
    return [("root", f"host{host}") for host, size in enumerate(sizes) for _ in range(size)]


ONE_HOST = [("root",)] * 8
OPEN, CLOSED = Level(reserve=True), Level()
FILLS = Level(backfill=True)


def test_the_places_of_spares_and_filtered_ranks():
    tree = Tree([Level(1, 5), Level(1, 2)], hosts(3, 3, 3))
    assert tree.places == [0, 1, SPARE, 2, 3, SPARE, 4, SPARE, SPARE]
    assert Tree([Level()], ONE_HOST, multiple_of(4)).lose(7).places.count(FILTERED) == 3


@pytest.mark.parametrize(
    "levels, keys, died, active",
    [
        # The nearest spare takes the place of the dead: of its own host, else of another one, where RESERVE allows.
        ([OPEN, Level(1, 2, reserve=True)], hosts(3, 3), [3], [0, 1, 5, 4]),
        ([Level(1, 4, reserve=True), Level(1, 2, reserve=True)], hosts(2, 3, 2), [0], [5, 1, 2, 3]),
        ([Level(1, 4, reserve=True), Level(1, 2, reserve=True)], hosts(2, 3, 2), [2], [0, 1, 4, 3]),
        ([Level(1, 4), Level(1, 2, reserve=True)], hosts(2, 3, 2), [0], [1, 2, 3]),
        ([OPEN, Level(1, 2)], hosts(3, 3), [3], [0, 1, 4]),
        # No host gets more than its maximum, although it has spares.
        ([OPEN, Level(1, 2, reserve=True)], hosts(3, 3), [0, 1], [2, 3, 4]),
        # The highest active rank of the domain fills the gap; without BACKFILL all move up.
        ([CLOSED, FILLS], hosts(4, 4), [1], [0, 3, 2, 4, 5, 6, 7]),
        ([FILLS, FILLS], hosts(4, 4), [1], [0, 7, 2, 3, 4, 5, 6]),
        ([FILLS, FILLS], hosts(4, 4), [1, 7], [0, 6, 2, 3, 4, 5]),
        ([CLOSED, CLOSED], hosts(4, 4), [1], [0, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_each_step(levels, keys, died, active):
    assert Tree(levels, keys).lose(*died).active == active


def test_a_branch_below_its_minimum_dies_with_its_reason():
    tree = Tree([Level(), Level(3)], hosts(3, 3)).lose(4)
    assert [killed_by(place) for place in tree.places[3:]] == [1, -1, 1]
    all_of_them = Tree([Level(5), Level(1)], hosts(3, 3)).lose(0, 5)
    assert all_of_them.alive == set() and killed_by(all_of_them.places[1]) == 0


@pytest.mark.parametrize("wanted", [9, -1, 2.0, None])
def test_a_filter_that_cannot_be_met(wanted):
    with pytest.raises(TopologyError, match=r"world_size_filter\(8\)"):
        Tree([Level()], ONE_HOST, lambda size: wanted)
