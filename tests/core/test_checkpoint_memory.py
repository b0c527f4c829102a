"""Which state a save replaces, what is held, whether there is room."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.core.checkpoint import memory
from nvrx_slurm.core.checkpoint.memory import GENERATIONS, Generation, RankMemory, Room

pytestmark = pytest.mark.fast
WORLD = 2


def begin(rank, iteration, place=None):
    """A save, in memory of what was given up or in `place`."""
    given_up = rank.make_place()
    rank.writing = Generation(0, iteration, WORLD, place if given_up is None else given_up.memory)
    return rank.writing


def saved(*iterations):
    rank = RankMemory()
    for iteration in iterations:
        rank.complete(begin(rank, iteration, object()))
    return rank


def held(rank):
    return [one.iteration for one in rank.held]


def test_a_save_that_begins_again_takes_the_same_place():
    rank = saved(1)
    first = begin(rank, 2, object())
    again = begin(rank, 2)
    assert again.memory is first.memory
    rank.complete(again)
    assert held(rank) == [2, 1]


def test_what_a_training_that_was_given_up_has_saved_is_outdated():
    assert held(saved(10, 20, 8)) == [8]
    assert held(saved(10, 20, 20)) == [20]
    assert held(saved(10, 20, 15)) == [15]  # 10 was replaced


def test_what_comes_from_another_node_replaces_the_older_ones_only():
    rank = saved(3)
    for iteration in (9, 8):
        rank.complete(Generation(0, iteration, WORLD), is_last=False)
    assert held(rank) == [9, 8]
    rank.complete(Generation(0, 4, WORLD), is_last=False)
    assert held(rank) == [9, 8]


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.sampled_from(["begin", "complete", "abandon", "check", "damage"]), max_size=40))
def test_the_newest_whole_state_is_never_lost(steps):
    rank, iteration, newest = RankMemory(), 0, None
    for step in steps:
        if step == "begin":
            iteration += 1
            begin(rank, iteration, object())
        elif step == "complete" and rank.writing is not None:
            newest = rank.writing
            rank.complete(newest)
        elif step == "abandon":
            rank.writing = None
        elif step == "check" and newest is not None:
            assert rank.checked(newest, newest.iteration)
        elif step == "damage" and len(rank.held) > 1:
            older = rank.held[-1]
            assert not rank.checked(older, -1) and older not in rank.held
        assert newest is None or rank.held[0] is newest
        assert len(set(rank.memories)) == len(rank.memories) <= GENERATIONS


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
