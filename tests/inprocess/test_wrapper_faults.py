"""Every way in which a rank can fail, with real processes: the others go on without it, or with it."""

from __future__ import annotations

import signal

import pytest
from ranks_harness import Job

SHORT = {  # so that hangs are found within a test's patience
    "soft_timeout": 1.0,
    "hard_timeout": 4.0,  # far enough for a loaded machine to notice the soft one first
    "progress_watchdog_interval": 0.1,
    "monitor_process_interval": 0.1,
    "monitor_thread_interval": 0.1,
    "termination_grace_time": 0.2,
}


def survivors_restart(job: Job, survivors: list[int], world_size: int) -> None:
    """They enter the function a second time, numbered anew without a gap, and return."""
    for rank, survivor in enumerate(survivors):
        second = job.await_event(survivor, "entered", iteration=1)
        assert (second["RANK"], second["WORLD_SIZE"]) == (str(rank), str(world_size))
        job.await_event(survivor, "returned")
    assert {job.await_end(survivor) for survivor in survivors} == {0}


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize(("how", "code"), [("sigkill", -signal.SIGKILL), ("os_exit", 9), ("sigterm", -signal.SIGTERM)])
def test_a_rank_that_dies_is_not_missed(job: Job, how: str, code: int, victim: int) -> None:
    job.start("fault_once", 3, victims=[victim], how=how)
    survivors_restart(job, [rank for rank in range(3) if rank != victim], 2)
    assert job.await_end(victim) == code
    job.await_nothing_left()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("how", "kind"), [("exit", "SystemExit"), ("keyboard", "KeyboardInterrupt"), ("abort", "RestartAbort")]
)
def test_a_rank_that_raises_a_base_exception_leaves(job: Job, how: str, kind: str, victim: int) -> None:
    job.start("fault_once", 3, victims=[victim], how=how)
    survivors_restart(job, [rank for rank in range(3) if rank != victim], 2)
    assert job.await_event(victim, "raised")["kind"] == kind
    assert job.await_end(victim) != 0
    job.await_nothing_left()


@pytest.mark.parametrize("how", ["sigstop", "gil", "c_lock"])
def test_a_rank_that_cannot_be_stopped_is_killed_after_the_hard_timeout(job: Job, how: str) -> None:
    job.start("fault_once", 3, victims=[1], how=how, times=SHORT)
    survivors_restart(job, [0, 2], 2)
    assert job.await_end(1) in (-signal.SIGTERM, -signal.SIGKILL)
    job.await_nothing_left()


def test_a_rank_that_pings_no_more_is_restarted_after_the_soft_timeout(job: Job) -> None:
    job.start("fault_once", 3, victims=[1], how="livelock", times=SHORT)
    survivors_restart(job, [0, 1, 2], 3)
    job.await_nothing_left()


@pytest.mark.parametrize("others", ["sleep", "lock", "block"])
def test_ranks_blocked_in_python_are_stopped_at_once(job: Job, others: str) -> None:
    job.start("fault_once", 2, victims=[0], how="raise", others=others)
    survivors_restart(job, [0, 1], 2)
    job.await_nothing_left()


def test_two_faults_at_once_are_one_restart(job: Job) -> None:
    job.start("fault_once", 4, victims=[1, 2], how="sigkill", times={"last_call_wait": 0.3})
    survivors_restart(job, [0, 3], 2)
    job.await_nothing_left()


def test_a_swallowed_exception_is_sent_again_and_debug_names_the_place(job: Job) -> None:
    env = {"NVRX_LOG_LEVEL": "DEBUG"}
    times = {**SHORT, "hard_timeout": 5.0}
    job.start("fault_once", 2, victims=[0], how="raise", others="swallow", times=times, env=env)
    job.await_event(1, "swallowed")
    survivors_restart(job, [0, 1], 2)
    said = job.err(1).read_text()
    assert "RankShouldRestart was suppressed at" in said
    assert "scenarios.py" in said.split("RankShouldRestart was suppressed at")[1].splitlines()[0]
    job.await_nothing_left()


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("surrogate", r"ValueError: bad \udce4 name"),
        ("raises", "NoText: (its text cannot be had: RuntimeError in __str__)"),
        ("none", "NoText: (its text cannot be had: TypeError in __str__)"),
    ],
)
def test_an_exception_with_an_odd_text_is_one_like_others(job: Job, how: str, told: str) -> None:
    """All ranks learn of it, and none is lost."""
    job.start("odd_exception", 2, how=how)
    survivors_restart(job, [0, 1], 2)
    assert job.of(1, "fault")
    for rank in range(2):
        assert f"rank 1: exception: {told}" in job.err(rank).read_text()
    job.await_nothing_left()


def test_a_text_that_exits_does_so(job: Job) -> None:
    """It cannot be told from a signal's handler that does while the text is read."""
    job.start("odd_exception", 2, how="exits")
    assert job.await_event(1, "raised")["kind"] == "SystemExit"
    assert job.of(1, "fault") and job.await_end(1) == 5
    survivors_restart(job, [0], 1)
    job.await_nothing_left()


def test_causes_that_go_round(job: Job) -> None:
    job.start("odd_exception", 2, how="circle")
    assert job.await_event(1, "raised")["kind"] == "SystemExit"
    assert job.await_end(1) == 4
    survivors_restart(job, [0], 1)
    job.await_nothing_left()
