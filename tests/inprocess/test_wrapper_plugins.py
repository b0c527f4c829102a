"""Plug-ins: when they are called, and what happens when one of them fails, dies, lies, or never returns."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from ranks_harness import Job

FAULTY = {"victims": [1], "iteration": 0}
# A bound on how long a rank may take between a fault and the barrier, short enough for a test.
TIMES = {
    "soft_timeout": 0.4,
    "hard_timeout": 0.8,
    "barrier_timeout": 1.2,
    "heartbeat_timeout": 1.0,
    "heartbeat_interval": 0.2,
    "monitor_process_interval": 0.1,
    "monitor_thread_interval": 0.1,
    "progress_watchdog_interval": 0.1,
    "termination_grace_time": 0.1,
}


def names(job: Job, rank: int) -> list[str]:
    return [event["event"] for event in job.events[rank]]


def restarted(job: Job, survivors: list[int], iteration: int = 1) -> None:
    for place, rank in enumerate(survivors):
        job.await_event(rank, "entered", RANK=str(place), WORLD_SIZE=str(len(survivors)), iteration=iteration)
        job.await_event(rank, "returned")
        assert job.await_end(rank) == 0


def test_each_plugin_is_called_in_its_place(job: Job) -> None:
    job.start("with_plugins", 2, victims=[1], together=True)
    assert set(job.await_all().values()) == {0}
    begin = ["rank_assignment", "initialize", "health_check", "entered"]
    for rank in range(2):
        said = names(job, rank)
        assert said[:4] == begin
        assert sorted(said[4:6]) == ["abort", "finalize"]  # abort comes first; a thread of its own tells it
        assert said[6:] == ["health_check", *begin, "completion", "returned"]
    job.await_nothing_left()


@pytest.mark.parametrize("how", ["raise", "kill", "abort", "wrong"])
@pytest.mark.parametrize("name", ["initialize", "health_check", "finalize", "rank_assignment"])
def test_a_plugin_that_fails_on_one_rank(job: Job, name: str, how: str) -> None:
    """Only an Exception in `initialize` is tried again; in all other cases the others go on without the rank."""
    if (name, how) == ("rank_assignment", "wrong"):
        pytest.skip("its own result is ignored by this scenario")
    victims = [0] if name == "finalize" else []
    iteration = 1 if (name, how) == ("rank_assignment", "kill") else 0
    plugin = {"name": name, "how": how, **FAULTY, "iteration": iteration}
    job.start("with_plugins", 3, victims=victims or ([0] if iteration else []), plugin=plugin)
    job.await_event(1, "fault")
    again = (name, how) == ("initialize", "raise")
    restarted(job, [0, 1, 2] if again else [0, 2], iteration + 1)
    if how == "kill":
        assert job.await_end(1) == -signal.SIGKILL
    elif not again:
        raised: dict[str, Any] = job.await_event(1, "raised")
        kinds = {"raise": "ValueError", "abort": "RestartAbort", "wrong": "InternalError"}
        unfit = name == "health_check" and how == "raise"
        assert raised["kind"] == ("HealthCheckError" if unfit else kinds[how])
        assert not unfit or raised["chain"][1].startswith("ValueError")
        assert "terminate" in names(job, 1)
        assert (name, how) != ("finalize", "raise") or "fault of rank 0" in raised["chain"][-1]
    job.await_nothing_left()


@pytest.mark.parametrize("how", ["raise", "wrong", "none"])
def test_an_abort_that_fails_changes_nothing(job: Job, how: str) -> None:
    job.start("with_plugins", 2, victims=[0], plugin={"name": "abort", "how": how, **FAULTY})
    job.await_event(1, "fault")
    restarted(job, [0, 1])
    job.await_nothing_left()


@pytest.mark.parametrize("name", ["initialize", "finalize", "abort"])
def test_a_plugin_that_never_returns_costs_its_rank_only(job: Job, name: str) -> None:
    # The fault of rank 0 has to find rank 1 in `initialize`, while it is what calls the others.
    how, survivors = ("met_never", [0, 1, 2]) if name == "initialize" else ("never", [0, 2])
    job.start("with_plugins", 3, victims=[0], plugin={"name": name, "how": how, **FAULTY}, times=TIMES)
    job.await_event(1, "fault")
    restarted(job, survivors)  # `initialize` is interrupted like the function
    job.await_end(1)
    job.await_nothing_left()


def test_a_terminate_that_never_returns_is_killed(job: Job) -> None:
    job.start("terminate_blocks", 2, module="scenarios_leave", times=TIMES)
    job.await_event(0, "returned")
    job.await_event(1, "terminate")
    assert job.await_all() == {0: 0, 1: -9}
    assert "terminate has made no progress for" in job.err(1).read_text()
    job.await_nothing_left()


def test_the_run_ends_for_all_with_the_same_reason(job: Job) -> None:
    """A RestartAbort on all ranks is raised from what failed last."""
    job.start("always_fails", 3)
    job.await_all()
    for rank in range(3):
        chain = job.await_event(rank, "raised")["chain"]
        assert chain[0] == "RestartAbort: not tried again: max_iterations=2 tries are used up"
        assert "ValueError: fault of rank 1 in iteration 1" in chain[-1]
    job.await_nothing_left()
