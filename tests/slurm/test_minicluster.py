"""scripts/minicluster: a real cluster whose nodes can be lost, and nothing of it is left behind."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import slurm_builds
from minicluster import MiniCluster

from nvrx_slurm.errors import UsageError

REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slurm
def test_the_script_lives_over_several_processes(cluster_root: Path, needs_slurm: None) -> None:

    def script(*words: str, code: int = 0) -> str:
        argv = [str(REPO / "scripts" / "minicluster"), *words, "--dir", str(cluster_root)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "no cluster in" in script("status", code=2)
    try:
        assert f"export SLURM_CONF={cluster_root}/slurm.conf" in script("up", "--nodes", "2")
        exports = f'eval "$({REPO}/scripts/minicluster env --dir {cluster_root})"'
        shell = f"{exports}; srun -w n2 sh -c 'echo $SLURMD_NODENAME'"
        assert subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60).stdout == "n2\n"
        assert "slurmd[" in script("kill-node", "n2")
        assert "no living node" in script("kill-node", "n2", code=2)
        script("restart-node", "n2")
        assert script("status").split() == ["munged", "up", "slurmctld", "up", "n1", "idle", "n2", "idle"]
        (cluster_root / "state.json").write_text("damaged")
    finally:
        said = script("down")  # finds all by scanning, the state file being of no use
    assert "slurmctld[" in said
    assert MiniCluster(cluster_root).scan() == []


def test_a_build_is_unpacked_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script stands in for the real `install`, which unpacks to /opt."""
    monkeypatch.setattr(slurm_builds, "_HOME", tmp_path)
    monkeypatch.setenv("NVRX_SLURM_BUILDS", str(tmp_path / "builds"))
    with pytest.raises(UsageError, match="NVRX_SLURM_BUILDS"):
        slurm_builds.install("25.11")
    with pytest.raises(UsageError, match="no build of Slurm 1.2"):
        slurm_builds.install("1.2")
    broken = tmp_path / "slurm-25.11/sbin/slurmctld"  # of an unpacking that was interrupted
    script = tmp_path / "builds/install"
    for file, text in ((broken, ""), (script, SLOW.format(root=tmp_path, broken=broken))):
        file.parent.mkdir(parents=True)
        file.write_text(text)
        file.chmod(0o755)
    with ThreadPoolExecutor() as two:
        assert list(two.map(slurm_builds.install, ["25.11", "25.11"])) == [None, None]
    assert (tmp_path / "asked").read_text() == "25.11\n" * 2


SLOW = """#!/bin/sh -e
[ ! -e {broken} ]
mkdir {root}/alone
echo "$1" >>{root}/asked
sleep 0.2
mkdir -p {root}/slurm-$1/include/slurm && : >{root}/slurm-$1/include/slurm/slurm_version.h
rmdir {root}/alone
"""
