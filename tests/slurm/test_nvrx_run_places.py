"""The places of a Slurm cluster where nvrx-run can be: srun directly, arrays, wrong shapes, dry runs, the demo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from nvrx_job import Jobs
from stage import await_end, running_with

pytestmark = pytest.mark.slurm

REPO = Path(__file__).resolve().parents[2]
ONE_PER_NODE = ("--nodes=3", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")


def test_srun_directly_needs_no_token_where_munge_is(jobs: Jobs) -> None:
    job = jobs.new('print("rank", RANK)\n')
    out = jobs.srun(job, *ONE_PER_NODE, "nvrx-run", "--spares=1", "--nproc-per-node=2", "worker.py")
    up = job.marks("up")
    assert [(mark.rank, mark.node) for mark in up] == [(0, "n1"), (1, "n1"), (2, "n2"), (3, "n2")]
    assert all(f"[rank {rank}] rank {rank}\n" in out for rank in range(4))
    assert "job ends with code 0" in out and job.result()["code"] == 0


def test_two_agents_on_one_node_are_refused_in_one_sentence(jobs: Jobs) -> None:
    job = jobs.new("")
    out = jobs.srun(job, "--nodes=1", "--ntasks-per-node=2", "nvrx-run", "worker.py", code=2)
    said = {line for line in out.splitlines() if line.startswith("nvrx-run")}
    assert len(said) == 1 and "--ntasks-per-node=1" in said.pop()
    assert "Traceback" not in out and job.marks("up") == []


def test_tasks_of_a_job_array_are_jobs_of_their_own(jobs: Jobs) -> None:
    job = jobs.submit(
        'mark("task" + os.environ["SLURM_ARRAY_TASK_ID"])\n',
        "--nproc-per-node=1",
        nodes=2,
        sbatch=("--array=0-1", f"--output={jobs.cluster.root}/jobs/%A_%a.out"),
    )
    for task in range(2):
        marks = job.wait_marks(f"task{task}", 2)
        assert [mark.rank for mark in marks] == [0, 1]
    for name in (f"{job.job_id}_0", f"{job.job_id}_1"):
        assert jobs.cluster.wait_job(name, 30).state == "COMPLETED"
        result = job.directory / "nvrx_logs" / name / "r0" / "result.json"
        assert json.loads(result.read_text())["code"] == 0


def test_a_dry_run_in_a_batch_script_starts_nothing(jobs: Jobs) -> None:
    job = jobs.submit("", "--dry-run --spares=1 --nproc-per-node=2", nodes=3)
    assert job.wait_end().state == "COMPLETED"
    said = job.said()
    assert "srun --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --nodes=3" in said
    assert "plan of cycle 0: 2 active nodes x 2 ranks, 1 spare nodes" in said
    assert "n3" in said and "WORLD_SIZE=4" in said
    assert job.marks("up") == [] and not (job.directory / "nvrx_logs").exists()


def test_on_a_login_node_it_says_what_to_do(jobs: Jobs) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")} | jobs.cluster.env()
    argv = [sys.executable, "-m", "nvrx_slurm.cli.run", "worker.py"]
    done = subprocess.run(argv, env=env, cwd=REPO, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2 and "sbatch" in done.stderr and "--standalone" in done.stderr


# --- the demo -------------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.timeout(300)  # about a minute on two idle cores
@pytest.mark.skipif("NVRX_TEST_DEMO" not in os.environ, reason="scripts/demo checks itself; NVRX_TEST_DEMO=1 runs it")
def test_the_demo_holds_all_its_checks(needs_slurm: None) -> None:
    argv = [sys.executable, "scripts/lib/demo.py"]
    done = subprocess.run(argv, cwd=REPO, stdout=subprocess.PIPE, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("  ok  ") == 8 and "FAILED" not in done.stdout


@pytest.mark.torch
def test_an_interrupted_demo_cleans_up(needs_slurm: None) -> None:
    argv = [sys.executable, "scripts/lib/demo.py"]
    with subprocess.Popen(argv, cwd=REPO, stdout=subprocess.PIPE, text=True, start_new_session=True) as demo:
        assert demo.stdout is not None
        head = []
        for line in demo.stdout:
            head.append(line)
            if "ranks train" in line:
                break
        root = next(line.rpartition(" ")[2].strip() for line in head if "files in " in line)
        assert running_with(root), "nothing ran"
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()
        assert demo.wait(30) == 1, rest
    assert "interrupted" in rest and "nothing is left running" in rest
    assert await_end(running_with(root), 1.0) == []
    subprocess.run(["rm", "-r", root], check=True)
