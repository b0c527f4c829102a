"""The arithmetic of a quorum against a slow oracle that counts sets, and what must hold for any two coordinators."""

import itertools

import pytest

from nvrx_slurm.core.election.quorum import Quorum
from nvrx_slurm.declared import replace

from .samples import a_plan

pytestmark = pytest.mark.fast


NODES = "0123"


def subsets(nodes):
    return (frozenset(some) for n in range(len(nodes) + 1) for some in itertools.combinations(nodes, n))


def every_quorum():
    """All states of the dead and the returned nodes, elected or not."""
    for dead, elected in itertools.product(subsets(NODES), (False, True)):
        for returned in subsets("".join(sorted(dead))):
            quorum = Quorum(len(NODES))
            quorum.dead, quorum.returned, quorum.elected = set(dead), returned, elected
            yield quorum


def oracle(quorum, members):
    """Most of each electorate that may be in use; an electorate without a living node decides nothing."""
    for voteless in {frozenset(quorum.dead), frozenset(quorum.dead - quorum.returned)}:
        voters = frozenset(NODES) - voteless
        votes, others = len(voters & members), len(voters - members)
        if voters and not (votes > others or (quorum.elected and votes == others)):
            return False
    nobody = not frozenset(NODES) - (quorum.dead - quorum.returned)
    return not nobody or len(members) > len(NODES) - len(members)


def test_each_state_of_four_nodes_counts_as_the_oracle_counts():
    for quorum, members in itertools.product(every_quorum(), subsets(NODES)):
        state = (sorted(quorum.dead), sorted(quorum.returned), quorum.elected, sorted(members))
        assert quorum.enough(members) == oracle(quorum, members), state
        away = frozenset(NODES) - members - (quorum.dead - quorum.returned)
        assert quorum.missing(members) == len(away), state


def test_two_coordinators_never_win_with_the_same_electorate():
    """Nor does a second one win beside an elected one that keeps its office with exactly half."""
    for first, second in itertools.product(subsets(NODES), repeat=2):
        if first & second:
            continue
        for quorum in every_quorum():
            if quorum.enough(first) and len(quorum.dead - quorum.returned) < len(NODES):
                quorum.elected = False
                assert not quorum.enough(second), (quorum.dead, quorum.returned, first, second)


def test_a_node_that_came_back_votes_once_all_others_know_it():
    quorum = Quorum(3)
    quorum.died("2", ["0", "1"])
    quorum.plan(1, 1, ["0", "1", "2"])
    assert (quorum.dead, quorum.returned) == ({"2"}, frozenset("2"))
    quorum.knows("0", 1, 1)
    quorum.plan(1, 2, ["0", "1", "2"])
    assert quorum.dead == {"2"}  # node 1 may not know it
    for key in "01":
        quorum.knows(key, 1, 2)
    quorum.plan(1, 3, ["0", "1", "2"])
    assert (quorum.dead, quorum.returned) == (set(), frozenset())


def test_an_older_plan_makes_no_node_know():
    quorum = Quorum(3)
    quorum.learn(replace(a_plan(5, term=2), dead=("2",), returned=("2",)))
    quorum.knows("0", 2, 4)
    quorum.knows("1", 1, 9)
    assert quorum.knowing == set()
    quorum.knows("0", 2, 5)
    assert quorum.knowing == {"0"}
