"""The in-process wrapper under nvrx-run on a real Slurm: a rank dies, which is its business, then a node."""

from __future__ import annotations

import signal

import pytest
from nvrx_job import Job, Jobs, Mark, kill

pytest.importorskip("torch")
pytestmark = [pytest.mark.slurm, pytest.mark.torch]

POLICY = "--restart-policy=min-healthy --spares=1 --nproc-per-node=2 --max-restarts=2"
LOADED_S = 90.0  # until all ranks have imported torch, on a machine that has other things to do
# Four ranks are active, more are the reserve. Marks "in<iteration>-of-<world size>"; waits for a fault in cycle 0, then
# returns.
WRAPPED = """
import time
from datetime import timedelta
from nvrx_slurm import inprocess
from nvrx_slurm.inprocess.plugins.rank_assignment import MaxActiveWorldSize, ShiftRanks

@inprocess.Wrapper(rank_assignment=inprocess.Compose(MaxActiveWorldSize(4), ShiftRanks()), last_call_wait=timedelta(0))
def train(call: inprocess.CallWrapper):
    mark(f"in{call.iteration}-of-{os.environ['WORLD_SIZE']}")
    while CYCLE == 0:
        time.sleep(0.01)

train()
mark("returned")
"""


def entered(job: Job, iteration: int, cycle: int) -> list[Mark]:
    """Waits until four ranks are in this iteration; in order of their first ranks."""
    what = f"in{iteration}-of-4"
    job.wait_for(lambda: len(job.marks(what, cycle)) >= 4, f"4 x {what} of cycle {cycle}", LOADED_S)
    return job.marks(what, cycle)


def places(marks: list[Mark]) -> list[tuple[int, str]]:
    return [(mark.rank, mark.node) for mark in marks]


def test_a_dead_rank_is_the_wrappers_business_and_a_lost_node_the_agents(jobs: Jobs) -> None:
    job = jobs.submit(WRAPPED, POLICY, nodes=3)
    first = entered(job, iteration=0, cycle=0)
    assert places(first) == [(0, "n1"), (1, "n1"), (2, "n2"), (3, "n2")]
    started = job.marks("up", 0)
    assert len(started) == 6  # n3 stands by in the wrapper

    kill(first[1].pid, signal.SIGKILL)
    again = entered(job, iteration=1, cycle=0)
    assert places(again) == [(0, "n1"), (2, "n2"), (3, "n2"), (4, "n3")]
    assert [mark.pid for mark in again] == [started[rank].pid for rank in (0, 2, 3, 4)]
    assert job.marks("up", 1) == []

    assert jobs.cluster.kill_node("n2")
    assert places(entered(job, iteration=0, cycle=1)) == [(0, "n1"), (1, "n1"), (2, "n3"), (3, "n3")]
    end = job.wait_end()
    assert (end.state, end.exit_code) == ("COMPLETED", 0), job.said()
    assert len(job.marks("returned", 1)) == 4 and job.marks("returned", 0) == []
    assert "was killed by SIGKILL; going on: 2 of 3 nodes are good, 2 are needed" in job.said()
    assert "node 1 (n2) was lost" in job.said() and "restart 1 of 2" in job.said()
