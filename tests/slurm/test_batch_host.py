"""A job whose batch host is gone is ended by what is left of its step."""

from __future__ import annotations

from nvrx_job import Jobs

STEP = "srun --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none -i none -o step.%n "
SURVIVOR = """
import os, sys, time
from nvrx_slurm.slurm.api.facts import NoAnswer
from nvrx_slurm.slurm.control import BatchHost, Control
control = Control()
job, node = int(os.environ["SLURM_JOB_ID"]), os.environ["SLURMD_NODENAME"]
if node == "n2":
    print("before:", control.batch_host(job).name, flush=True)
    open("looked", "w").close()
    while not os.path.exists("lost"):
        time.sleep(0.05)
    try:
        control.end_without_batch_host(job, 7, True)
    except NoAnswer:
        open("tried", "w").close()
    while not os.path.exists("back"):
        time.sleep(0.05)
    while (found := control.batch_host(job)) is BatchHost.SILENT:
        time.sleep(0.05)  # Slurm is not asked again at once
    print("after:", found.name, flush=True)
    print(control.end_without_batch_host(job, 7, False), flush=True)
else:
    time.sleep(600)
"""


def test_a_survivor_ends_the_job_with_its_code_once_slurmctld_answers(jobs: Jobs) -> None:
    job = jobs.new("")
    (job.directory / "survivor.py").write_text(SURVIVOR)
    step = f"step-of-{job.directory.name}"
    script = f"#!/bin/sh\n{STEP} --job-name={step} python survivor.py\n"
    shape = ("--nodes=3", "--ntasks-per-node=1", "--no-kill", "--nodelist=n1,n2,n3")
    job.job_id = job.cluster.submit(script, *shape, *jobs.environment(job), f"--chdir={job.directory}")
    job.wait_for(lambda: (job.directory / "looked").exists(), "the first look")
    job.cluster.kill_node("n1")
    job.cluster.kill_controller(saved=step)
    (job.directory / "lost").touch()
    job.wait_for(lambda: (job.directory / "tried").exists(), "a try without slurmctld")
    job.cluster.start_controller()
    (job.directory / "back").touch()
    end = job.wait_end()
    said = (job.directory / "step.1").read_text()
    assert "before: ALIVE\nafter: GONE\n" in said, said
    assert end.exit_code == 7, said
