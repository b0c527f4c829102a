"""How nvrx-run and Slurm end jobs together: codes, signals, the time limit, requeues. Nothing is left, no node drained.

What a single node does by itself is in tests/node: test_agent_signals.py, test_agent_warning.py, test_agent_output.py.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from nvrx_job import CLIENT, EXCLUDES_N2, Job, Jobs, start_again

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
IMAGE = f"--step-prefix=env --step-prefix=PATH={Path(sys.executable).parent}"
PATIENT = "export NVRX_KILL_WAIT=30"  # Slurm's default; the cluster's own is short for a busy machine
# Odd ranks have a handler of their own; the others must not die of the signal.
ASKS = CLIENT + """
import select
if RANK % 2:
    signal.signal(signal.SIGUSR1, lambda *_: mark("handler"))
def train_until_told():
    while not client.should_stop():
        select.select([], [], [], 0.02)
    mark("told")
"""  # fmt: skip
STAYS = ASKS + """
def ended(signum, frame):
    mark("term")
    sys.exit(0)
signal.signal(signal.SIGTERM, ended)
mark("ready")
train_until_told()
while True:
    select.select([], [], [], 0.2)  # signal.pause() may miss the second of two signals
"""  # fmt: skip


def assert_143_everywhere(job: Job) -> None:
    """Every agent knew the end and its code."""
    assert job.result()["code"] == 143
    for infra_rank in range(4):
        assert job.agent_log(infra_rank).count(" ends with code 143: ") == 1


def ranks(job: Job, what: str) -> list[int]:
    return [mark.rank for mark in job.marks(what)]


def test_each_agent_has_its_code_and_the_job_the_coordinators(jobs: Jobs) -> None:
    job = jobs.submit(EXCLUDES_N2, "--max-restarts=3", nodes=3)
    end = job.wait_end()
    said = job.said()
    assert (end.state, end.exit_code, end.signal, job.result()["code"]) == ("FAILED", 94, 0, 94), said
    for task, code in enumerate((94, 95, 94)):
        assert f"n{task + 1}: task {task}: Exited with exit code {code}" in said


def test_scancel_ends_workers_within_kill_wait_and_leaves_nothing(jobs: Jobs) -> None:
    job = jobs.submit(STUBBORN, TWO_PLUS_TWO)
    job.wait_marks("ready", 4)
    began = time.monotonic()
    jobs.cluster.run("scancel", str(job.job_id))
    assert job.wait_end().state == "CANCELLED"
    assert time.monotonic() - began < jobs.cluster.settings.kill_wait_s
    assert ranks(job, "term") == [0, 1, 2, 3]  # each once, though Slurm and we signal
    assert_143_everywhere(job)  # so the agents were not killed by Slurm but left by themselves
    assert "SIGTERM from Slurm" in job.result()["reason"]
    job.assert_nothing_left()


def test_sigterm_to_the_front_alone_is_passed_on_and_its_code_is_143(jobs: Jobs) -> None:
    job = jobs.submit(TELLS, TWO_PLUS_TWO)
    job.wait_marks("ready", 4)
    jobs.cluster.run("scancel", "--signal=TERM", "--batch", str(job.job_id))
    end = job.wait_end()
    assert (end.state, end.exit_code) == ("FAILED", 143), job.said()
    assert ranks(job, "term") == [0, 1, 2, 3]
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


def test_warned_and_stopped_before_the_time_limit(jobs: Jobs) -> None:
    """Slurm 22.05 tells no end time in the environment: it is asked, first and before each of the two. In an image
    without its tools nvrx-run in front of the step tells it."""
    flags = f"--nproc-per-node=4 {IMAGE} --ft-warn-before-end=52 --ft-stop-before-end=44"
    job = jobs.submit(STAYS, flags, 1, sbatch=("--time=1",), lead=PATIENT)
    job.wait_marks("told", 4)
    assert job.marks("term") == []
    end = job.wait_end()
    assert (end.state, end.exit_code) == ("FAILED", 143), job.said()
    assert (ranks(job, "told"), ranks(job, "term")) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert job.said().count("the allocation ends in ") == 1
    assert "less than 44 s of the allocation are left" in job.result()["reason"]


def test_a_preempted_job_ends_its_workers_gently_and_resumes(jobs: Jobs) -> None:
    """What Slurm does to a job that it preempts by requeue: SIGTERM, then the queue."""
    job = jobs.submit(STAYS, TWO_PLUS_TWO, sbatch=("--requeue",))
    job.wait_marks("ready", 4)
    jobs.cluster.run("scontrol", "requeue", str(job.job_id))
    start_again(job.cluster, job.job_id)
    assert ranks(job, "term") == [0, 1, 2, 3]
    tree = job.directory / "nvrx_logs" / str(job.job_id)
    assert '"code": 143' in (tree / "r0" / "result.json").read_text()
    job.wait_marks("ready", 8)
    jobs.cluster.run("scancel", "--signal=USR1", "--batch", str(job.job_id))
    job.wait_marks("told", 4)
    assert sorted(path.name for path in tree.iterdir()) == ["r0", "r1"] and job.run_dir.resolve() == tree / "r1"
    assert len(list((tree / "r1").glob("cycle_0/node_*/rank_?.out"))) == 4
    jobs.cluster.run("scancel", str(job.job_id))
    assert job.wait_end().state == "CANCELLED"
    assert ranks(job, "told") == [0, 1, 2, 3] and ranks(job, "handler") == [1, 3]  # each once
