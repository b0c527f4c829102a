"""Limits of the process that leave no room for a node's workers and monitors: one sentence, before anything starts."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
from agent_harness import Rig


@pytest.mark.parametrize(("soft", "hard", "code"), [(24, 24, 2), (24, 4096, 0)])
def test_open_files(rig: Rig, soft: int, hard: int, code: int) -> None:
    """Too low a soft limit is raised, too low a hard one is an error of usage."""
    script = rig.script("say('soft', RANK)")
    argv = [sys.executable, "-m", "nvrx_slurm.cli.run", f"--log-dir={rig.logs}", "--nproc-per-node=8", script]
    done = subprocess.run(
        ["bash", "-c", f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"', "bash", *argv],
        env=rig.env(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == code, done.stderr
    if code:
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > hard
        assert "this process may open 24 files but 8 workers with their monitors need 112" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    else:
        assert all(f"[rank {rank}] soft {rank}" in done.stdout for rank in range(8))
