"""How nvrx-run and Slurm end jobs together: signals and the time limit. Nothing is left, no node is drained.

What a single node does by itself is in tests/node: test_signals.py, test_agent_warning.py.
"""

import sys
import time
from pathlib import Path

import pytest
from nvrx_job import CLIENT

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm-b")]


TWO_AND_ONE = "--spares=1"
STUBBORN = """
signal.signal(signal.SIGTERM, lambda *_: mark("term"))
mark("ready")
while True:
    signal.pause()
"""
IMAGE = f"--step-prefix=env --step-prefix=PATH={Path(sys.executable).parent}"
PATIENT = "export NVRX_KILL_WAIT=30"  # Slurm's default; the cluster's own is short for a busy machine
STAYS = CLIENT + """
import select
def ended(signum, frame):
    mark("term")
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
mark("ready")
while not client.should_stop():
    select.select([], [], [], 0.02)
mark("told")
while True:
    select.select([], [], [], 0.2)  # signal.pause() may miss the second of two signals
"""  # fmt: skip


def assert_143_everywhere(job):
    """Every agent knew the end and its code."""
    assert job.result()["code"] == 143
    for infra_rank in range(3):
        assert job.agent_log(infra_rank).count(" ends with code 143: ") == 1


def ranks(job, what):
    return [mark.rank for mark in job.marks(what)]


def test_scancel_ends_workers_within_kill_wait_and_leaves_nothing(jobs):
    job = jobs.submit(STUBBORN, TWO_AND_ONE, nodes=3)
    job.wait_marks("ready", 2)
    began = time.monotonic()
    jobs.cluster.run("scancel", str(job.job_id))
    assert job.wait_end().state == "CANCELLED"
    assert time.monotonic() - began < jobs.cluster.settings.kill_wait_s
    assert ranks(job, "term") == [0, 1]  # each once, though Slurm and we signal
    assert_143_everywhere(job)  # so the agents were not killed by Slurm but left by themselves
    assert "SIGTERM from Slurm" in job.result()["reason"]
    job.assert_nothing_left()


def test_signals_to_the_front_alone_are_passed_on_and_its_code_is_143(jobs):
    job = jobs.submit(STAYS, TWO_AND_ONE, nodes=3)
    job.wait_marks("ready", 2)
    jobs.cluster.run("scancel", "--signal=USR1", "--batch", str(job.job_id))
    job.wait_marks("told", 2)
    jobs.cluster.run("scancel", "--signal=TERM", "--batch", str(job.job_id))
    job.ends("FAILED", 143)
    assert ranks(job, "term") == [0, 1]
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


def test_a_job_is_cancelled_though_its_workers_end_well_before_the_agent_is_signalled(jobs):
    """Slurm signals the processes of a step one after the other; a helper makes the agent the last one."""
    job = jobs.submit(ENDS_WELL_FIRST, "", nodes=1)
    end = job.wait_end()
    assert (end.state, end.exit_code, job.result()["code"]) == ("FAILED", 143, 143), job.said()


def test_warned_and_stopped_before_the_time_limit(jobs):
    """Slurm 22.05 tells no end time in the environment: it is asked, first and before each of the two. In an image
    without its tools nvrx-run in front of the step tells it."""
    flags = f"--nproc-per-node=2 {IMAGE} --ft-warn-before-end=54 --ft-stop-before-end=47"
    job = jobs.submit(STAYS, flags, 1, sbatch=("--time=1",), lead=PATIENT)
    job.wait_marks("told", 2)
    assert job.marks("term") == []
    job.ends("FAILED", 143)
    assert (ranks(job, "told"), ranks(job, "term")) == ([0, 1], [0, 1])
    assert job.said().count("the allocation ends in ") == 1
    assert "less than 47 s of the allocation are left" in job.result()["reason"]
