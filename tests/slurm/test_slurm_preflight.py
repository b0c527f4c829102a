"""The preflight on a real Slurm: a node that falls sick is left out and a spare takes over."""

from __future__ import annotations

import signal
from pathlib import Path

import dgx
import pytest
from nvrx_job import Jobs, kill

from nvrx_slurm.errors import ExitCode

pytestmark = pytest.mark.slurm

PORT = "/sys/devices/pci0000:48/0000:48:01.0/0000:49:00.0/0000:4a:01.0/0000:4f:00.0/infiniband/mlx5_2/ports/1"
WHY = "nic-ports: mlx5_2/1 is DOWN"


def test_a_port_that_goes_down_costs_its_node_the_next_cycle(jobs: Jobs, tmp_path: Path) -> None:
    """SIGBUS hits a worker of n1 while the port of n2 is down: n2 fails its preflight, n3 is promoted. Each task
    looks at a recorded node of its own."""
    for name in ("n1", "n2", "n3"):
        dgx.build(tmp_path / name)
    prolog = tmp_path / "task_prolog"
    prolog.write_text(f'#!/bin/sh\necho "export NVRX_SYSROOT={tmp_path}/$SLURMD_NODENAME"\n')
    prolog.chmod(0o755)
    flags, lead = "--spares=1 --nproc-per-node=1 --max-restarts=1", f"export SLURM_TASK_PROLOG={prolog}"
    job = jobs.submit("if CYCLE == 0:\n    signal.pause()\n", flags, nodes=3, lead=lead)
    up = job.wait_marks("up", 2, cycle=0)
    assert [mark.node for mark in up] == ["n1", "n2"]
    dgx.write(tmp_path / "n2", f"{PORT}/state", "1: DOWN\n")
    kill(up[0].pid, signal.SIGBUS)

    end = job.wait_end()
    assert (end.state, end.exit_code) == ("COMPLETED", 0), job.said()
    assert [(mark.rank, mark.node) for mark in job.marks("up", 1)] == [(0, "n1"), (1, "n3")]
    assert f"nvrx-run[n1]: node 1 (n2) is not healthy: {WHY}" in job.said()
    log = job.agent_log(1).rstrip()
    assert f"nvrx-run[n2]: node n2 ends with code {ExitCode.NODE_REFUSED:d}: " in log.splitlines()[-1]
    assert WHY in log.splitlines()[-1]
    assert WHY in (job.run_dir / "events" / "coordinator.jsonl").read_text()
    assert job.result()["code"] == 0
