"""Plug-ins: when they are called, and what happens when one of them fails, dies, lies, or never returns."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from ranks_harness import Job
from test_wrapper_faults import KILLED, QUICK, all_return, train

# A bound on how long a rank may take between a fault and the barrier, short enough for a test.
TIMES = {
    **QUICK,
    "soft_timeout": 0.4,
    "hard_timeout": 0.8,
    "barrier_timeout": 1.2,
    "completion_timeout": 0.5,
    "heartbeat_timeout": 1.0,
}


def plugin(name: str, how: str, victim: int = 1, iteration: int = 0) -> dict[str, Any]:
    return {"name": name, "how": how, "victims": [victim], "iteration": iteration}


def start(job: Job, size: int, faults: dict[int, str], wanted: dict[str, Any] | None = None, **more: Any) -> None:
    given = {"plugin": wanted} if wanted else {}
    train(job, size, *([faults] if faults else []), plugins=True, **given, **more)
    if wanted:
        job.await_event(wanted["victims"][0], "fault")


def test_each_plugin_is_called_in_its_place(job: Job) -> None:
    start(job, 2, {1: "raise"})
    all_return(job, range(2))
    begin = ["rank_assignment", "initialize", "health_check", "entered"]
    for rank in range(2):
        names = [event["event"] for event in job.events[rank]]
        assert names[:4] == begin
        assert sorted(names[4:6]) == ["abort", "finalize"]  # abort comes first; a thread of its own reports it
        assert names[6:] == ["health_check", *begin, "completion", "returned"]


@pytest.mark.parametrize(
    ("name", "how"),
    [("initialize", how) for how in ("raise", "sigkill", "abort", "wrong")]
    + [("health_check", "raise"), ("health_check", "wrong"), ("finalize", "raise"), ("finalize", "sigkill")]
    + [("rank_assignment", "sigkill"), ("rank_assignment", "abort")],
)
def test_a_plugin_that_fails_on_one_rank(job: Job, name: str, how: str) -> None:
    """Only an Exception in `initialize` is tried again; in all other cases the others go on without the rank."""
    iteration = 1 if (name, how) == ("rank_assignment", "sigkill") else 0
    start(job, 3, {0: "raise"} if name == "finalize" or iteration else {}, plugin(name, how, iteration=iteration))
    again = (name, how) == ("initialize", "raise")
    all_return(job, [0, 1, 2] if again else [0, 2], iteration + 1)
    if how == "sigkill":
        assert job.await_end(1) == -signal.SIGKILL
    elif not again:
        raised = job.await_event(1, "raised")
        kinds = {"raise": "ValueError", "abort": "RestartAbort", "wrong": "InternalError"}
        unfit = name == "health_check" and how == "raise"
        assert raised["kind"] == ("HealthCheckError" if unfit else kinds[how])
        assert not unfit or raised["chain"][1].startswith("ValueError")
        assert job.of(1, "terminate")
        assert (name, how) != ("finalize", "raise") or "fault of rank 0" in raised["chain"][-1]


@pytest.mark.parametrize("how", ["raise", "wrong", "none"])
def test_an_abort_that_fails_changes_nothing(job: Job, how: str) -> None:
    start(job, 2, {0: "raise"}, plugin("abort", how))
    all_return(job, range(2))


@pytest.mark.parametrize(
    ("how", "kind"), [("raise", "ValueError"), ("abort", "RestartAbort"), ("wrong", "InternalError")]
)
def test_a_completion_that_fails_fails_its_rank(job: Job, how: str, kind: str) -> None:
    start(job, 3, {}, plugin("completion", how))
    assert job.await_event(1, "raised")["kind"] == kind
    assert job.await_end(1) == 1
    assert all(job.await_event(rank, "returned") for rank in (0, 2))
    job.await_nothing_left()


@pytest.mark.parametrize(
    ("how", "kind", "code"), [("raise", "RestartAbort", 1), ("wrong", "RestartAbort", 1), ("exit", "SystemExit", 7)]
)
def test_a_terminate_that_fails(job: Job, how: str, kind: str, code: int) -> None:
    """An Exception does not replace the reason why the rank left; a BaseException does, and it is not called again."""
    start(job, 3, {1: "abort"}, plugin("terminate", how))
    assert job.await_event(1, "raised")["kind"] == kind
    assert (len(job.of(1, "fault")), job.await_end(1)) == (1, code)
    assert how == "exit" or "terminate failed\nTraceback" in job.err(1).read_text()
    all_return(job, [0, 2])


@pytest.mark.parametrize(
    ("name", "victim", "iteration"),
    [("abort", 1, 0), ("health_check", 1, 0), ("rank_assignment", 0, 1)],
)
def test_a_plugin_that_never_returns_costs_its_rank_only(job: Job, name: str, victim: int, iteration: int) -> None:
    """Its rank is killed; the others go on, though they may have begun the iteration without it."""
    how = "met_never" if iteration or name == "rank_assignment" else "never"
    fault = 2 if how == "met_never" else 0
    start(job, 3, {fault: "raise"} if name != "health_check" else {}, plugin(name, how, victim, iteration), times=TIMES)
    survivors = [rank for rank in range(3) if rank != victim]
    after = iteration + 1 if how == "met_never" or name == "health_check" else 1
    all_return(job, survivors, after)
    assert job.await_end(victim) in KILLED


def test_an_initialize_that_never_returns_is_stopped_like_the_function(job: Job) -> None:
    start(job, 3, {0: "raise"}, plugin("initialize", "met_never"), times=TIMES)
    all_return(job, range(3))


def test_a_terminate_that_never_returns_is_killed(job: Job) -> None:
    start(job, 2, {1: "exit"}, plugin("terminate", "forever"), times=TIMES)
    all_return(job, [0])
    assert job.await_end(1) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("name", "iteration", "handler"),
    [
        ("abort", 0, True),
        ("rank_assignment", 1, False),
        ("rank_assignment", 1, True),
    ],
)
def test_sigterm_in_the_middle_of_a_restart(job: Job, name: str, iteration: int, handler: bool) -> None:
    """Without a handler the rank dies; with one it leaves, after the grace time if `abort` does not return."""
    times = {"termination_grace_time": 0.5}
    wanted = plugin(name, "never", 1, iteration)
    start(job, 3, {0: "raise"} if name != "health_check" else {}, wanted, handler=handler, times=times)
    job.kill(1, signal.SIGTERM)
    all_return(job, [0, 2], iteration + 1)
    assert job.await_end(1) == (5 if handler else -signal.SIGTERM)
    if handler:
        assert job.await_event(1, "raised")["kind"] == "SystemExit"
        assert ("abort did not end" in job.err(1).read_text()) == (name == "abort")


@pytest.mark.parametrize("iteration", [0, 1])
def test_a_rank_that_dies_while_ranks_are_assigned(job: Job, iteration: int) -> None:
    """With a filter all ranks need its key: they do not wait for it until the filter's timeout of 60 s."""
    start(
        job,
        6,
        {0: "raise"} if iteration else {},
        plugin("rank_assignment", "sigkill", 2, iteration),
        assignment="pairs",
    )
    for rank in (0, 1, 4, 5):
        job.await_event(rank, "returned")
        assert job.of(rank, "entered")[-1]["WORLD_SIZE"] == "4"
    assert job.await_end(2) == -signal.SIGKILL
    assert job.await_event(3, "raised")["kind"] == "RankDiscarded"
    job.await_nothing_left()


@pytest.mark.parametrize(("how", "finalizes", "code"), [("os_exit", False, 9), ("exit", True, 7)])
def test_the_process_ends_in_the_middle_of_a_restart(job: Job, how: str, finalizes: bool, code: int) -> None:
    """At once, or after the interpreter's own end, with the threads of the helpers waiting in C."""
    start(job, 2, {0: "raise"}, plugin("finalize", how), finalizes=finalizes)
    all_return(job, [0])
    assert job.await_end(1) == code
