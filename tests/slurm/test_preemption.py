"""Slurm takes the nodes of a job away: with a notice or without one, to requeue the job or to cancel it."""

import json
import re

import pytest
from nvrx_job import Job, Jobs, start_again
from waits import WAIT_S

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm-d"), pytest.mark.timeout(300)]

FIRST_LIFE_STAYS = 'if "SLURM_RESTART_COUNT" not in os.environ:\n    signal.pause()\n'
URGENT = "#!/bin/sh\nexit 0\n"
DONE = "--until-done"


def preempted(varied: Jobs, partition: str, flags: str, worker: str = FIRST_LIFE_STAYS) -> Job:
    """A job that has lost its nodes to another one. After a notice it leaves long before the GraceTime is over.

    Of one CPU, all of its nodes would be bound to the first one of this machine.
    """
    job = varied.submit(worker, flags, 2, (f"--partition={partition}", "--requeue", "--exclusive"))
    job.wait_marks("up", 2)
    urgent = varied.cluster.submit(URGENT, "--nodes=4")
    assert varied.cluster.wait_job(urgent, WAIT_S).state == "COMPLETED"
    return job


def told(job: Job) -> list[str]:
    return re.findall(r" nvrx-run: .*(?:preempted|requeued).*", job.said())


@pytest.mark.parametrize(
    ("partition", "flags"),
    [
        ("requeue-10", ""),
        ("cancel-10", DONE),
        *(
            pytest.param(*case, marks=pytest.mark.matrix)
            for case in [("requeue-10", DONE), ("requeue-0", ""), ("requeue-0", DONE), ("cancel-0", DONE)]
        ),
    ],
)
def test_a_preempted_job_goes_on_in_its_next_life(varied: Jobs, partition: str, flags: str):
    """With a GraceTime Slurm signals the step, and the job itself only at the end of these seconds."""
    job = preempted(varied, partition, flags)
    start_again(varied.cluster, job.job_id)
    job.ends("COMPLETED", 0)
    assert varied.cluster.job(job.job_id)["Restarts"] == "1"

    first = json.loads((job.directory / f"nvrx_logs/{job.job_id}/r0/result.json").read_text())
    assert first["code"] == 143 and "preempted" in first["ended_by"]
    assert "not requeued" not in told(job)[0] and ["code 0" in line for line in told(job)[1:]] == [True] * bool(flags)


@pytest.mark.parametrize("partition", ["cancel-10", pytest.param("cancel-0", marks=pytest.mark.matrix)])
def test_a_job_that_its_partition_cancels_ends(varied: Jobs, partition: str):
    job = preempted(varied, partition, "")
    end = job.wait_end()
    assert end.state in ("FAILED", "PREEMPTED") and job.result()["code"] == 143
    assert varied.cluster.job(job.job_id)["Restarts"] == "0"
    assert len(told(job)) == 1 and DONE in told(job)[0], job.said()


def test_a_job_that_was_preempted_before_may_be_cancelled(varied):
    """What Slurm remembers of an earlier life is no reason to start a third one."""
    job = preempted(varied, "requeue-0", DONE, "signal.pause()\n")
    start_again(varied.cluster, job.job_id)
    job.wait_marks("up", 4)
    varied.cluster.run("scancel", str(job.job_id))
    assert job.wait_end().state == "CANCELLED"
    assert "cancelled" in job.result()["ended_by"] and "not requeued" in job.said()
