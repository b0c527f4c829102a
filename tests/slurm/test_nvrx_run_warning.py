"""Warnings, the time limit and requeues on a real Slurm: every rank hears of it once, and the next life goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from nvrx_job import CLIENT, Job, Jobs, start_again

TWO_PLUS_TWO = "--spares=2 --nproc-per-node=2"
IMAGE = f"--step-prefix=env --step-prefix=PATH={Path(sys.executable).parent}"
PATIENT = "export NVRX_KILL_WAIT=30"  # Slurm's default; the cluster's own is short for a busy machine
# Odd ranks have a handler of their own; the others must not die of the signal.
ASKS = CLIENT + """
import select
if RANK % 2:
    signal.signal(signal.SIGUSR1, lambda *_: mark("handler"))
def train_until_told():
    while not client.should_stop():
        select.select([], [], [], 0.02)
    mark("told")
"""  # fmt: skip
LEAVES = ASKS + 'mark("ready")\ntrain_until_told()\nclient.shutdown_workload_monitoring()\n'
STAYS = ASKS + """
def ended(signum, frame):
    mark("term")
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
mark("ready")
train_until_told()
while True:
    select.select([], [], [], 0.2)  # signal.pause() may miss the second of two signals
"""  # fmt: skip


def warn(job: Job, *how: str) -> None:
    job.cluster.run("scancel", "--signal=USR1", *how, str(job.job_id))


def ranks(job: Job, what: str) -> list[int]:
    return [mark.rank for mark in job.marks(what)]


@pytest.mark.parametrize("how", [(), ("--batch",)], ids=["to the step", "to the batch script alone"])
def test_a_warning_reaches_every_rank_once(jobs: Jobs, how: tuple[str, ...]) -> None:
    """What Slurm does for `--signal=USR1@N` and for `--signal=B:USR1@N`."""
    job = jobs.submit(LEAVES, TWO_PLUS_TWO + " --max-restarts=3")
    job.wait_marks("ready", 4)
    warn(job, *how)
    end = job.wait_end()
    assert (end.state, end.exit_code) == ("FAILED", 138), job.said()
    assert (ranks(job, "told"), ranks(job, "handler")) == ([0, 1, 2, 3], [1, 3])
    assert job.result()["code"] == 138 and job.result()["slurm_restart_count"] == 0
    assert all(job.agent_log(i).count("the job is about to end") == 1 for i in range(4))


@pytest.mark.parametrize(("nodes", "flags"), [(1, f"--nproc-per-node=4 {IMAGE}")])
def test_warned_and_stopped_before_the_time_limit(jobs: Jobs, nodes: int, flags: str) -> None:
    """Slurm 22.05 tells no end time in the environment: it is asked, first and before each of the two. In an image
    without its tools nvrx-run in front of the step tells it."""
    flags += " --ft-warn-before-end=52 --ft-stop-before-end=44"
    job = jobs.submit(STAYS, flags, nodes, sbatch=("--time=1",), lead=PATIENT)
    job.wait_marks("told", 4)
    assert job.marks("term") == []
    end = job.wait_end()
    assert (end.state, end.exit_code) == ("FAILED", 143), job.said()
    assert (ranks(job, "told"), ranks(job, "term")) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert job.said().count("the allocation ends in ") == 1
    assert "less than 44 s of the allocation are left" in job.result()["reason"]


# --- the next life ----------------------------------------------------------------------------------------------------


def test_a_preempted_job_ends_its_workers_gently_and_resumes(jobs: Jobs) -> None:
    """What Slurm does to a job that it preempts by requeue: SIGTERM, then the queue."""
    job = jobs.submit(STAYS, TWO_PLUS_TWO, sbatch=("--requeue",))
    job.wait_marks("ready", 4)
    jobs.cluster.run("scontrol", "requeue", str(job.job_id))
    start_again(job.cluster, job.job_id)
    assert ranks(job, "term") == [0, 1, 2, 3]
    tree = job.directory / "nvrx_logs" / str(job.job_id)
    assert '"code": 143' in (tree / "r0" / "result.json").read_text()
    job.wait_marks("ready", 8)
    warn(job, "--batch")
    job.wait_marks("told", 4)
    assert sorted(path.name for path in tree.iterdir()) == ["r0", "r1"] and job.run_dir.resolve() == tree / "r1"
    assert len(list((tree / "r1").glob("cycle_0/node_*/rank_?.out"))) == 4
    jobs.cluster.run("scancel", str(job.job_id))
    assert job.wait_end().state == "CANCELLED"
