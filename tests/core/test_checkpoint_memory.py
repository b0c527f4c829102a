"""Which generation a save replaces, what is held, whether there is room."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.core.checkpoint import memory
from nvrx_slurm.core.checkpoint.memory import MemoryEvent, MemoryState, RankMemory, Room
from nvrx_slurm.errors import UnknownTransition

pytestmark = pytest.mark.fast
WORLD = 2


def saved(*iterations):
    rank = RankMemory()
    for serial, iteration in enumerate(iterations):
        rank.begin(0, iteration, WORLD, serial)
        assert rank.complete(serial)
    return rank


def held(rank):
    return [one.iteration for one in rank.held(WORLD)]


def test_a_save_that_begins_again_takes_the_same_place():
    rank = saved(1)
    first = rank.begin(0, 2, WORLD, 1)
    assert rank.begin(0, 2, WORLD, 2) is first
    assert not rank.complete(1) and rank.complete(2)
    assert held(rank) == [2, 1]


def test_what_a_training_that_was_given_up_has_saved_is_outdated():
    assert held(saved(10, 20, 8)) == [8]
    assert held(saved(10, 20, 20)) == [20]
    assert held(saved(10, 20, 15)) == [15]  # 10 was replaced


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.sampled_from(["begin", "complete", "abandon", "check"]), max_size=40))
def test_the_newest_whole_state_is_never_lost(steps):
    rank, serial, newest = RankMemory(), 0, -1
    for step in steps:
        if step == "begin":
            serial += 1
            rank.begin(0, serial, WORLD, serial)
        elif step == "complete" and rank.complete(serial):
            newest = serial
        elif step == "abandon":
            rank.abandon()
        elif step == "check" and newest > 0:
            assert rank.checked(newest, newest)
        assert newest < 0 or held(rank)[0] == newest
        assert len({one.serial for one in rank.generations if one.holds}) == len(held(rank))


def test_each_row_of_the_table_and_no_other():
    for state in MemoryState:
        for event in MemoryEvent:
            one = memory.Generation(state)
            if (state, event) in memory.TABLE:
                one.step(event)
                assert one.state is memory.TABLE[state, event]
            else:
                with pytest.raises(UnknownTransition):
                    one.step(event)
    assert len(memory.TABLE) == 12


def test_common_iterations():
    one, two, three, again = (0, 1), (0, 2), (0, 3), (1, 2)
    assert memory.newest_common([[three, two], [two, one]]) == [two]
    assert memory.newest_common([[three, again], [three, again]]) == [again, three]
    assert memory.newest_common([[two], [again]]) == []  # the same iteration, done again
    assert memory.newest_common([[three, two], []]) == []


GB = 1 << 30


@pytest.mark.parametrize(
    "room, own, others, said",
    [
        (Room(100 * GB, "the machine"), 0, 7, ""),
        (Room(79 * GB, "the machine"), 0, 7, "80G"),
        (Room(1, "the machine"), 10 * GB, 0, ""),  # in its own place
        (Room(100 * GB, "the machine", 20 * GB), 0, 1, ""),
        (Room(100 * GB, "the machine", 19 * GB), 0, 1, "--ft-checkpoint-memory"),
        (Room(100 * GB, "the machine", 20 * GB, 11 * GB), 0, 0, "give 21504M"),
        (Room(5 * GB, "cgroup a"), 0, 0, "cgroup a"),
    ],
)
def test_room(room, own, others, said):
    told = memory.lacks(room, 5 * GB, own, others)
    assert said in told and bool(said) == bool(told)
