"""What users do with the wrapper besides failing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from ranks_harness import Job

QUICK = {
    "heartbeat_timeout": 3.0,  # processes of a loaded machine do not run every tenth of a second
    "heartbeat_interval": 0.1,
    "monitor_process_interval": 0.1,
    "progress_watchdog_interval": 0.1,
}


def all_return(job: Job, ranks: range | list[int]) -> None:
    for rank in ranks:
        job.await_event(rank, "returned")
        assert job.await_end(rank) == 0


@pytest.mark.parametrize("victims", [[], [2], [0], [0, 1]])
def test_a_process_group_from_the_environment_works_in_every_iteration(job: Job, victims: list[int]) -> None:
    job.start("gloo", 4, victims=victims)
    survivors = [rank for rank in range(4) if rank not in victims]
    all_return(job, survivors)
    for rank in survivors:
        assert [event["total"] for event in job.of(rank, "reduced")] == [4.0 - n for n in range(len(victims) + 1)]
    job.await_nothing_left()


def test_after_the_wrapper_everything_is_as_before(job: Job) -> None:
    job.start("after_the_wrapper", 3)
    assert set(job.await_all().values()) == {0}
    for rank in range(3):
        assert job.await_event(rank, "environment")["same"]
        assert job.await_event(rank, "threads")["names"] == ["MainThread"]
        assert len(job.of(rank, "returned")) == 2
    job.await_nothing_left()


def test_a_reserve_takes_over(job: Job) -> None:
    job.start("reserve", 3, victims=[0])
    all_return(job, [1, 2])
    assert not job.of(2, "entered", iteration=0)
    assert [job.of(rank, "entered", iteration=1)[0]["RANK"] for rank in (1, 2)] == ["0", "1"]
    assert job.of(2, "returned")[0]["value"] == "2 done"
    job.await_nothing_left()


def test_a_reserve_that_is_not_needed_returns_none(job: Job) -> None:
    job.start("reserve", 3, victims=[1])
    all_return(job, [0, 2])
    job.await_nothing_left()


def test_without_a_server_rank_0_may_die_too(job: Job) -> None:
    job.start("file_store", 3)
    all_return(job, [1, 2])
    assert [event["iteration"] for event in job.of(1, "entered")] == [0, 1, 2]
    job.await_nothing_left()


def test_a_monitor_process_that_dies_is_replaced(job: Job, tmp_path: Path) -> None:
    job.start("pidfile", 3, times=QUICK)
    first = job.await_events(range(3), "entered")[1]["monitor"]
    os.kill(int(first), signal.SIGKILL)
    pid = tmp_path / "monitor1.pid"
    job.until(lambda: pid.exists() and pid.read_text() not in ("", first), "another monitor process of rank 1")
    job.kill(1)
    all_return(job, [0, 2])
    assert "its process has ended" in (tmp_path / "monitor1.log").read_text()
    job.await_nothing_left()


def test_without_the_server_all_ranks_end_with_a_clear_reason(job: Job) -> None:
    job.start("pidfile", 3, times=QUICK)
    server = job.await_events(range(3), "entered")[0]["monitor"]
    os.kill(int(server), signal.SIGKILL)
    for rank in range(3):
        assert job.await_event(rank, "raised")["chain"][0].startswith("StoreLost: the store cannot be reached any more")
        assert job.await_end(rank) == 1
    job.await_nothing_left()


@pytest.mark.parametrize("lost", [[2], [1, 2]])
def test_a_lost_host_is_missed_by_its_heartbeats(job: Job, lost: list[int]) -> None:
    """Rank and monitor process are killed at once, so nobody is left there to tell."""
    job.start("pidfile", 4, times=QUICK)
    entered = job.await_events(range(4), "entered")
    for rank in lost:
        os.kill(int(entered[rank]["monitor"]), signal.SIGSTOP)  # the rank's watchdog replaces one that is dead
        job.kill(rank)
    all_return(job, [rank for rank in range(4) if rank not in lost])
    for rank in lost:
        os.kill(int(entered[rank]["monitor"]), signal.SIGKILL)
    job.await_nothing_left()


def test_a_witness_outside_is_believed_at_once(job: Job, tmp_path: Path) -> None:
    """The rank's own monitor process is stopped, and heartbeats would take their default 30 s."""
    board = tmp_path / "board.jsonl"
    env = {"NVRX_BOARD": str(board), "NVRX_CYCLE": "3"}
    job.start("pidfile", 3, env=env)
    monitor = int(job.await_events(range(3), "entered")[2]["monitor"])
    os.kill(monitor, signal.SIGSTOP)
    job.kill(2)
    lines = [
        "not json",
        json.dumps({"v": 1, "cycle": 2, "ranks": [0, 1], "why": "another cycle"}),
        json.dumps({"v": 1, "cycle": 3, "ranks": [2], "why": "its pidfd"}),
    ]
    board.write_text("\n".join(lines) + "\n")
    all_return(job, [0, 1])
    os.kill(monitor, signal.SIGKILL)
    job.await_nothing_left()


