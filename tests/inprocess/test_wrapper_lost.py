"""What the wrapper relies on is taken away: monitor processes, the coordinator, the store."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ranks_harness import Job, free_port

QUICK = {
    "heartbeat_timeout": 3.0,
    "heartbeat_interval": 0.1,
    "monitor_process_interval": 0.1,
    "progress_watchdog_interval": 0.1,
}

TAKEN_OVER = {
    **QUICK,
    "soft_timeout": 1.5,
    "hard_timeout": 1.8,
    "barrier_timeout": 2.5,
    "heartbeat_timeout": 2.0,
    "last_call_wait": 0.0,
    "termination_grace_time": 0.5,
    "monitor_thread_interval": 0.1,
}


def monitor(tmp_path: Path, rank: int) -> int:
    text = (tmp_path / f"monitor{rank}.pid").read_text()
    return int(text or 0)  # 0: it is just being written


def all_say_that_the_store_is_lost(job: Job, ranks: range) -> None:
    for rank in ranks:
        first = job.await_event(rank, "raised")["chain"][0]
        assert first.startswith(f"StoreLost: the store cannot be reached any more (127.0.0.1:{job.port}, ")
        assert job.await_end(rank) == 1


def test_the_process_that_serves_the_store_is_stopped(job: Job, tmp_path: Path) -> None:
    job.start("one_fault", 3, module="scenarios_lost", times=QUICK)
    job.await_events(range(3), "entered")
    os.kill(monitor(tmp_path, 0), signal.SIGSTOP)
    all_say_that_the_store_is_lost(job, range(3))
    job.await_nothing_left()


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("active", [3, 2])
def test_the_host_of_the_store_is_silent(job: Job, tmp_path: Path, active: int, fault: bool) -> None:
    """No connection breaks. A reserve waits in the wrapper; with `fault` rank 1 just then asks the store something."""
    job.start("one_fault", 3, module="scenarios_lost", active=active, victim=1, times=QUICK)
    job.await_events(range(active), "entered")
    job.await_events(range(3), "initialize")  # a reserve has entered, too: at entry longer bounds apply
    server = monitor(tmp_path, 0)
    job.kill(0, signal.SIGSTOP)
    os.kill(server, signal.SIGSTOP)
    if fault:
        (tmp_path / "fault").touch()
        job.await_event(1, "fault")
    all_say_that_the_store_is_lost(job, range(1, 3))
    for rank in (1, 2):
        assert f"the store at 127.0.0.1:{job.port} is lost" in job.err(rank).read_text()
    job.kill(0)
    os.kill(server, signal.SIGKILL)
    job.await_nothing_left()


def test_the_host_of_the_store_is_silent_between_two_iterations(job: Job, tmp_path: Path) -> None:
    """Rank 1 waits at the barrier, rank 2 is about to come."""
    job.start("one_fault", 3, module="scenarios_lost", victim=1, slow=[2], times=QUICK)
    job.await_events(range(3), "entered")
    server = monitor(tmp_path, 0)
    (tmp_path / "fault").touch()
    job.await_events(range(3), "finalize")
    job.kill(0, signal.SIGSTOP)
    os.kill(server, signal.SIGSTOP)
    (tmp_path / "go").touch()
    all_say_that_the_store_is_lost(job, range(1, 3))
    job.kill(0)
    os.kill(server, signal.SIGKILL)
    job.await_nothing_left()


def test_a_monitor_process_that_is_stopped_is_replaced(job: Job, tmp_path: Path) -> None:
    """Before the other ranks miss its heartbeats, so that its rank is none the worse."""
    job.start("one_fault", 3, module="scenarios_lost", victim=1, times=QUICK)
    job.await_events(range(3), "entered")
    first = monitor(tmp_path, 2)
    os.kill(first, signal.SIGSTOP)
    job.until(lambda: monitor(tmp_path, 2) != first, "another monitor process of rank 2")
    (tmp_path / "fault").touch()
    for rank in range(3):
        job.await_event(rank, "entered", iteration=1, WORLD_SIZE="3")
        assert job.await_end(rank) == 0
    job.await_nothing_left()


# --- a store elsewhere ------------------------------------------------------------------------------------------------


@pytest.fixture(params=["a file", "a server outside", "a store_factory"])
def elsewhere(request: pytest.FixtureRequest, job: Job) -> dict[str, Any]:
    """Arguments for ranks whose store is in none of their monitor processes."""
    if request.param == "a file":
        return {"file_store": True}
    job.start_rank("serve", 9, 0, module="scenarios_lost")
    job.await_event(9, "serving")
    if request.param == "a server outside":
        return {}
    return {"own_store": job.port, "env": {"MASTER_PORT": str(free_port())}}


def all_restart(job: Job, ranks: range) -> None:
    for place, rank in enumerate(ranks):
        job.await_event(rank, "entered", iteration=1, RANK=str(place), WORLD_SIZE=str(len(ranks)))
        job.await_event(rank, "returned")
        assert job.await_end(rank) == 0
    if 9 in job.pids:
        job.kill(9)
    job.await_nothing_left()


def replaced(job: Job, tmp_path: Path, rank: int) -> None:
    """Its monitor process is killed, and there is another one."""
    first = monitor(tmp_path, rank)
    os.kill(first, signal.SIGKILL)
    job.until(lambda: monitor(tmp_path, rank) not in (0, first), f"another monitor process of rank {rank}")


def test_the_monitor_process_of_rank_0_dies_in_the_function(
    job: Job, tmp_path: Path, elsewhere: dict[str, Any]
) -> None:
    job.start("one_fault", 3, module="scenarios_lost", victim=1, times=QUICK, **elsewhere)
    job.await_events(range(3), "entered")
    replaced(job, tmp_path, 0)
    (tmp_path / "fault").touch()
    all_restart(job, range(3))


def test_the_coordinator_dies_between_a_fault_and_the_verdict(
    job: Job, tmp_path: Path, elsewhere: dict[str, Any]
) -> None:
    """Rank 2 is not at the barrier yet. Another coordinator goes on where this one was."""
    job.start("one_fault", 3, module="scenarios_lost", victim=1, slow=[2], times=QUICK, **elsewhere)
    job.await_events(range(3), "entered")
    (tmp_path / "fault").touch()
    job.await_events(range(3), "finalize")
    replaced(job, tmp_path, 0)
    (tmp_path / "go").touch()
    all_restart(job, range(3))


@pytest.mark.parametrize("elsewhere", ["a file", "a store_factory"], indirect=True)
def test_the_coordinator_dies_and_is_not_replaced(job: Job, tmp_path: Path, elsewhere: dict[str, Any]) -> None:
    """With rank 0, as a host does, while rank 1 is at the barrier and rank 2 is not: one of them takes over."""
    job.start("one_fault", 3, module="scenarios_lost", victim=1, slow=[2], times=TAKEN_OVER, **elsewhere)
    job.await_events(range(3), "entered")
    (tmp_path / "fault").touch()
    job.await_events(range(3), "finalize")
    coordinator = monitor(tmp_path, 0)
    job.kill(0, signal.SIGSTOP)  # so that it replaces nothing
    os.kill(coordinator, signal.SIGKILL)
    job.kill(0)
    (tmp_path / "go").touch()
    all_restart(job, range(1, 3))
    assert job.await_end(0) == -signal.SIGKILL
    assert any("no verdict for" in job.err(rank).read_text() for rank in (1, 2))


def test_the_coordinator_dies_with_the_store(job: Job, tmp_path: Path) -> None:
    """As before, but the store's server was in that process."""
    job.start("one_fault", 3, module="scenarios_lost", victim=1, slow=[2], times=QUICK)
    job.await_events(range(3), "entered")
    (tmp_path / "fault").touch()
    job.await_events(range(3), "finalize")
    os.kill(monitor(tmp_path, 0), signal.SIGKILL)
    (tmp_path / "go").touch()
    all_say_that_the_store_is_lost(job, range(3))
    job.await_nothing_left()


