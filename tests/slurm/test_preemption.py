"""Slurm takes the nodes of a job away: with a notice or without one, to requeue the job or to cancel it."""

import json
import re

import pytest
from nvrx_job import start_again
from waits import WAIT_S

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm-d")]

FIRST_LIFE_STAYS = 'if "SLURM_RESTART_COUNT" not in os.environ:\n    signal.pause()\n'
URGENT = "#!/bin/sh\nexit 0\n"


AT_ONCE = [pytest.param(name, marks=pytest.mark.matrix) for name in ("requeue-0", "cancel-0")]


@pytest.mark.parametrize("partition", ["requeue-10", "cancel-10", *AT_ONCE])
def test_a_preempted_job_goes_on_in_its_next_life(varied, partition):
    """With a GraceTime of 10 s Slurm signals the step, and the job itself only at the end of these seconds."""
    cluster = varied.cluster
    job = varied.submit(FIRST_LIFE_STAYS, "--until-done", 2, (f"--partition={partition}", "--requeue"))
    job.wait_marks("up", 2)
    urgent = cluster.submit(URGENT, "--nodes=4")
    assert cluster.wait_job(urgent, WAIT_S).state == "COMPLETED"
    start_again(cluster, job.job_id)
    job.ends("COMPLETED", 0)
    assert cluster.job(job.job_id)["Restarts"] == "1"

    first = json.loads((job.directory / f"nvrx_logs/{job.job_id}/r0/result.json").read_text())
    assert first["code"] == 143 and "preempted" in first["ended_by"]
    told = re.findall(r" nvrx-run: .*(?:preempted|requeued).*", job.said())
    assert len(told) == 2 and "not requeued" not in told[0] and "code 0" in told[1], job.said()


def test_a_job_that_was_preempted_before_may_be_cancelled(varied):
    """What Slurm remembers of an earlier life is no reason to start a third one."""
    cluster = varied.cluster
    job = varied.submit("signal.pause()\n", "--until-done", 2, ("--partition=requeue-0", "--requeue"))
    job.wait_marks("up", 2)
    urgent = cluster.submit(URGENT, "--nodes=4")
    assert cluster.wait_job(urgent, WAIT_S).state == "COMPLETED"
    start_again(cluster, job.job_id)
    job.wait_marks("up", 4)
    cluster.run("scancel", str(job.job_id))
    assert job.wait_end().state == "CANCELLED"
    assert "cancelled" in job.result()["ended_by"] and "not requeued" in job.said()
