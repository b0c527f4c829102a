"""Who is active and who is spare: examples, and any situation against a slow version that is obviously right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.core.job.placement import Placement, complete_segments, place
from nvrx_slurm.types import Node

from .samples import a_node

NODES = [a_node(rank) for rank in range(12)]


def slow(ready: list[Node], previous: dict[int, str], min_nodes: int) -> tuple[list[str], list[str]] | None:
    """First give the survivors their old slots; then, slot by slot, the first in line sits down."""
    if len(ready) < min_nodes:
        return None
    line = sorted((node for node in ready), key=lambda node: (node.order, node.infra_rank))
    slots: list[str | None] = [None] * min_nodes
    for slot in range(min_nodes):
        for node in line:
            if previous.get(slot) == node.node_id:
                slots[slot] = node.node_id
    line = [node for node in line if node.node_id not in slots]
    for slot in range(min_nodes):
        if slots[slot] is None:
            slots[slot] = line.pop(0).node_id
    return [str(slot) for slot in slots], [node.node_id for node in line]


@given(
    ready=st.lists(st.sampled_from(NODES), unique_by=lambda node: node.node_id),
    before=st.lists(st.sampled_from(NODES), unique_by=lambda node: node.node_id, max_size=6),
    min_nodes=st.integers(1, 8),
)
def test_as_the_slow_version_says(ready: list[Node], before: list[Node], min_nodes: int) -> None:
    previous = {slot: node.node_id for slot, node in enumerate(before)}
    placement = place(ready, previous, min_nodes)
    got = None if placement is None else (list(placement.active), list(placement.spares))
    assert got == slow(ready, previous, min_nodes)


def test_the_first_plan_goes_by_infra_order() -> None:
    assert place([NODES[4], NODES[1], NODES[3]], {}, 2) == Placement(
        ("h1.0", "h3.0"), ("h4.0",), "2 active and 1 spare nodes in infra-rank order"
    )


def test_the_topology_comes_before_the_infra_order() -> None:
    near, far = Node("a", 5, "a", "", 1, order=(0, 1)), Node("b", 0, "b", "", 1, order=(1, 0))
    placement = place([far, near], {}, 1)
    assert placement is not None
    assert placement.active == ("a",)


def test_a_vacant_place_goes_to_the_first_spare_and_nobody_else_moves() -> None:
    placement = place([NODES[0], NODES[2], NODES[8], NODES[9]], {0: "h0.0", 1: "h1.0", 2: "h2.0"}, 3)
    assert placement is not None
    assert placement.active == ("h0.0", "h8.0", "h2.0")
    assert placement.why == "2 of 3 active nodes keep their group rank; new: h8 as group rank 1"


def test_many_promotions_are_not_all_named() -> None:
    placement = place(NODES, {slot: f"gone{slot}" for slot in range(6)}, 6)
    assert placement is not None
    assert placement.why.endswith("h3 as group rank 3, ...")


def test_too_few() -> None:
    assert place([NODES[0]], {}, 2) is None


# --- segments -------------------------------------------------------------------------------------------------------


def in_domain(rank: int, domain: str) -> Node:
    return replace(a_node(rank), domain=domain)


RACKS = [in_domain(rank, "AABBC"[rank // 4]) for rank in range(20)]  # A: 0-7, B: 8-15, C: 16-19


def seated(ready: list[Node], previous: dict[int, int], min_nodes: int, segment: int) -> list[int] | None:
    """Infra ranks by group rank."""
    by_id = {node.node_id: node.infra_rank for node in RACKS}
    before = {g: RACKS[rank].node_id for g, rank in previous.items()}
    placement = place(ready, before, min_nodes, segment)
    return None if placement is None else [by_id[node_id] for node_id in placement.active]


@given(
    ready=st.lists(st.sampled_from(RACKS), unique_by=lambda node: node.node_id),
    before=st.permutations(range(20)),
    segments=st.integers(1, 3),
    segment=st.integers(1, 5),
)
def test_segments_are_complete_and_in_one_domain(
    ready: list[Node], before: list[int], segments: int, segment: int
) -> None:
    previous = dict(enumerate(before[: segments * segment]))
    got = seated(ready, previous, segments * segment, segment)
    sizes = Counter(node.domain for node in ready)
    assert (got is not None) == (complete_segments(sizes.values(), segment) >= segments)
    if got is None:
        return
    assert len(set(got)) == len(got) and set(got) <= {node.infra_rank for node in ready}
    for at in range(0, len(got), segment):
        assert len({RACKS[rank].domain for rank in got[at : at + segment]}) == 1
    assert seated(list(reversed(ready)), previous, segments * segment, segment) == got


@given(lost=st.sets(st.integers(0, 19), max_size=6), segment=st.sampled_from([1, 2, 4]))
def test_survivors_stay_where_their_domain_can_fill_the_segment(lost: set[int], segment: int) -> None:
    first = seated(RACKS, {}, 8, segment)
    assert first == list(range(8))
    got = seated([node for node in RACKS if node.infra_rank not in lost], dict(enumerate(first)), 8, segment)
    if got is None:
        return
    room = sum(rank not in lost for rank in range(8)) // segment  # of A, in which all were
    whole = [at for at in range(0, 8, segment) if not lost & set(range(at, at + segment))]
    for at in whole[:room]:
        assert got[at : at + segment] == first[at : at + segment]
    stays = [g for g in range(8) if got[g] == first[g]]
    assert len({g // segment for g in stays}) <= room


def test_a_broken_segment_is_filled_from_its_domain_or_replaced_as_a_whole() -> None:
    first = dict(enumerate([0, 1, 2, 3, 8, 9, 10, 11]))
    without = [node for node in RACKS if node.infra_rank != 9]
    assert seated(without, first, 8, 4) == [0, 1, 2, 3, 8, 12, 10, 11]  # a spare of B
    without = [node for node in RACKS if node.infra_rank not in (9, 12, 13, 14, 15)]
    assert seated(without, first, 8, 4) == [0, 1, 2, 3, 4, 5, 6, 7]  # B has three nodes left: a segment of A
    without = [node for node in without if node.infra_rank not in (4, 5)]
    assert seated(without, first, 8, 4) == [0, 1, 2, 3, 16, 17, 18, 19]
    assert seated([node for node in without if node.infra_rank != 19], first, 8, 4) is None


def test_survivors_of_one_broken_segment_fill_another() -> None:
    first = dict(enumerate(range(8)))
    without = [node for node in RACKS if node.infra_rank not in (1, 6)]
    assert seated(without, first, 8, 4) == [0, 4, 2, 3, 8, 9, 10, 11]


def test_domains_come_by_their_first_node() -> None:
    nodes = [in_domain(rank, "BA"[rank % 2]) for rank in range(4)]
    placement = place(nodes, {}, 4, 2)
    assert placement is not None
    assert placement.active == tuple(nodes[rank].node_id for rank in (0, 2, 1, 3))
    assert placement.why.endswith("2 segments of 2")
