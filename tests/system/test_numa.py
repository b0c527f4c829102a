"""NUMA binding: the numactl line of seed 000, clear failures, and a real worker bound to the real node 0."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.system import numa


def test_ranks_go_to_node_i_divided_by_gpus_per_numa(tmp_path: Path) -> None:
    online = tmp_path / "online"
    online.write_text("0-1\n")
    made = numa.prefixes(8, 4, strict=True, online=online)
    assert made[:4] == (("numactl", "--cpunodebind=0", "--membind=0"),) * 4
    assert made[4:] == (("numactl", "--cpunodebind=1", "--membind=1"),) * 4
    assert numa.prefixes(6, 4, strict=False, online=online)[5] == ("numactl", "--cpunodebind=1", "--localalloc")


def test_a_missing_numa_node_is_one_sentence(tmp_path: Path) -> None:
    online = tmp_path / "online"
    online.write_text("0,2-3\n")
    with pytest.raises(UsageError, match=r"puts local rank 3 on NUMA node 1, but this machine has nodes 0,2,3"):
        numa.prefixes(4, 2, strict=True, online=online)
    for unreadable in ("", "zero\n"):
        online.write_text(unreadable)
        assert len(numa.prefixes(4, 2, strict=True, online=online)) == 4


def run(tmp_path: Path, path: str, *flags: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "show.py"
    script.write_text("import subprocess; print(subprocess.run(['numactl', '--show'], capture_output=True).stdout)\n")
    argv = [sys.executable, "-m", "nvrx_slurm.cli.run", "--standalone", "--nproc-per-node=2", *flags, str(script)]
    env = {**os.environ, "NVRX_GPUS_PER_NUMA": "2", "PATH": path}
    return subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(shutil.which("numactl") is None, reason="numactl is not installed")
def test_real_workers_are_bound(tmp_path: Path) -> None:
    done = run(tmp_path, os.environ["PATH"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("policy: bind") == 2
    relaxed = run(tmp_path, os.environ["PATH"], "--ft-numa-bind-strict=false")
    assert relaxed.returncode == 0, relaxed.stderr
    assert "policy: bind" not in relaxed.stdout


def test_numactl_that_fails_is_one_sentence_before_anything_starts(tmp_path: Path) -> None:
    tool = tmp_path / "numactl"
    tool.write_text("#!/bin/sh\necho 'set_mempolicy: Operation not permitted' >&2; exit 1\n")
    tool.chmod(0o755)
    done = run(tmp_path, f"{tmp_path}:{os.environ['PATH']}", "--max-restarts=3")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "numactl --cpunodebind=0 --membind=0 fails on this node (set_mempolicy: Operation" in done.stderr
    assert not (tmp_path / "nvrx_logs").exists()
