"""The places of a Slurm cluster where nvrx-run can be: srun directly, arrays, wrong shapes, dry runs, the demo."""

from __future__ import annotations

import json
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


# --- the demo -------------------------------------------------------------------------------------------------------


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
