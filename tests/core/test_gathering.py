"""Which nodes are active, and which are spares: examples, then any situation; without segments also by a slow rule."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.core.coordinator.members import complete_segments
from nvrx_slurm.core.coordinator.placement import place
from nvrx_slurm.declared import replace
from nvrx_slurm.types import Node

from .samples import a_node

pytestmark = pytest.mark.fast


NODES = [a_node(rank) for rank in range(12)]


def slow(ready, previous, min_nodes):
    """First give the survivors their old slots; then, slot by slot, the first in line sits down."""
    if len(ready) < min_nodes:
        return None
    line = sorted((node for node in ready), key=lambda node: (node.order, node.infra_rank))
    slots = [None] * min_nodes
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
def test_as_the_slow_version_says(ready, before, min_nodes):
    previous = {slot: node.node_id for slot, node in enumerate(before)}
    placement = place(ready, previous, min_nodes)
    got = None if placement is None else (list(placement.active), list(placement.spares))
    assert got == slow(ready, previous, min_nodes)


def test_the_topology_comes_before_the_infra_order():
    near, far = Node("a", 5, "a", "", 1, order=(0, 1)), Node("b", 0, "b", "", 1, order=(1, 0))
    placement = place([far, near], {}, 1)
    assert placement.active == ("a",)


def nodes(shape):
    """Nodes 0, 1, ... in the domains that the letters name; a space is a node that is not there."""
    return [replace(a_node(rank), domain=name) for rank, name in enumerate(shape) if name != " "]


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


@pytest.mark.parametrize("shape, before, least, segment, expected", EXAMPLES)
def test_example(shape, before, least, segment, expected):
    """`before`: infra ranks of the last plan; `expected`: of the active nodes by group rank, and of the spares."""
    placement = place(nodes(shape), {g: f"h{rank}.0" for g, rank in enumerate(before)}, least, segment)
    both = () if placement is None else (placement.active, placement.spares)
    found = tuple([int(name[1:].split(".")[0]) for name in names] for names in both)
    assert found == (expected or ())


def test_the_sentence_says_what_moved():
    placement = place(nodes("aaa bbbbcccc"), {g: f"h{g}.0" for g in EIGHT}, 8, 4)
    assert placement.why.startswith("4 of 8 active nodes keep their group rank; new: h8 as")


Case = tuple[list[Node], int, int, dict[int, str]]


@st.composite
def losses(draw):
    """The nodes that survive a cycle, MIN, N, and the plan of that cycle (where one was possible)."""
    everything, segment = nodes(draw(st.text("abcd", min_size=1, max_size=20))), draw(st.integers(1, 4))
    min_nodes = segment * draw(st.integers(1, 4))
    first = place(everything, {}, min_nodes, segment)
    gone = draw(st.sets(st.sampled_from(everything), max_size=6))
    previous = {} if first is None else dict(enumerate(first.active))
    return [node for node in everything if node not in gone], min_nodes, segment, previous


@given(losses())
def test_segments_are_whole_contiguous_and_of_one_domain(case):
    left, min_nodes, segment, previous = case
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
def test_as_many_as_possible_keep_their_group_rank(case):
    """In each domain the segments that have most survivors stay, as many as it has nodes for."""
    left, min_nodes, segment, previous = case
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
def test_one_domain_and_segments_of_one_are_the_simple_mode(case):
    left, min_nodes, _, previous = case
    alike = [replace(node, domain="a") for node in left]
    assert place(alike, previous, min_nodes, 1) == place(alike, previous, min_nodes)


def test_complete_segments_are_counted_by_domain():
    assert [complete_segments(nodes("aaaaabbb"), segment) for segment in (1, 2, 3, 4, 5, 6)] == [8, 3, 2, 1, 1, 0]
