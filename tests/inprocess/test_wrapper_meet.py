"""Where process groups and stores meet: ranks that fail before or in `init_process_group`, and one wrapped function
after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks_harness import Job

MEET = {"last_call_wait": 0.0, "heartbeat_interval": 0.1, "progress_watchdog_interval": 0.1}


def all_return(job: Job, ranks: Any, value: Any) -> None:
    for rank in ranks:
        job.await_event(rank, "returned", value=value)
        assert job.await_end(rank) == 0
    job.await_nothing_left()


def iterations(job: Job, rank: int) -> list[int]:
    return [event["iteration"] for event in job.of(rank, "entered")]


def test_a_rank_that_raises_before_the_others_have_met_counts_as_they_do(job: Job) -> None:
    """torch numbers groups: those that were in `init_process_group` had one, it had none, so they met no more."""
    job.start("fails_before_meeting", 3, module="scenarios_meet", victim=1, how="raise", times=MEET)
    job.await_event(1, "fault")
    all_return(job, range(3), 3.0)
    for rank in range(3):
        assert iterations(job, rank) == [0, 1]
        assert [event["groups"] for event in job.of(rank, "entered")] == [0, 0]


def test_some_have_met_when_a_rank_raises_and_one_has_half_a_group(job: Job) -> None:
    job.start("half_made", 3, module="scenarios_meet", times=MEET)
    assert job.await_event(2, "half")["groups"] == 1
    all_return(job, range(3), 3.0)
    for rank in range(3):
        assert iterations(job, rank) == [0, 1]
        assert [(event["groups"], event["names"]) for event in job.of(rank, "entered")] == [(0, 0), (0, 0)]


def test_the_hook_for_uncaught_exceptions_does_not_grow(job: Job) -> None:
    job.start("hooked", 1, module="scenarios_meet", times=MEET)
    assert job.await_event(0, "after")["same"]
    said = [(event["iteration"], event["at_start"], event["wrapped"]) for event in job.of(0, "hooked")]
    assert said == [(n, True, True) for n in range(4)]
    assert job.await_end(0) == 0


@pytest.fixture
def agent(job: Job) -> Any:
    """The store of torchrun's agent: at MASTER_PORT before the ranks, and after them."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", job.port, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("file_store", [False, True])
def test_a_store_that_outlives_the_call_serves_the_next_one(
    job: Job, file_store: bool, request: pytest.FixtureRequest
) -> None:
    store = None if file_store else request.getfixturevalue("agent")
    job.start("two_calls", 2, module="scenarios_meet", file_store=file_store, times=MEET)
    all_return(job, range(2), "second of 2")
    del store


def test_torchruns_second_start_works_in_the_store_of_the_first(job: Job, agent: Any) -> None:
    for count in ("0", "1"):
        job.start("gives_up", 2, module="scenarios_meet", env={"TORCHELASTIC_RESTART_COUNT": count}, times=MEET)
        for rank in range(2):
            job.await_event(rank, "raised" if count == "0" else "returned")
            assert job.await_end(rank) == (1 if count == "0" else 0)
        job.await_nothing_left()
    del agent


FIRST = {"raise": "exception: OSError: no data set", "kill": "terminated: ", "exit": "base exception: SystemExit: 3"}


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("how", FIRST)
def test_the_first_rank_fails_before_it_serves_the_process_groups_store(job: Job, how: str, first: int) -> None:
    """The others are in torch's connect to a port nobody listens at, or just about to be. `first` is rank 0 of
    iteration 0."""
    job.start("fails_before_meeting", 3, module="scenarios_meet", victim=first, how=how, shift=3 - first, times=MEET)
    job.await_event(first, "fault")
    alive = [rank for rank in range(3) if rank != first or how == "raise"]
    all_return(job, alive, float(len(alive)))
    for rank in alive:
        assert iterations(job, rank) == [0, 1]
        assert f"iteration 0 was interrupted: rank {first}: {FIRST[how]}" in job.err(rank).read_text()


def test_the_first_rank_hangs_before_it_serves_the_process_groups_store(job: Job, tmp_path: Path) -> None:
    """Nothing runs in its process any more; the others are free before their own hard timeout, which is the same.

    They have been in torch's connect since long before the soft timeout.
    """
    times = {**MEET, "soft_timeout": 2.0, "hard_timeout": 14.0, "termination_grace_time": 0.1}
    job.start("fails_before_meeting", 3, module="scenarios_meet", victim=0, how="hang", times=times)
    job.await_event(0, "fault")
    all_return(job, [1, 2], 2.0)
    assert job.await_end(0) < 0
    assert "fallback server listens" in (tmp_path / "monitor0.log").read_text()


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_who_is_left_calls_a_second_function(job: Job, how: str) -> None:
    """And loses nobody by it: a fault there is restarted as ever."""
    job.start("two_calls", 3, module="scenarios_meet", victim=1, how=how, fault_in_second=2, times=MEET)
    job.await_event(1, "fault")
    all_return(job, [0, 2], "second of 2")
    for rank in (0, 2):
        said = [(event["iteration"], event["WORLD_SIZE"]) for event in job.of(rank, "entered", second=True)]
        assert said == [(0, "2"), (1, "2")]


def test_who_is_left_calls_a_second_function_without_rank_0(job: Job) -> None:
    """The store needs no rank; the coordinator is with the first rank that is left."""
    arguments: dict[str, Any] = {"victim": 0, "how": "kill", "fault_in_second": 1, "file_store": True}
    job.start("two_calls", 3, module="scenarios_meet", times=MEET, **arguments)
    job.await_event(0, "fault")
    all_return(job, [1, 2], "second of 2")


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_without_rank_0_there_is_no_store_for_a_second_function(job: Job, how: str) -> None:
    job.start("two_calls", 3, module="scenarios_meet", victim=0, how=how, times=MEET)
    job.await_event(0, "fault")
    for rank in (1, 2):
        assert job.await_event(rank, "returned")["value"] == "first"
        first = job.await_event(rank, "raised")["chain"][0]
        place = f"127.0.0.1:{job.port}"
        assert first.startswith(
            f"StoreLost: no store for another call: rank 0, which would serve it at {place}, has left"
        )
        assert job.await_end(rank) == 1
    job.await_nothing_left()


def test_who_left_and_comes_back_is_told_that_it_is_out(job: Job) -> None:
    arguments: dict[str, Any] = {"victim": 1, "how": "exit", "comes_back": True, "file_store": True}
    job.start("two_calls", 3, module="scenarios_meet", times=MEET, **arguments)
    assert job.await_event(1, "raised", kind="RankDiscarded")["chain"][0].startswith("RankDiscarded: the others have")
    all_return(job, [0, 2], "second of 2")
