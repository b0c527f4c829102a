"""What ranks have found in memory: one sentence, and what the account makes of it."""

import pytest

from nvrx_slurm.core.account.account import Marks, Role, account
from nvrx_slurm.core.account.figures import lost_steps, to_json
from nvrx_slurm.core.checkpoint.loading import DISK, NOTHING, Found, common, nothing, outcome, source
from nvrx_slurm.core.coordinator.status import status
from nvrx_slurm.types import RestartRecord, SectionTime, Spent

from .test_account import CountedStory

pytestmark = pytest.mark.fast
MEMORY, COPY, LOST, MISFIT = Found


@pytest.mark.parametrize(
    "parts, words, where",
    [
        ([MEMORY, MEMORY], ["loaded from memory"], "memory"),
        ([MEMORY, COPY, COPY], ["loaded from memory", "copies", "ranks 1, 2"], "peer"),
        ([MEMORY, LOST], ["not whole on rank 1"], DISK),
        ([LOST, MISFIT], ["not whole on rank 0", "not fit on rank 1"], DISK),
        ([], [], DISK),
    ],
)
def test_each_outcome_names_the_ranks(parts, words, where):
    said = outcome(7, parts)
    assert said.startswith("iteration 7 ") and all(word in said for word in words)
    assert ("loaded" in said) == (where != DISK) or not parts
    assert source(parts) == where


@pytest.mark.parametrize(
    "held, others, word",
    [
        ([[], []], [0, 0], NOTHING),
        ([[(0, 4)], []], [0, 0], "nothing of rank 1"),
        ([[(0, 4)], [(0, 3)]], [0, 0], "no iteration"),
        ([[], []], [0, 4], "of 4 ranks, not of 2"),
    ],
)
def test_why_there_is_no_save_in_common(held, others, word):
    assert common(held) == [] and word in nothing(held, others)


def test_what_all_have_newest_first():
    one, two, three, again = (0, 1), (0, 2), (0, 3), (1, 2)
    assert common([[three, two], [two, three]]) == [three, two]
    assert common([[three, two], [two, one]]) == [two]
    assert common([[three, again], [three, again]]) == [again, three]
    assert common([[two], [again]]) == []  # the same iteration, done again
    assert common([[three, two], []]) == []


def of_node(*sections, **marks):
    spent = Spent(1, 0, 1.0, 4.0, 5.0, sections=sections)
    cycle = Marks(0.0, 50.0, tells_init=True, tells_steps=True, **marks)
    found = account(cycle, ((0.0, Role.ACTIVE),), spent)
    return found["init"], found["reload"]


def test_a_load_is_a_part_of_the_time_before_the_first_step():
    assert of_node() == (5.0, 0.0)
    assert of_node(loaded_s=2.0) == (3.0, 2.0)
    assert of_node(loaded_s=9.0) == (0.0, 5.0)
    assert of_node(SectionTime("load", 3.0), loaded_s=2.0) == (5.0, 3.0)  # the section tells it


def test_a_restart_tells_from_where_it_went_on_and_how_many_steps_are_done_again():
    story = CountedStory()
    story.play(["running 1 of 1 began_s=1000", "sleeps 20", "spent 0 0", "fails 0 -> STOPPING stop(0)"])
    story.play(["sleeps 5", "stops 0 -> RUNNING plan:1/1(0=0)", "loaded 0 1 4", "sleeps 10"])
    story.play(["spent 0 1", "fails 0 1 -> STOPPING stop(0)", "stops 0 1 -> RUNNING plan:2/2(0=0)", "loaded 0 1 3"])
    first, second = story.core.ledger.restarts
    assert (first.memory, first.source) == (4, "memory") and "iteration 4" in first.resumed
    assert second.source == ""  # what was loaded in an earlier cycle came too late
    (shown, _) = status(story.core, 0.0, story.now, 1000.0 + story.now)["incidents"]
    assert shown["resumed"] == first.resumed
    counted = story.account.count()
    assert [(cost.cycle, cost.reached, cost.steps) for cost in counted.costs[-2:]] == [(0, 7, 3), (1, 7, -1)]
    assert set(to_json(counted.account)["reloads"]) == {"memory"}


@pytest.mark.parametrize(
    "told, steps",
    [
        ({"iteration": 9, "checkpoint": 2}, 7),
        ({"iteration": 9, "checkpoint": 2, "memory": 8, "source": "memory"}, 1),
        ({"iteration": 9, "checkpoint": 2, "memory": 8, "source": "disk"}, 7),
        ({"iteration": 9, "memory": 8, "source": "peer", "steps": 3}, 3),  # counted goes before what the output says
    ],
)
def test_steps_that_are_done_again(told, steps):
    assert lost_steps(RestartRecord(0, 0.0, 0.0, "", **told)) == steps
