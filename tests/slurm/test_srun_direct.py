"""sbatch_templates/srun-direct.sbatch as it stands there, on a real Slurm: srun's code is not always the job's."""

from __future__ import annotations

from pathlib import Path

import pytest
from nvrx_job import ASKS, EXCLUDES_N2, SHUTS_DOWN, Job, Jobs

pytestmark = pytest.mark.slurm

TEMPLATE = Path(__file__).resolve().parents[2] / "sbatch_templates/srun-direct.sbatch"
LEFT_BY_N2 = "n2: task 1: Exited with exit code 95"


def submit(jobs: Jobs, worker: str, *sbatch: str) -> Job:
    """The template for three nodes, one of them a spare, with our nvrx-run on PATH."""
    job = jobs.new(worker)
    text = TEMPLATE.read_text().replace('"$@"\n)', "worker.py\n)").replace("if (($# == 0))", "if false")
    assert "\n    worker.py\n)" in text and "\nif false; then" in text  # a script from stdin has no arguments
    flags = ("--nodes=3", *jobs.environment(job), f"--chdir={job.directory}", *sbatch)
    job.job_id = jobs.cluster.submit(text, *flags)
    return job


def codes(job: Job) -> tuple[int, int]:
    """Of the job as Slurm has it, and in its result.json."""
    end = job.wait_end()
    assert end.signal == 0 and (end.state == "COMPLETED") == (end.exit_code == 0), job.said()
    (result,) = job.directory.glob("nvrx_logs/*/r0/result.json")
    assert result.parent.samefile(job.run_dir)
    return end.exit_code, job.result()["code"]


def test_after_an_exclusion_a_shutdown_still_ends_the_chain(jobs: Jobs) -> None:
    """With 95, the higher of the two, a chain would start the job again."""
    job = submit(jobs, EXCLUDES_N2 + SHUTS_DOWN.removeprefix(ASKS), "--array=3")
    assert codes(job) == (93, 93)
    assert LEFT_BY_N2 in job.said()


def test_a_signal_to_the_batch_shell_reaches_the_agents(jobs: Jobs) -> None:
    job = submit(jobs, "signal.pause()\n")
    job.wait_marks("up", 2)
    jobs.cluster.run("scancel", "--batch", "--signal=TERM", str(job.job_id))
    assert codes(job) == (143, 143)


def test_without_a_result_srun_s_code_is_the_job_s(jobs: Jobs) -> None:
    job = submit(jobs, "", "--nodes=1")  # it has no node to spare
    assert job.wait_end().exit_code == 2, job.said()
    assert not list(job.directory.glob("nvrx_logs/*/r0/result.json"))