def test_a_server_outside_is_silent(job: Job) -> None:
    job.start_rank("serve", 9, 0, module="scenarios_lost")
    job.await_event(9, "serving")
    job.start("one_fault", 2, module="scenarios_lost", times=QUICK)
    job.await_events(range(2), "entered")
    job.kill(9, signal.SIGSTOP)
    all_say_that_the_store_is_lost(job, range(2))
    job.kill(9)
    job.await_nothing_left()


@pytest.mark.parametrize("nth", [1, 2])
def test_a_server_outside_falls_silent_while_ranks_enter(job: Job, nth: int) -> None:
    """Between a connection and the first question; rank 2 was never started."""
    job.start_rank("serve", 9, 0, module="scenarios_lost")
    job.await_event(9, "serving")
    job.start("enters", 3, module="scenarios_lost", ranks=range(2), nth=nth, server=job.pids[9], times=QUICK)
    job.await_event(1, "fault")
    for rank in range(2):
        said = job.await_event(rank, "raised")["chain"][0]
        assert "StoreLost: the store cannot be reached" in said and f"127.0.0.1:{job.port}" in said
        assert "see what happened on its host" in said or "see whether rank 0 or its host is stopped" in said
        assert job.await_end(rank) == 1
    job.kill(9)
    job.await_nothing_left()


