"""The function is stopped where it is, and only there; an action that it has begun is not left half done."""

from __future__ import annotations

import sys

import pytest
from ranks_harness import Job

MIDDLES = ["logging", "logging, SIGURG handled", "starting processes"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.TaskGroup is new in Python 3.11")
def test_a_task_group_is_stopped_like_the_function(job: Job) -> None:
    job.start("stopped_in", 2, what="task group")
    job.all_return([0, 1])
    assert job.of(1, "entered", iteration=1)


def test_a_rank_that_is_leaving_when_it_is_stopped_leaves(job: Job) -> None:
    job.start("stopped_in", 2, what="exit")
    assert job.await_event(1, "raised")["kind"] == "SystemExit"
    assert job.await_end(1) == 5
    assert job.await_event(0, "entered", WORLD_SIZE="1")
    job.all_return([0])


@pytest.mark.parametrize("what", MIDDLES)
def test_nothing_is_left_half_done(job: Job, what: str) -> None:
    """Another thread would wait for a lock or a dead thread for ever, the next iteration compute otherwise."""
    job.start("over_and_over", 2, what=what, rounds=8)
    assert job.await_event(1, "returned")["value"] == []
    assert "RankShouldRestart was" not in job.err(1).read_text()
    job.all_return([0, 1])
