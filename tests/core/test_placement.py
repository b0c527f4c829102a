"""Who is active and who is spare: examples, and any situation against a slow version that is obviously right."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.core.coordinator.gathering import place
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
