"""The places of a Slurm cluster where nvrx-run can be: srun directly, arrays, wrong shapes."""

from __future__ import annotations

import json

from nvrx_job import EXCLUDES_N2, Jobs


def test_srun_directly_needs_no_token_where_munge_is_and_shows_the_highest_code(jobs: Jobs) -> None:
    """Without a batch script there is no front that knows better: srun reports the worst of the tasks."""
    job = jobs.new(EXCLUDES_N2 + 'print("rank", RANK)\n')
    place = ("--nodes=3", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")
    flags = ("--spares=1", "--nproc-per-node=2", "--max-restarts=1")
    out = jobs.srun(job, *place, "nvrx-run", *flags, "worker.py", code=95)
    up = job.marks("up", 1)
    assert [(mark.rank, mark.node) for mark in up] == [(0, "n1"), (1, "n1"), (2, "n3"), (3, "n3")]
    assert all(f"[rank {rank}] rank {rank}\n" in out for rank in range(4))
    assert "job ends with code 0" in out and job.result()["code"] == 0


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
