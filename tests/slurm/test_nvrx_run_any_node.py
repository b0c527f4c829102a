"""Any node of a job on a real Slurm may die: that of the coordinator and of the batch script included."""

import os
import signal

import one_writer
import pytest
from nvrx_job import wait_in
from waits import WAIT_S

pytestmark = pytest.mark.slurm


WAITS = """
import time
if CYCLE < int(os.environ["LAST"]):
    signal.pause()
while not os.path.exists("go"):  # the test has seen all ranks
    time.sleep(0.01)
"""
TWO_AND_TWO = "--spares=2 --max-restarts=4"


def start(jobs, flags, last, elsewhere=False):
    """A job that waits until cycle `last`. `elsewhere`: the batch script starts its step without its own node."""
    more = " --srun-arg=--exclude=n1 --srun-arg=--nodes=3 --srun-arg=--ntasks=3" if elsewhere else ""
    return jobs.submit(WAITS, flags + more, lead=f"export LAST={last}")


def lose(jobs, job, victim, ranks, cycle):
    """Kill a node that runs `cycle`, and wait until all ranks run in the next."""
    job.wait_marks("up", ranks, cycle)
    assert jobs.cluster.kill_node(victim)
    again = job.wait_marks("up", ranks, cycle + 1)
    assert victim not in {mark.node for mark in again}


def wait_said(job, text, count=1):
    """Wait until so many agents have said `text`."""
    agents = job.run_dir / "agents"
    assert wait_in(agents, lambda: sum(text in a.read_text() for a in agents.iterdir()) >= count, WAIT_S), text


def assert_completed(job, lost):
    """Slurm, result.json and the last coordinator tell the same."""
    (job.directory / "go").touch()
    job.ends("COMPLETED", 0)
    result = job.result()
    assert result["code"] == 0
    assert result["restarts_used"] >= len(lost) and {mark.node for mark in job.marks("up")} >= lost
    logs = [text for path in job.run_dir.glob("agents/*.log") if "job ends with code" in (text := path.read_text())]
    assert len(logs) == 1 and "job ends with code 0" in logs[0]


@pytest.mark.matrix
def test_the_job_of_a_lost_batch_host_is_ended_once_slurmctld_answers(jobs):
    """Before, a lost spare costs no cycle."""
    job = start(jobs, TWO_AND_TWO, last=1)
    job.wait_marks("up", 2, 0)
    assert jobs.cluster.kill_node("n4")
    wait_said(job, "node n4 left")
    [step] = set(jobs.cluster.run("squeue", "--steps", "-h", "-j", str(job.job_id), "-o", "%j").split()) - {"batch"}
    lose(jobs, job, "n1", 2, 0)
    jobs.cluster.kill_controller(saved=step)
    (job.directory / "go").touch()
    wait_said(job, "trying to end job")
    jobs.cluster.start_controller()
    assert_completed(job, {"n1"})


def test_the_console_follows_the_coordinator(jobs):
    """The batch script's node n1 has no agent here; the coordinator is on n2."""
    job = start(jobs, "--spares=1 --max-restarts=1", last=1, elsewhere=True)
    lose(jobs, job, "n2", 2, 0)
    assert_completed(job, {"n2"})
    said = job.said()
    assert said.count("job ends with code 0") == 1 and "coordinator listens" in said, said


@pytest.mark.repeats("stopped-setsid", "stopped-popen", "stopped-daemon", "stopped-first", "stopped-spare", "killed")
@pytest.mark.parametrize("again", one_writer.REPEATS)
@pytest.mark.parametrize(("fault", "shape"), one_writer.CASES)
def test_all_processes_of_a_rank_end_before_it_runs_elsewhere(jobs, fault, shape, again):
    lost = 2 if shape == "spare" else 1
    quick = "--ft-keepalive-interval=0.7 --ft-keepalive-timeout=0.7"
    job = jobs.submit(one_writer.worker(fault, shape), f"--spares=2 --max-restarts=4 {quick}")
    job.wait_for(lambda: len(one_writer.writers(job.directory / "written").get(0, ())) == lost + 1, "rank 0 runs on")
    struck = [int(pid) for pid in (job.directory / "struck").read_text().split()]
    if fault == "stopped":
        os.kill(struck[-1], signal.SIGCONT)
        wait_said(job, f"cycle {lost}: this node is a hot spare", 3 - lost)
    (job.directory / f"end{lost}").touch()
    assert job.wait_end().state == "COMPLETED", job.said()
    assert len(one_writer.writers(job.directory / "written")[0]) == lost + 1 == len(struck) + 1