def test_a_server_outside_is_silent_from_the_beginning(job: Job) -> None:
    """It takes connections (the kernel does)."""
    job.start_rank("serve", 9, 0, module="scenarios_lost")
    job.await_event(9, "serving")
    job.kill(9, signal.SIGSTOP)
    job.start("one_fault", 2, module="scenarios_lost", times=QUICK)
    for rank in range(2):
        said = job.await_event(rank, "raised")["chain"][0]
        assert f"who listens on 127.0.0.1:{job.port} does not answer like a store (nothing for 3 s)" in said
        assert job.await_end(rank) == 1
    job.kill(9)
    job.await_nothing_left()


def test_a_server_outside_that_has_lost_everything_is_no_store(job: Job, tmp_path: Path) -> None:
    """It ends, and with it rank 0's monitor process: the one that takes its place must not serve a store of its own."""
    job.start_rank("serve", 9, 0, module="scenarios_lost")
    job.await_event(9, "serving")
    job.start("one_fault", 2, module="scenarios_lost", times=QUICK)
    job.await_events(range(2), "entered")
    job.kill(9)
    all_say_that_the_store_is_lost(job, range(2))
    job.await_nothing_left()


# --- the coordinator, and processes -----------------------------------------------------------------------------------


def test_a_coordinator_that_fails_ends_all_ranks_and_says_why(job: Job, tmp_path: Path) -> None:
    job.start("garbage", 3, module="scenarios_lost", times=QUICK)
    assert job.await_event(1, "fault")["number"] == 1
    for rank in range(3):
        said = job.await_event(rank, "raised")["chain"][0]
        assert said.startswith("InternalError: the coordinator of the barriers failed:\nTraceback")
        assert "ValueError: not an interruption record: 'garbage'" in said
        assert job.await_end(rank) == 1
    assert "ValueError: not an interruption record" in (tmp_path / "monitor0.log").read_text()
    job.await_nothing_left()


def test_a_rank_0_that_leaves_and_lives_on_reaps_its_monitor_process(job: Job) -> None:
    """Which stays for the others as long as they need it."""
    job.start("abort_and_stay", 3, module="scenarios_lost")
    for rank in range(3):
        job.await_event(rank, "childless")
        assert job.await_end(rank) == 0
    assert job.of(0, "raised") and job.of(1, "returned") and job.of(2, "returned")
    job.await_nothing_left()


def test_a_fork_that_fails_is_tried_again(job: Job) -> None:
    job.start("fork_fails", 3, module="scenarios_lost", times={**QUICK, "heartbeat_timeout": 25.0})
    assert job.await_event(1, "replaced")["refused"] == 2
    assert "Resource temporarily unavailable" in job.err(1).read_text()
    all_restart(job, range(3))
