"""How nvrx-run and Slurm end jobs together: signals; nothing is left and no node is drained."""

from __future__ import annotations

import time

import pytest
from nvrx_job import Job, Jobs

TWO_PLUS_TWO = "--spares=2 --nproc-per-node=2"
TELLS = """
def ended(signum, frame):
    mark("term")
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
mark("ready")
while True:
    signal.pause()
"""
STUBBORN = TELLS.replace("    sys.exit(0)\n", "")


def assert_143_everywhere(job: Job) -> None:
    """Every agent knew the end and its code."""
    assert job.result()["code"] == 143
    for infra_rank in range(4):
        assert job.agent_log(infra_rank).count(" ends with code 143: ") == 1


@pytest.mark.parametrize("worker", [TELLS, STUBBORN], ids=["gentle", "stubborn"])
def test_scancel_ends_workers_within_kill_wait_and_leaves_nothing(jobs: Jobs, worker: str) -> None:
    job = jobs.submit(worker, TWO_PLUS_TWO)
    job.wait_marks("ready", 4)
    began = time.monotonic()
    jobs.cluster.run("scancel", str(job.job_id))
    assert job.wait_end().state == "CANCELLED"
    assert time.monotonic() - began < jobs.cluster.settings.kill_wait_s
    assert [mark.rank for mark in job.marks("term")] == [0, 1, 2, 3]  # each once, though Slurm and we signal
    assert_143_everywhere(job)  # so the agents were not killed by Slurm but left by themselves
    assert "SIGTERM from Slurm" in job.result()["reason"]
    job.assert_nothing_left()


def test_sigterm_to_the_front_alone_is_passed_on_and_its_code_is_143(jobs: Jobs) -> None:
    job = jobs.submit(TELLS, TWO_PLUS_TWO)
    job.wait_marks("ready", 4)
    jobs.cluster.run("scancel", "--signal=TERM", "--batch", str(job.job_id))
    end = job.wait_end()
    assert (end.state, end.exit_code) == ("FAILED", 143), job.said()
    assert [mark.rank for mark in job.marks("term")] == [0, 1, 2, 3]
    assert_143_everywhere(job)


ENDS_WELL_FIRST = """
import select
agent, worker = os.getppid(), os.getpid()
if os.fork() == 0:
    os.setsid()
    poll = select.poll()
    poll.register(os.pidfd_open(worker), select.POLLIN)
    mark("waits")
    poll.poll()
    os.kill(agent, signal.SIGTERM)
    os._exit(0)
while "waits" not in open(os.environ["TEST_JOB"] + "/marks").read():
    select.select([], [], [], 0.01)
"""


def test_a_job_is_cancelled_though_its_workers_end_well_before_the_agent_is_signalled(jobs: Jobs) -> None:
    """Slurm signals the processes of a step one after the other; a helper makes the agent the last one."""
    job = jobs.submit(ENDS_WELL_FIRST, "", nodes=1)
    end = job.wait_end()
    assert (end.state, end.exit_code, job.result()["code"]) == ("FAILED", 143, 143), job.said()
