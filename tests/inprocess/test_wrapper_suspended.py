"""The whole job is suspended (scontrol suspend, gang scheduling, a paused machine), and resumed in any order."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from ranks_harness import Job

TIMES = {
    "soft_timeout": 1.5,
    "hard_timeout": 2.0,
    "barrier_timeout": 4.0,
    "heartbeat_timeout": 3.0,
    "heartbeat_interval": 0.1,
    "monitor_process_interval": 0.1,
    "monitor_thread_interval": 0.1,
    "progress_watchdog_interval": 0.1,
    "termination_grace_time": 0.0,
}


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def suspend(job: Job, pids: list[int], seconds: float) -> None:
    """Stop them for so long, by the test's clock."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    job.until(lambda: all(state_of(pid) == "T" for pid in pids), "all are stopped")
    until_s = time.monotonic() + seconds
    job.until(lambda: time.monotonic() >= until_s, "the time has passed")


@pytest.mark.parametrize("place", ["function", "finalize", "barrier"])
@pytest.mark.parametrize("first", ["monitors", "ranks"])
def test_a_job_that_was_suspended_goes_on(job: Job, tmp_path: Path, first: str, place: str) -> None:
    """For longer than any limit there is; nobody is killed, and no iteration ends because of it."""
    slow = [1] if place == "barrier" else [0, 1]
    debug = {"NVRX_LOG_LEVEL": "DEBUG"}
    job.start("one_fault", 2, module="scenarios_lost", victim=1, slow=slow, times=TIMES, env=debug)
    job.await_events(range(2), "entered")
    if place != "function":  # where a limit on the restart applies
        (tmp_path / "fault").touch()
        job.await_events(range(2), "finalize")
    if place == "barrier":
        job.until(lambda: " arrive\n" in job.err(0).read_text(), "rank 0 waits for rank 1")
    monitors = [int((tmp_path / f"monitor{rank}.pid").read_text()) for rank in range(2)]
    ranks = [job.pids[rank] for rank in range(2)]
    suspend(job, monitors + ranks, 8.5 if place == "barrier" else 5.5)  # the coordinator's patience is 7 s
    awake, asleep = (monitors, ranks) if first == "monitors" else (ranks, monitors)
    for pid in awake:
        os.kill(pid, signal.SIGCONT)
    job.until(lambda: all(state_of(pid) != "T" for pid in awake), "the first have been resumed")
    if first == "monitors":
        job.until(lambda: all("was away" in log(tmp_path, rank) for rank in range(2)), "the monitors have looked")
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    (tmp_path / "fault").touch()
    job.await_events(range(2), "finalize")
    (tmp_path / "go").touch()
    for rank in range(2):
        job.await_event(rank, "entered", iteration=1, WORLD_SIZE="2")
        assert job.await_end(rank) == 0
        assert "TIMEOUT" not in log(tmp_path, rank) and "killed" not in log(tmp_path, rank)
        assert not job.of(rank, "entered", iteration=2)
    job.await_nothing_left()


@pytest.mark.parametrize("what", ["answer", "came", "coordinate", "assignment"])
def test_who_was_stopped_while_it_waited_waits_on(job: Job, tmp_path: Path, what: str) -> None:
    """For 2 s of its own time; what it waits for comes soon after it was resumed."""
    job.start_rank("serve", 9, 0, module="scenarios_lost")
    job.await_event(9, "serving")
    job.start_rank("waits", 0, 1, module="scenarios_lost", what=what)
    job.await_event(0, "waiting")
    suspend(job, [job.pids[0]], 3.0)
    job.kill(0, signal.SIGCONT)
    (tmp_path / "go").touch()
    assert job.await_event(0, "waited")["result"] == "in time"
    assert job.await_end(0) == 0
    job.kill(9)


def log(tmp_path: Path, rank: int) -> str:
    return (tmp_path / f"monitor{rank}.log").read_text()


def test_who_stays_stopped_is_killed(job: Job, tmp_path: Path) -> None:
    """Its monitor process was suspended too; when it is resumed, all limits begin anew, and are met."""
    job.start("one_fault", 2, module="scenarios_lost", times=TIMES)
    job.await_events(range(2), "entered")
    mine = int((tmp_path / "monitor1.pid").read_text())
    suspend(job, [mine, job.pids[1]], 2.5)
    os.kill(mine, signal.SIGCONT)
    assert job.await_end(1) in (-signal.SIGTERM, -signal.SIGKILL)
    job.await_event(0, "entered", iteration=1, WORLD_SIZE="1")
    assert job.await_end(0) == 0
    assert log(tmp_path, 1).index("was away") < log(tmp_path, 1).index("killed: no progress")
    job.await_nothing_left()
