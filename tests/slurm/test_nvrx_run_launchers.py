"""Several launchers per node, each with ranks of its own (NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE), on a real Slurm."""

from __future__ import annotations

import signal

import pytest
from nvrx_job import Jobs, kill

pytestmark = pytest.mark.slurm

MULTIPLE = "export NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE=1"
TELLS = """
mark("local=" + os.environ["LOCAL_RANK"] + "/" + os.environ["LOCAL_WORLD_SIZE"])
if CYCLE < 2:
    signal.pause()
"""


def test_a_killed_rank_and_a_lost_node_with_two_launchers_each(jobs: Jobs) -> None:
    shape = ("--nodes=3", "--ntasks-per-node=2")
    job = jobs.submit(TELLS, "--spares=2 --nproc-per-node=1 --max-restarts=2", 3, shape, MULTIPLE)
    up = job.wait_marks("up", 4, cycle=0)
    assert [mark.node for mark in up] == ["n1", "n1", "n2", "n2"]
    job.wait_marks("local=0/2", 2, cycle=0)
    job.wait_marks("local=1/2", 2, cycle=0)
    kill(up[1].pid, signal.SIGKILL)
    assert [mark.node for mark in job.wait_marks("up", 4, cycle=1)] == ["n1", "n1", "n2", "n2"]
    assert jobs.cluster.kill_node("n2")
    assert [mark.node for mark in job.wait_marks("up", 4, cycle=2)] == ["n1", "n1", "n3", "n3"]
    end = job.wait_end()
    assert (end.state, end.exit_code) == ("COMPLETED", 0), job.said()
    assert (job.result()["restarts_used"], job.result()["lost_nodes"]) == (2, ["n2"])


def test_srun_itself_starts_them(jobs: Jobs) -> None:
    job = jobs.new("mark('local=' + os.environ['LOCAL_RANK'])\n")
    flags = ("--nodes=2", "--ntasks-per-node=2", "--mpi=none", "--export=ALL,NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE=yes")
    jobs.srun(job, *flags, "nvrx-run", "--nproc-per-node=2", "worker.py")
    assert sorted(mark.rank for mark in job.marks("up")) == list(range(8))
    assert [len(job.marks(f"local={rank}")) for rank in range(4)] == [2, 2, 2, 2]


def test_without_the_variable_it_is_refused(jobs: Jobs) -> None:
    job = jobs.new("")
    said = jobs.srun(job, "--nodes=1", "--ntasks-per-node=2", "nvrx-run", "worker.py", code=2)
    assert "NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE" in said
    assert job.marks("up") == []
