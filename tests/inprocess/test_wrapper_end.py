"""A rank is ended, or never gets on, in the middle of a restart or at the very end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ranks_harness import Job, free_port

TIMES = {  # bounds on how long a rank may take between two iterations, short enough for a test
    "soft_timeout": 1.0,
    "hard_timeout": 2.0,
    "barrier_timeout": 4.0,
    "completion_timeout": 0.5,
    "heartbeat_timeout": 3.0,
    "heartbeat_interval": 0.1,
    "monitor_process_interval": 0.1,
    "monitor_thread_interval": 0.1,
    "progress_watchdog_interval": 0.1,
    "termination_grace_time": 0.1,
}


def restarted(job: Job, survivors: list[int], iteration: int = 1) -> None:
    for place, rank in enumerate(survivors):
        job.await_event(rank, "entered", RANK=str(place), WORLD_SIZE=str(len(survivors)), iteration=iteration)
        job.await_event(rank, "returned")
        assert job.await_end(rank) == 0


@pytest.mark.parametrize(
    ("name", "victim", "iteration"),
    [("health_check", 1, 0), ("health_check", 1, 1), ("rank_assignment", 1, 0), ("rank_assignment", 1, 1),
     ("rank_assignment", 0, 1)],
)  # fmt: skip
def test_a_plugin_that_never_returns_between_two_iterations(job: Job, name: str, victim: int, iteration: int) -> None:
    """Its rank is killed; the others go on, though they may have begun the iteration without it."""
    plugin = {"name": name, "how": "met_never", "victims": [victim], "iteration": iteration}
    job.start("with_plugins", 3, victims=[2], plugin=plugin, times=TIMES)
    job.await_event(victim, "fault")
    restarted(job, [rank for rank in range(3) if rank != victim], iteration + 1)
    assert job.await_end(victim) in (-signal.SIGTERM, -signal.SIGKILL)
    job.await_nothing_left()


@pytest.mark.parametrize(
    ("how", "kind"), [("raise", "ValueError"), ("abort", "RestartAbort"), ("wrong", "InternalError")]
)
def test_a_completion_that_fails_fails_its_rank(job: Job, how: str, kind: str) -> None:
    job.start("ended", 3, module="scenarios_end", victims=[], place="completion", how=how)
    assert job.await_event(1, "raised")["kind"] == kind
    assert job.of(1, "fault") and job.await_end(1) == 1
    for rank in (0, 2):
        assert job.await_event(rank, "returned")["value"] == f"{rank} done"
    job.await_nothing_left()


@pytest.mark.parametrize("how", ["raise", "wrong"])
def test_a_terminate_that_fails_is_said(job: Job, how: str) -> None:
    """And does not take the place of why the rank left."""
    job.start("ended", 3, module="scenarios_end", victims=[1], place="terminate", how=how)
    assert job.await_event(1, "raised")["kind"] == "RestartAbort"
    assert job.of(1, "fault") and "terminate failed\nTraceback" in job.err(1).read_text()
    restarted(job, [0, 2])
    job.await_nothing_left()


def test_a_terminate_that_exits_is_not_called_again(job: Job) -> None:
    job.start("ended", 3, module="scenarios_end", victims=[1], place="terminate", how="exit")
    assert job.await_event(1, "raised")["kind"] == "SystemExit"
    assert (len(job.of(1, "fault")), job.await_end(1)) == (1, 4)
    restarted(job, [0, 2])
    job.await_nothing_left()


@pytest.mark.parametrize("place", ["abort", "finalize", "health_check", "rank_assignment"])
def test_sigterm_in_the_middle_of_a_restart(job: Job, place: str) -> None:
    """Nobody handles it: the rank dies, wherever it is."""
    job.start("ended", 3, module="scenarios_end", victims=[0], place=place, how="wait")
    job.await_event(1, "fault")
    job.kill(1, signal.SIGTERM)
    restarted(job, [0, 2], 2 if place == "rank_assignment" else 1)  # the others may have begun already
    assert job.await_end(1) == -signal.SIGTERM
    job.await_nothing_left()


@pytest.mark.parametrize("place", ["finalize", "health_check", "rank_assignment"])
def test_sigterm_that_is_handled_in_the_middle_of_a_restart(job: Job, place: str) -> None:
    job.start("ended", 3, module="scenarios_end", victims=[0], place=place, how="wait", handler=True)
    job.await_event(1, "fault")
    job.kill(1, signal.SIGTERM)
    assert job.await_event(1, "raised")["kind"] == "SystemExit"
    assert job.await_end(1) == 5
    restarted(job, [0, 2], 2 if place == "rank_assignment" else 1)
    job.await_nothing_left()


def test_sigterm_while_abort_never_ends(job: Job) -> None:
    """Its rank leaves after the grace time; no launcher has lost patience by then."""
    job.start("ended", 3, module="scenarios_end", victims=[0], place="abort", how="wait", handler=True)
    job.await_event(1, "fault")
    job.kill(1, signal.SIGTERM)
    assert job.await_event(1, "raised", timeout_s=25.0)["kind"] == "SystemExit"  # 5 s by default, and for long 30 s
    assert job.await_end(1) == 5
    assert "abort did not end" in job.err(1).read_text()
    restarted(job, [0, 2])
    job.await_nothing_left()


SCRIPT = """
    import os, sys
    from nvrx_slurm import inprocess

    class Exit(inprocess.plugins.finalize.Finalize):
        def __call__(self, state):
            if os.environ["RANK"] == "1":
                sys.exit(4)
            return state

    @inprocess.Wrapper(finalize=Exit())
    def train(call: inprocess.CallWrapper):
        if call.iteration == 0:
            raise ValueError("once")
        return os.environ["WORLD_SIZE"]

    print("world size", train(), flush=True)
"""


@pytest.mark.torch
def test_the_interpreter_is_finalized_in_the_middle_of_a_restart(tmp_path: Path) -> None:
    """A program's own way out, with the helpers' threads waiting in C."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(__file__).resolve().parents[2])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": root}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 4], said
    assert said[0][0] == "world size 1\n"
