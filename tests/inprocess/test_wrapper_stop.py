"""The function is stopped where it is, and only there; what it was about to do is not lost."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from ranks_harness import Job

QUICK = {
    "soft_timeout": 1.0,
    "hard_timeout": 3.0,
    "heartbeat_interval": 0.1,
    "monitor_process_interval": 0.1,
    "monitor_thread_interval": 0.1,
    "progress_watchdog_interval": 0.1,
}

MIDDLES = [
    "logging",
    "logging, SIGURG handled",
    "logging, a signal pipe",
    "profiling",
    "autocast",
    "starting processes",
]


def start(job: Job, scenario: str, world_size: int, **arguments: Any) -> None:
    job.start(scenario, world_size, module="scenarios_stop", **arguments)


def returned(job: Job, ranks: list[int]) -> None:
    for rank in ranks:
        job.await_event(rank, "returned")
        assert job.await_end(rank) == 0


def test_a_thread_that_is_being_started_is_not_hit(job: Job) -> None:
    """It would die, and its starter wait for it until the next try, a soft timeout (60 s) later."""
    start(job, "starts_threads", 3, rounds=20)
    returned(job, [0, 1, 2])
    for rank in (1, 2):
        assert "RankShouldRestart" not in job.err(rank).read_text()
    job.await_nothing_left()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="asyncio.TaskGroup is new in Python 3.11")
def test_a_task_group_is_stopped_like_the_function(job: Job) -> None:
    start(job, "stopped_in", 2, what="task group")
    job.await_event(1, "met")
    returned(job, [0, 1])
    assert job.of(1, "entered", iteration=1)
    job.await_nothing_left()


@pytest.mark.parametrize("what", ["exit", "handler"])
def test_who_is_leaving_when_it_is_stopped_leaves(job: Job, what: str) -> None:
    start(job, "stopped_in", 2, what=what)
    job.await_event(1, "met")
    assert job.await_event(1, "raised")["kind"] == "SystemExit"
    assert job.await_end(1) == 5
    assert job.await_event(0, "entered", WORLD_SIZE="1")
    returned(job, [0])
    job.await_nothing_left()


@pytest.mark.parametrize("block", ["atomic", "disable_hang_protection"])
def test_a_block_that_is_left_open_is_none_in_the_next_iteration(job: Job, block: str) -> None:
    """Neither the first restart waits for it, nor does the second one's soft timeout not apply."""
    start(job, "left_open", 1, block=block, times={**QUICK, "hard_timeout": 25.0})
    assert job.await_event(0, "open")["blocks"] == 1
    returned(job, [0])
    assert [event["iteration"] for event in job.of(0, "entered")] == [0, 1, 2]
    job.await_nothing_left()


def test_a_finalize_with_a_bound_of_its_own_is_no_hang(job: Job) -> None:
    start(job, "long_finalize", 2, times={**QUICK, "hard_timeout": 2.0})
    returned(job, [0, 1])
    for rank in range(2):
        assert [event["iteration"] for event in job.of(rank, "entered")] == [0, 1]
    job.await_nothing_left()


@pytest.mark.parametrize("what", MIDDLES)
def test_nothing_is_left_half_done(job: Job, what: str) -> None:
    """Another thread that logs would wait for ever, the next iteration compute in another precision."""
    start(job, "over_and_over", 2, what=what, rounds=30)
    assert job.await_event(1, "returned")["value"] == []
    assert "signal wakeup fd" not in job.err(1).read_text()
    returned(job, [0, 1])
    job.await_nothing_left()


def test_a_function_that_computes_steps_aside_for_the_abort(job: Job) -> None:
    """Where it can: on a busy machine the abort may take longer than it waits."""
    start(job, "computes_while_aborted", 2)
    during = [during for before, during in job.await_event(1, "returned")["value"] if before]
    assert during and min(during) < 10
    returned(job, [0, 1])


def test_a_handler_that_begins_during_the_abort_is_stopped(job: Job) -> None:
    """It may be in the middle of what has the main thread step aside."""
    start(job, "handler_during_abort", 2, times={**QUICK, "soft_timeout": 20.0, "hard_timeout": 25.0})
    assert job.await_event(1, "returned")["value"] == ["handler"]
    returned(job, [0, 1])
