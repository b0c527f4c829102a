"""Which node gets whose copies, and what the ranks of a plan can load."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.core.checkpoint.copies import Resumption, partners
from nvrx_slurm.types import InMemory, Kept, MemoryPlan, Node

pytestmark = pytest.mark.fast


def node(number, domain="", order=(), host=""):
    return Node(f"n{number}", number, host or f"host{number}", "", 2, order, domain=domain)


def domains(names):
    return [node(number, domain=name) for number, name in enumerate(names)]


def test_the_next_node_where_there_are_no_domains():
    assert partners(domains("  ")) == {"n0": "n1", "n1": "n0"}
    assert partners([node(0), node(1), node(2)]) == {"n0": "n1", "n1": "n2", "n2": "n0"}
    assert partners([node(0)]) == partners([]) == {}


def test_agents_of_one_host_are_no_partners():
    nodes = [node(number, host="ab"[number // 2]) for number in range(4)]
    assert partners(nodes) == {"n0": "n2", "n1": "n3", "n2": "n0", "n3": "n1"}


def test_the_switch_counts_where_the_domain_is_too_large():
    nodes = [node(number, "one", (number % 2, number)) for number in range(4)]
    assert partners(nodes) == {"n0": "n1", "n2": "n3", "n1": "n0", "n3": "n2"}


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.sampled_from("abcd"), min_size=2, max_size=24))
def test_each_node_gets_the_copies_of_one_of_another_domain(names):
    nodes = domains("".join(names))
    found = partners(nodes)
    assert sorted(found) == sorted(found.values()) == sorted(one.node_id for one in nodes)
    assert all(one != other for one, other in found.items())
    if 2 * max(map(names.count, names)) <= len(names):
        assert all(names[int(one[1:])] != names[int(other[1:])] for one, other in found.items())


NODES = [node(0), node(1)]


def kept(ranks, *saves, world=4):
    return tuple(Kept(rank, world, *save) for save in saves for rank in ranks)


def held(**nodes):
    return {node_id: InMemory(f"10.0.0.{node_id[1]}", 9, some) for node_id, some in nodes.items()}


def wanted(found, node_id):
    plan = found.plans([])[node_id]
    return [(one.rank, one.cycle, one.iteration, one.address[-1]) for one in plan.wanted]


def test_a_node_that_has_nothing_fetches_all():
    saves = ((0, 20), (0, 19))
    found = Resumption(NODES, held(n0=kept((0, 1, 2, 3), *saves), n1=()))
    assert found.saves == [*saves]
    assert wanted(found, "n0") == []
    assert wanted(found, "n1") == [(rank, *save, "0") for save in saves for rank in (2, 3)]
    assert "iteration 20" in found.sentence()


def test_what_is_here_may_be_damaged_and_has_another_source():
    found = Resumption(NODES, held(n0=kept((0, 1, 2, 3), (0, 20)), n1=kept((2, 3), (0, 20))))
    assert wanted(found, "n1") == [(2, 0, 20, "0"), (3, 0, 20, "0")]


def test_the_newest_that_all_ranks_have():
    some = held(n0=kept((0, 1), (1, 21), (0, 20)), n1=kept((2, 3), (0, 20), (0, 19)))
    assert Resumption(NODES, some).saves == [(0, 20)]
    assert Resumption(NODES, some, before=20).saves == []


def test_an_iteration_that_was_done_again_is_another_save():
    found = Resumption(NODES, held(n0=kept((0, 1), (1, 20)), n1=kept((2, 3), (0, 20))))
    assert found.saves == [] and "ranks 2, 3 missing" in found.sentence()


def test_a_later_cycle_counts_even_if_it_is_not_as_far():
    every = (0, 1, 2, 3)
    found = Resumption(NODES, held(n0=kept(every, (0, 20), (1, 8))))
    assert found.saves == [(1, 8), (0, 20)]


def test_states_of_another_number_of_ranks_do_not_count():
    found = Resumption(NODES, held(n0=kept((0, 1, 2, 3), (0, 20), world=8)))
    assert found.saves == [] and found.sentence() == ""


def test_a_single_node_has_its_copies_on_a_spare():
    some = held(n0=(), n7=())
    assert Resumption([node(0)], some).plans([node(3), node(7)]) == {"n0": MemoryPlan("10.0.0.7", 9)}
    assert Resumption([node(1)], some).plans([node(7)]) == {}  # it has no keeper
