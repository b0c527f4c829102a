"""The way in: missing ranks, doubled ranks, wrong places, and ranks started as launchers start them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ranks_harness import Job, free_port

QUICK = {
    "soft_timeout": 1.0,
    "hard_timeout": 1.5,
    "barrier_timeout": 4.0,
    "heartbeat_timeout": 3.0,
    "heartbeat_interval": 0.1,
    "monitor_process_interval": 0.1,
    "monitor_thread_interval": 0.1,
    "progress_watchdog_interval": 0.1,
    "termination_grace_time": 0.0,
}


def test_ranks_that_never_come_are_named(job: Job) -> None:
    job.start("fault_once", 5, ranks=[0, 1, 3], victims=[], how="raise", times=QUICK)
    assert set(job.await_all().values()) == {1}
    for rank in (0, 1, 3):
        said = job.of(rank, "raised")[0]
        assert said["kind"] == "BarrierTimeout"
        assert "ranks 2 4 did not call the wrapped function within 4 s" in said["chain"][0]
    job.await_nothing_left()


def test_two_processes_with_one_rank(job: Job) -> None:
    """The second is refused, and does not harm the first."""
    job.start("pidfile", 2, ranks=[0, 1])
    job.await_events([0, 1], "entered")
    job.start_rank("fault_once", 1, 2, victims=[], how="raise", others="return")
    assert "two processes of this job have RANK=1" in job.await_event(1, "raised")["chain"][0]
    assert job.await_end(1) == 1
    assert [event["iteration"] for event in job.of(0, "entered")] == [0]


def test_a_monitor_process_that_cannot_start_says_why(job: Job) -> None:
    job.start("bad_logfile", 1)
    chain = job.await_event(0, "raised")["chain"]
    assert "the monitor process cannot do its work: FileNotFoundError" in chain[0]
    job.await_nothing_left()


def test_a_rank_that_dies_before_it_begins_is_not_waited_for(job: Job) -> None:
    plugin = {"name": "rank_assignment", "how": "kill", "victims": [1], "iteration": 0}
    job.start("with_plugins", 3, victims=[], plugin=plugin)
    for rank in (0, 2):
        job.await_event(rank, "returned")
    job.await_nothing_left()


def test_without_a_master_address(job: Job) -> None:
    job.start("fault_once", 1, victims=[], how="raise", env={"MASTER_ADDR": None})
    job.await_all()
    assert "MASTER_ADDR is not set" in job.of(0, "raised")[0]["chain"][0]
    job.await_nothing_left()


def test_torch_distributed_is_initialized_inside(job: Job) -> None:
    job.start("too_early", 1)
    assert "call init_process_group inside the wrapped function" in job.await_event(0, "refused")["text"]
    assert job.await_event(0, "returned")["value"] == "done"
    job.await_nothing_left()


def test_only_one_wrapped_function_at_a_time(job: Job) -> None:
    job.start("nested", 1)
    said = job.await_event(0, "raised")
    assert said["kind"] == "RestartAbort" and "called inside a wrapped function" in said["chain"][0]
    job.await_nothing_left()


def test_the_interpreter_ends_in_the_middle_of_a_restart(job: Job) -> None:
    job.start("exits", 3)
    for rank in (0, 2):
        job.await_event(rank, "returned")
    assert job.await_end(1) == 3
    job.await_nothing_left()


SCRIPT = """
    import os, sys
    from nvrx_slurm import inprocess

    @inprocess.Wrapper()
    def train(call: inprocess.CallWrapper):
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        if call.iteration == 0:
            if os.environ["RANK"] == "1":
                raise ValueError("once")
            dist.barrier()
        dist.destroy_process_group()
        return int(total)

    print("total", train(), flush=True)
"""


@pytest.mark.torch
def test_ranks_started_as_programs_with_local_rank_set(tmp_path: Path) -> None:
    """LOCAL_RANK adds the hardware checks; hardware that is not there fails nothing."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    root = str(Path(__file__).resolve().parents[2])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": root}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=60)
        assert (rank.returncode, out) == (0, "total 2\n"), err
        warnings = [line for line in err.splitlines() if line.startswith("[W") and "cannot be retrieved" not in line]
        assert not warnings  # torch has nothing to complain about, but for a name server that does not answer
