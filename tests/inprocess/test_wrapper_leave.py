"""A rank that leaves, is discarded, or is declared gone while it is away, costs the others one restart at most."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from ranks_harness import Job, Zygote, jobs

POINTS = 12
SOON_S = 20.0  # by default no heartbeat is missed before (30 s), and no barrier is over (120 s)
QUICK = {
    "heartbeat_timeout": 1.0,
    "heartbeat_interval": 0.1,
    "monitor_process_interval": 0.1,
    "progress_watchdog_interval": 0.1,
}
TIMES_OF_A_BARRIER = {  # of 5 s in all
    **QUICK,
    "heartbeat_timeout": 2.0,
    "soft_timeout": 1.5,
    "hard_timeout": 1.8,
    "barrier_timeout": 2.5,
    "termination_grace_time": 0.5,
    "monitor_thread_interval": 0.1,
}


# --- a rank leaves ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_leaves_at_any_point_of_a_restart(zygote: Zygote, tmp_path: Path, victim: int) -> None:
    """What its handler of a signal raises; the others may have the barrier's verdict already, that it goes on."""

    def start(place: Path) -> contextlib.AbstractContextManager[Job]:
        place.mkdir()
        return contextlib.contextmanager(jobs)(zygote, place)

    with start(tmp_path / "all") as job:
        job.start("leaves_at", 3, module="scenarios_leave", victim=victim, nth=0)
        calls = job.await_event(victim, "calls", iteration=1)["number"]
        assert list(job.await_all().values()) == [0, 0, 0]
    for point in range(1, POINTS + 1):
        nth = calls * point // POINTS
        with start(tmp_path / str(nth)) as job:
            job.start("leaves_at", 3, module="scenarios_leave", victim=victim, nth=nth)
            where = job.await_event(victim, "fault")["where"]
            for rank in {0, 1, 2} - {victim}:
                job.await_event(rank, "returned", SOON_S)
                last = job.of(rank, "entered")[-1]
                assert last["WORLD_SIZE"] == "2" and last["iteration"] <= 2, (nth, where)
            assert job.await_event(victim, "raised")["kind"] == "SystemExit", (nth, where)
            assert job.await_all() == {0: 0, 1: 0, 2: 0, victim: 5}
            job.await_nothing_left()


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_leaves_at_entry(job: Job, victim: int) -> None:
    """The others begin without it, as they do when its process dies there."""
    job.start("leaves_at_entry", 3, module="scenarios_leave", victim=victim)
    job.await_event(victim, "fault")
    for rank in {0, 1, 2} - {victim}:
        job.await_event(rank, "entered", SOON_S, iteration=0, WORLD_SIZE="2")
    assert job.await_all() == {0: 0, 1: 0, 2: 0, victim: 5}
    job.await_nothing_left()


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_rank_that_is_gone_before_its_monitor_process_is_ready(job: Job, tmp_path: Path, how: str) -> None:
    """It is ready when its log has been opened: a pipe, whose other end is opened when the rank has ended."""
    log = tmp_path / "monitor1.log"
    os.mkfifo(log)
    job.start("leaves_at_entry", 3, module="scenarios_leave", victim=1, how=how)
    job.await_event(1, "fault")
    assert job.await_end(1) == {"exit": 5, "kill": -signal.SIGKILL}[how]
    with log.open() as said:
        for rank in (0, 2):
            job.await_event(rank, "entered", SOON_S, iteration=0, WORLD_SIZE="2")
        assert "rank 1: it" in said.read()
    assert [job.await_end(rank) for rank in (0, 2)] == [0, 0]
    job.await_nothing_left()


def test_a_new_rank_0_that_does_not_say_where_to_meet_costs_a_restart(job: Job) -> None:
    job.start("no_start", 3, module="scenarios_leave", times=TIMES_OF_A_BARRIER)
    job.await_event(0, "fault")
    for rank in range(3):
        job.await_event(rank, "entered", iteration=2, WORLD_SIZE="3", timeout_s=60.0)
        assert job.await_end(rank) == 0
    assert "the new rank 0 did not say within" in job.err(0).read_text()
    job.await_nothing_left()


# --- a rank is discarded ----------------------------------------------------------------------------------------------


def logs(tmp_path: Path, ranks: tuple[int, ...]) -> str:
    return "".join((tmp_path / f"monitor{rank}.log").read_text() for rank in ranks)


def left_alone(job: Job, tmp_path: Path) -> None:
    """The others are still in iteration 1."""
    (tmp_path / "go").touch()
    for rank in (0, 1):
        job.await_event(rank, "returned")
        assert [event["iteration"] for event in job.of(rank, "entered")] == [0, 1]
        assert job.await_end(rank) == 0
    assert job.await_end(3) == 1 and job.await_event(3, "raised")["kind"] == "RankDiscarded"
    job.await_nothing_left()


@pytest.mark.parametrize("how", ["filter", "tree"])
def test_a_rank_that_was_discarded_is_not_missed(job: Job, tmp_path: Path, how: str) -> None:
    """It sends no heartbeats any more."""
    job.start("discards", 4, module="scenarios_leave", how=how, times=QUICK)
    job.await_events((0, 1), "entered", iteration=1, WORLD_SIZE="2")
    job.until(lambda: "rank 3: no heartbeat for" in logs(tmp_path, (0, 1)), "its silence is noticed")
    job.until(lambda: "iteration 1: rank 3 is gone" in logs(tmp_path, (0, 1)), "and taken up")
    left_alone(job, tmp_path)


def test_a_rank_that_was_discarded_is_told_dead(job: Job, tmp_path: Path) -> None:
    """By the launcher, which sees its process end."""
    board = tmp_path / "board"
    job.start("discards", 4, module="scenarios_leave", how="filter", env={"NVRX_BOARD": str(board)})
    job.await_events((0, 1), "entered", iteration=1, WORLD_SIZE="2")
    assert job.await_end(3) == 1
    board.write_text(json.dumps({"v": 1, "cycle": 0, "ranks": [3], "why": "it has exited"}) + "\n")
    told = "iteration 1: rank 3 is gone: launcher: it has exited"
    job.until(lambda: all(told in logs(tmp_path, (rank,)) for rank in (0, 1)), "all have been told")
    left_alone(job, tmp_path)


# --- a rank was away --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file_store", [False, True])
@pytest.mark.parametrize("first", ["rank", "monitor"])
def test_a_host_that_comes_back_when_the_others_have_gone_on(
    job: Job, tmp_path: Path, first: str, file_store: bool
) -> None:
    """What it waits for has been deleted; a server has told it before, a file cannot."""
    job.start("goes_on", 3, module="scenarios_leave", times=QUICK, file_store=file_store)
    job.await_events(range(3), "entered")
    host = [job.pids[2], int((tmp_path / "monitor2.pid").read_text())]
    for pid in host:
        os.kill(pid, signal.SIGSTOP)
    job.await_events(range(2), "entered", iteration=5, WORLD_SIZE="2")
    for pid in host if first == "rank" else reversed(host):
        os.kill(pid, signal.SIGCONT)
    said = job.await_event(2, "raised")["chain"][0]
    assert said.startswith("RankDiscarded: the others have declared") and said.endswith("and gone on")
    assert job.await_end(2) == 1
    (tmp_path / "go").touch()
    for rank in range(2):
        job.await_event(rank, "returned")
        assert job.await_end(rank) == 0
    job.await_nothing_left()