def test_an_atomic_block_is_finished_and_no_other_begun(job: Job) -> None:
    job.start("atomic", 2)
    all_return(job, range(2))
    assert job.of(0, "whole") and not job.of(0, "too late")
    job.await_nothing_left()


def test_hang_protection_can_be_switched_off(job: Job) -> None:
    short = {"soft_timeout": 0.3, "hard_timeout": 0.6, "monitor_thread_interval": 0.1}
    job.start("unprotected", 2, times={**short, **QUICK, "monitor_process_interval": 0.1, "heartbeat_timeout": 20.0})
    all_return(job, range(2))
    assert job.of(0, "returned")[0]["value"] == "iteration 0"
    job.await_nothing_left()


def test_a_signal_is_handled_at_once_at_a_barrier(job: Job, tmp_path: Path) -> None:
    job.start("late_signal", 2)
    job.await_events(range(2), "finalize")
    job.kill(0, signal.SIGTERM)
    assert job.await_end(0) == 5
    (tmp_path / "go").touch()
    all_return(job, [1])
    job.await_nothing_left()


def test_a_function_that_returns_on_some_ranks_only_is_called_again(job: Job) -> None:
    job.start("slow_return", 2, times={"completion_timeout": 0.3})
    all_return(job, range(2))
    assert len(job.of(0, "entered")) == 2
    job.await_nothing_left()


@pytest.mark.parametrize(("assignment", "settled"), [("default", 3), ("filter", 3), ("tree", 9)])
def test_a_hundred_restarts_leave_nothing_behind(job: Job, assignment: str, settled: int) -> None:
    """A Tree keeps its last eight assignments in the store."""
    job.start("many_restarts", 2, rounds=100, assignment=assignment, settled=settled)
    keys = job.await_event(0, "settled", timeout_s=60.0)["keys"]
    for rank in range(2):
        half, full = (job.await_event(rank, "held", iteration=n, timeout_s=60.0) for n in (50, 100))
        for what in ("fds", "threads", "monitor_fds", "children", "objects"):
            assert half[what] == full[what], what
        assert full["keys"] <= keys and half["keys"] <= keys
        assert full["objects"] == 1
        assert full["threads"] <= 1 + 3
    all_return(job, range(2))
    job.await_nothing_left()


@pytest.mark.parametrize("how", ["coroutine", "async generator"])
def test_a_function_that_returns_what_has_not_run_is_refused(job: Job, how: str) -> None:
    job.start("later", 2, module="scenarios_process", how=how)
    for rank in range(2):
        said = job.await_event(rank, "raised")["chain"][0]
        assert said.startswith(f"TypeError: the wrapped function returned {how} 'later.<locals>.")
        assert job.await_end(rank) == 1
        assert len(job.of(rank, "entered")) <= 2, "twice if the other one has left before this one came so far"
        assert "never awaited" not in job.err(rank).read_text()
    job.await_nothing_left()


def test_threads_that_outlive_the_function_are_left_alone(job: Job) -> None:
    job.start("outlived", 1)
    all_return(job, [0])
    job.await_nothing_left()


def test_the_interpreter_is_not_left_looking_for_an_exception(job: Job) -> None:
    job.start("profiled", 2)
    all_return(job, range(2))
    job.await_nothing_left()


@pytest.mark.parametrize("iteration", [0, 1])
def test_a_rank_that_dies_while_ranks_are_assigned(job: Job, iteration: int) -> None:
    """With a filter all ranks need its key: they do not wait for it until the filter's timeout of 60 s."""
    plugin = {"name": "rank_assignment", "how": "kill", "victims": [2], "iteration": iteration}
    job.start("filtered", 6, plugin=plugin)
    all_return(job, [0, 1, 4, 5])
    assert job.await_end(2) == -signal.SIGKILL
    assert job.await_event(3, "raised")["kind"] == "RankDiscarded"
    job.await_nothing_left()


def test_a_function_that_ends_by_itself_is_not_hit_in_its_clean_up(job: Job) -> None:
    job.start("cleans_up", 2)
    all_return(job, range(2))
    assert job.of(0, "cleaning") and job.of(0, "cleaned")
    job.await_nothing_left()


def test_a_store_that_cannot_be_made_says_why_whatever_its_text(job: Job) -> None:
    job.start("bad_store", 1)
    assert r"cannot do its work: ValueError: bad \udce4 name" in job.await_event(0, "raised")["chain"][0]
    assert job.await_end(0) == 1
    job.await_nothing_left()
