"""Placement in segments (`--ft-segment`): examples, and what must hold in any situation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.core.coordinator.gathering import place
from nvrx_slurm.core.coordinator.roster import complete_segments
from nvrx_slurm.types import Node

from .samples import a_node


def nodes(shape: str) -> list[Node]:
    """Nodes 0, 1, ... in the domains that the letters name; a space is a node that is not there."""
    return [replace(a_node(rank), domain=name) for rank, name in enumerate(shape) if name != " "]


def ranks_of(shape: str, before: Sequence[int], min_nodes: int, segment: int) -> tuple[list[int], list[int]] | None:
    """Infra ranks of the active nodes by group rank, and of the spares; `before`: those of the last plan."""
    previous = {g: f"h{rank}.0" for g, rank in enumerate(before)}
    placement = place(nodes(shape), previous, min_nodes, segment)
    if placement is None:
        return None
    numbers = [[int(name[1:].split(".")[0]) for name in names] for names in (placement.active, placement.spares)]
    return numbers[0], numbers[1]


EIGHT = [0, 1, 2, 3, 4, 5, 6, 7]
EXAMPLES = [
    # the first plan: whole segments only, domains by their first node
    ("aaaabbbb", [], 4, 4, ([0, 1, 2, 3], [4, 5, 6, 7])),
    ("aaabbbba", [], 4, 4, ([0, 1, 2, 7], [3, 4, 5, 6])),
    ("aaabbbb", [], 4, 4, ([3, 4, 5, 6], [0, 1, 2])),
    ("abababab", [], 8, 2, ([0, 2, 4, 6, 1, 3, 5, 7], [])),
    ("aaaaaabbbbbb", [], 8, 4, ([0, 1, 2, 3, 6, 7, 8, 9], [4, 5, 10, 11])),
    ("aaabbbcc", [], 8, 4, None),
    ("aaaaaaabb", [], 8, 4, None),
    ("abc", [], 2, 1, ([0, 1], [2])),
    # a spare of the domain fills the gap
    ("aaa aabbbbbb", [0, 1, 2, 3, 6, 7, 8, 9], 8, 4, ([0, 1, 2, 4, 6, 7, 8, 9], [5, 10, 11])),
    # no spare of the domain: the segment moves, and its survivors are spares
    ("aaa bbbbcccc", EIGHT, 8, 4, ([8, 9, 10, 11, 4, 5, 6, 7], [0, 1, 2])),
    # two broken segments of one domain: the fuller one takes a survivor of the other
    ("a  a aaabbbb", EIGHT, 8, 4, ([8, 9, 10, 11, 0, 5, 6, 7], [3])),
    # the spare comes before such a survivor
    ("aa   aaaabbbb", EIGHT, 8, 4, ([9, 10, 11, 12, 8, 5, 6, 7], [0, 1])),
    # nothing is possible any more
    ("aaa bbbbcc", EIGHT, 8, 4, None),
    # all of a domain is lost
    ("    bbbbcccc", EIGHT, 8, 4, ([8, 9, 10, 11, 4, 5, 6, 7], [])),
]


@pytest.mark.parametrize(("shape", "before", "least", "segment", "expected"), EXAMPLES)
def test_example(
    shape: str, before: list[int], least: int, segment: int, expected: tuple[list[int], list[int]] | None
) -> None:
    assert ranks_of(shape, before, least, segment) == expected


def test_the_sentence_says_what_moved() -> None:
    placement = place(nodes("aaa bbbbcccc"), {g: f"h{g}.0" for g in EIGHT}, 8, 4)
    assert placement is not None and placement.why.startswith("4 of 8 active nodes keep their group rank; new: h8 as")


# --- any situation ---------------------------------------------------------------------------------------------

SHAPES = st.text("abcd", min_size=1, max_size=20)


@st.composite
def losses(draw: st.DrawFn) -> tuple[list[Node], list[Node], int, int, dict[int, str]]:
    """All nodes, those that survive a cycle, MIN, N, and the plan of that cycle (where one was possible)."""
    everything, segment = nodes(draw(SHAPES)), draw(st.integers(1, 4))
    min_nodes = segment * draw(st.integers(1, 4))
    first = place(everything, {}, min_nodes, segment)
    gone = draw(st.sets(st.sampled_from(everything), max_size=6))
    previous = {} if first is None else dict(enumerate(first.active))
    return everything, [node for node in everything if node not in gone], min_nodes, segment, previous


@given(losses())
def test_segments_are_whole_contiguous_and_of_one_domain(
    case: tuple[list[Node], list[Node], int, int, dict[int, str]],
) -> None:
    _, left, min_nodes, segment, previous = case
    placement = place(left, previous, min_nodes, segment)
    domain_of = {node.node_id: node.domain for node in left}
    possible = sum(n // segment for n in Counter(domain_of.values()).values()) >= min_nodes // segment
    assert (placement is not None) == possible
    if placement is None:
        return
    assert sorted([*placement.active, *placement.spares]) == sorted(domain_of)
    assert len(placement.active) == min_nodes
    for start in range(0, min_nodes, segment):
        assert len({domain_of[node_id] for node_id in placement.active[start : start + segment]}) == 1


@given(losses())
def test_as_many_as_possible_keep_their_group_rank(
    case: tuple[list[Node], list[Node], int, int, dict[int, str]],
) -> None:
    """In each domain the segments that have most survivors stay, as many as it has nodes for."""
    _, left, min_nodes, segment, previous = case
    placement = place(left, previous, min_nodes, segment)
    if placement is None:
        return
    domain_of = {node.node_id: node.domain for node in left}
    most = 0
    for domain, count in Counter(domain_of.values()).items():
        here = Counter(g // segment for g, node_id in previous.items() if domain_of.get(node_id) == domain)
        most += sum(sorted(here.values(), reverse=True)[: count // segment])
    assert sum(placement.active[g] == node_id for g, node_id in previous.items()) == most


@given(losses())
def test_one_domain_and_segments_of_one_are_the_simple_mode(
    case: tuple[list[Node], list[Node], int, int, dict[int, str]],
) -> None:
    _, left, min_nodes, _, previous = case
    alike = [replace(node, domain="a") for node in left]
    assert place(alike, previous, min_nodes, 1) == place(alike, previous, min_nodes)


def test_complete_segments_are_counted_by_domain() -> None:
    assert [complete_segments(nodes("aaaaabbb"), segment) for segment in (1, 2, 3, 4, 5, 6)] == [8, 3, 2, 1, 1, 0]
