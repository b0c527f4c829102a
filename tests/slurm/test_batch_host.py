"""A job whose batch host is gone is ended by what is left of its step."""

from __future__ import annotations

import pytest
from nvrx_job import Jobs

pytestmark = pytest.mark.slurm

STEP = "srun --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none -i none -o step.%n "
SURVIVOR = """
import os, sys, time
from nvrx_slurm.slurm import batch_host
job, node = int(os.environ["SLURM_JOB_ID"]), os.environ["SLURMD_NODENAME"]
open("up." + node, "w").close()
if node == "n2":
    print("before:", batch_host.look(job).name, flush=True)
    open("looked", "w").close()
    sys.stdin.close()
    while batch_host.look(job) is batch_host.BatchHost.ALIVE:
        time.sleep(0.1)
    print("after:", batch_host.look(job).name)
    print(batch_host.end_job(job, 7), flush=True)
else:
    time.sleep(600)
"""


def test_a_survivor_ends_the_job_with_its_code(jobs: Jobs) -> None:
    job = jobs.new("")
    (job.directory / "survivor.py").write_text(SURVIVOR)
    script = f"#!/bin/sh\n{STEP} python survivor.py\n"
    shape = ("--nodes=3", "--ntasks-per-node=1", "--no-kill", "--nodelist=n1,n2,n3")
    job.job_id = job.cluster.submit(script, *shape, *jobs.environment(job), f"--chdir={job.directory}")
    job.wait_for(lambda: (job.directory / "looked").exists(), "the first look")
    job.cluster.kill_node("n1")
    end = job.wait_end()
    said = (job.directory / "step.1").read_text()
    assert "before: ALIVE\nafter: GONE\n" in said, said
    assert end.exit_code == 7, said
