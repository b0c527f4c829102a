"""Merged logs of a job on a real Slurm: nodes are lost, and each line of the ranks is there once."""

from __future__ import annotations

from pathlib import Path

import pytest
from log_harness import by_source
from nvrx_job import Jobs

from nvrx_slurm.core.logs.names import index_file

pytestmark = pytest.mark.slurm

CHATTY = """
import time
for number in range(200):
    print("line", number)
mark("written")
while CYCLE < 2:
    time.sleep(0.05)
print("last")
"""


def test_merged_logs_survive_the_node_of_the_coordinator_and_any_other(jobs: Jobs) -> None:
    flags = "--spares=2 --nproc-per-node=2 --max-restarts=4 --redirects=3 --ft-nvrx-logfile=$PWD/%j_%r_nvrx.log"
    job = jobs.submit(CHATTY, f"{flags} --ft-per-cycle-applog-prefix=$PWD/%j_%r_train.log")
    merged = job.directory
    for cycle in range(2):  # first the node of a rank, then that of the coordinator
        lost = job.wait_marks("written", 4, cycle=cycle)
        path = merged / f"{job.job_id}_0_train_cycle{cycle}.log"
        job.wait_for(lambda p=path: p.exists() and p.read_text().count("line 199") == 4, "the cycle is merged")
        assert jobs.cluster.kill_node(next(mark.node for mark in lost if (mark.node == "n1") == (cycle == 1)))
    end = job.wait_end()
    assert (end.state, end.exit_code) == ("COMPLETED", 0), job.said()
    path = merged / f"{job.job_id}_0_train_cycle2.log"
    found = by_source(path.read_bytes(), Path(index_file(str(path))).read_bytes())
    tree = job.directory / "nvrx_logs"
    written = {str(file.relative_to(tree)): file.read_bytes() for file in tree.glob("*/r0/cycle_2/*/rank_*.*")}
    assert found == {name: data for name, data in written.items() if data} and len(found) == 4
    assert path.read_text().count(": last\n") == 4
    said = (merged / f"{job.job_id}_0_nvrx.log").read_text()
    assert "nvrx-run[n1]" in said and "nvrx-run[n4]" in said and "job ends with code 0" in said
