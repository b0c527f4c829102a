"""An attribution service asked by a job on a real Slurm: it hears of every cycle, whichever node coordinates."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from nvrx_job import Jobs

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "attribution"))
from fakes import Fake, reply

pytestmark = pytest.mark.slurm

FAILS = """
import time
while CYCLE < 2:
    time.sleep(0.05)
"""


def test_every_cycle_is_submitted_by_whichever_node_coordinates(jobs: Jobs) -> None:
    said = {"action": "RESTART", "reason": "a node was lost", "source": "test"}
    with Fake(b"") as service:
        service.answer = lambda asked: reply(200, {"recommendation": said} if asked.method == "GET" else {})  # type: ignore[method-assign]
        flags = f"--spares=2 --nproc-per-node=1 --max-restarts=4 --ft-attribution-endpoint={service.url}"
        flags += " --rdzv-conf=last_call_timeout=30"  # n1 is not late: it has a rank, and coordinates the job
        job = jobs.submit(FAILS, f"{flags} --ft-per-cycle-applog-prefix=$PWD/m/%j.log")
        for cycle in range(2):  # first the node of a rank, then that of the coordinator
            lost = job.wait_marks("up", 2, cycle=cycle)
            assert jobs.cluster.kill_node(next(mark.node for mark in lost if (mark.node == "n1") == (cycle == 1)))
        end = job.wait_end()
    assert (end.state, end.exit_code) == ("COMPLETED", 0), job.said()
    posted = [one.json for one in service.asked if one.method == "POST"]
    assert {(one["job_id"], one["log_path"]) for one in posted} == {
        (str(job.job_id), f"{job.directory}/m/{job.job_id}_cycle{cycle}.log") for cycle in range(3)
    }
    assert {one["cycle_id"] for one in posted if one["analysis_intent"] == "terminal"} == {0, 1, 2}
