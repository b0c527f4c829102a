"""--ft-segment with the blocks of a real Slurm's topology. (Debian's 22.05 has no topology of blocks.)"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from minicluster import MiniCluster
from nvrx_job import Jobs

pytestmark = pytest.mark.matrix

VERSION = "25.11"
BLOCKS = "BlockName=left Nodes=n[1-2]\nBlockName=right Nodes=n[3-4]\nBlockName=far Nodes=n[5-6]\nBlockSizes=2\n"
FLAGS = "--ft-segment=2 --spares=2 --max-restarts=1"


@pytest.fixture
def jobs(needs_slurm: None) -> Iterator[Jobs]:
    """Makes jobs on three blocks of two nodes."""
    if reason := MiniCluster.available(VERSION):
        pytest.skip(reason)
    root = Path(f"/tmp/nvrx-segments-{os.getpid()}")
    root.mkdir(mode=0o700)
    (root / "topology.conf").write_text(BLOCKS)
    extra = ("TopologyPlugin=topology/block",)
    with MiniCluster(root, 6, kill_wait_s=5, die_with_owner=True, slurm=VERSION, extra=extra) as cluster:
        made = Jobs(cluster)
        yield made
        made.check()
    shutil.rmtree(root)


def test_a_broken_segment_moves_as_a_whole(jobs: Jobs) -> None:
    job = jobs.submit("if CYCLE == 0:\n    signal.pause()\n", FLAGS, 6)
    assert [mark.node for mark in job.wait_marks("up", 4, cycle=0)] == ["n1", "n2", "n3", "n4"]
    assert jobs.cluster.kill_node("n3")
    assert [mark.node for mark in job.wait_marks("up", 4, cycle=1)] == ["n1", "n2", "n5", "n6"]
    end = job.wait_end()
    assert (end.state, end.exit_code) == ("COMPLETED", 0), job.said()

    job = jobs.new("")
    env = {**os.environ, **jobs.cluster.env(), "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-6]"}
    command = [sys.executable, "-m", "nvrx_slurm.cli.run", "--dry-run", *FLAGS.split(), "worker.py"]
    told = subprocess.run(command, env=env, cwd=job.directory, capture_output=True, text=True, timeout=60)
    rows = [line.split() for line in told.stdout.splitlines() if line.startswith("  n")]
    assert [(row[0], "spare" in row) for row in rows] == [
        ("n1", False), ("n2", False), ("n3", False), ("n4", False), ("n5", True), ("n6", True),
    ], told.stdout + told.stderr  # fmt: skip
