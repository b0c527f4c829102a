"""What nvrx-run needs of Slurm, on every version that is here: Debian's 22.05 and those of its later releases.

Other tests show more of it on 22.05.
"""

import json
import os
import signal

import pytest
from hooked_cluster import running
from minicluster import until
from nvrx_job import CLIENT, EXCLUDES_N2, Jobs, kill, nvrx_submit, start_again
from waits import WAIT_S

pytestmark = [
    pytest.mark.xdist_group("slurm-c"),
    pytest.mark.matrix,
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's hooks run as root"),
]

TWO_AND_A_SPARE = "--spares=1 --nproc-per-node=1 --max-restarts=2"
TWO_CYCLES_STAY = "if CYCLE < 2:\n    signal.pause()\n"
FIRST_LIFE_STAYS = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
mark("ready")
if "SLURM_RESTART_COUNT" not in os.environ:
    signal.pause()
"""
UNTIL_TOLD = CLIENT + """
import select
while not client.should_stop():
    select.select([], [], [], 0.02)
mark("told")
client.shutdown_workload_monitoring()
"""  # fmt: skip


@pytest.fixture(scope="module")
def hooked(slurm_version):
    with running(slurm_version, prolog_only=True) as cluster:
        yield cluster


@pytest.fixture
def jobs(hooked):
    hooked.mend()
    hooked.slurm.reset()
    made = Jobs(hooked.slurm)
    yield made
    made.check()


def test_a_killed_rank_and_the_loss_of_the_batch_host_are_survived(jobs):
    job = jobs.submit(TWO_CYCLES_STAY, TWO_AND_A_SPARE, 3)
    kill(job.wait_marks("up", 2, cycle=0)[1].pid, signal.SIGKILL)
    assert {mark.node for mark in job.wait_marks("up", 2, cycle=1)} == {"n1", "n2"}
    assert jobs.cluster.kill_node("n1")
    assert {mark.node for mark in job.wait_marks("up", 2, cycle=2)} == {"n2", "n3"}
    end = job.wait_end()
    # The Python of this machine cannot load libslurm of a later Debian; then the job is ended by scancel.
    state = "CANCELLED" if jobs.cluster.settings.slurm else "COMPLETED"
    assert (end.state, end.exit_code, job.result()["restarts_used"]) == (state, 0, 2), job.said()


def test_a_requeued_job_is_the_next_life(jobs):
    job = jobs.submit(FIRST_LIFE_STAYS, nodes=1, sbatch=("--requeue",))
    job.wait_marks("ready", 1)
    jobs.cluster.run("scontrol", "requeue", str(job.job_id))
    start_again(job.cluster, job.job_id)
    job.ends("COMPLETED", 0)
    tree = job.directory / "nvrx_logs" / str(job.job_id)
    assert [json.loads((tree / life / "result.json").read_text())["code"] for life in ("r0", "r1")] == [143, 0]
    assert job.run_dir.resolve() == tree / "r1"


def test_the_time_limit_is_told_before(jobs):
    """From squeue in 22.05, and from SLURM_JOB_END_TIME since."""
    job = jobs.submit(UNTIL_TOLD, "--spares=1 --ft-warn-before-end=58", 3, ("--time=1",))
    end = job.wait_end()
    assert [mark.rank for mark in job.marks("told")] == [0, 1]
    assert (end.state, end.exit_code, job.result()["code"]) == ("FAILED", 138, 138), job.said()


def test_the_prolog_drains_a_broken_node(jobs, hooked):
    hooked.assert_prolog_drains("n1")
    jobs.cluster.reset()


def told(job):
    """The last lines of the job's own output."""
    return [line for path in job.directory.rglob("*.out") for line in path.read_text().splitlines()[-4:]]


def test_a_submitted_job_is_requeued_without_the_node_that_it_excluded(jobs):
    first_life = EXCLUDES_N2.replace("CYCLE == 0", '"SLURM_RESTART_COUNT" not in os.environ')
    job, _ = nvrx_submit(jobs, first_life, "--nodes", "2", "--until-done")
    assert until(lambda: jobs.cluster.job(job.job_id)["ExcNodeList"] == "n2", WAIT_S), (job.marks("up"), told(job))
    start_again(jobs.cluster, job.job_id)
    job.ends("COMPLETED", 0)
    nodes = sorted(mark.node for mark in job.marks("up"))
    assert nodes in (["n1", "n1", "n2", "n3"], ["n1", "n2", "n3"])  # the first life may end before n1 is up
