"""scripts/minicluster: a real cluster whose nodes can be lost, and nothing of it is left behind."""

import subprocess
from pathlib import Path

import pytest
from minicluster import MiniCluster

pytestmark = pytest.mark.slurm


REPO = Path(__file__).resolve().parents[2]


@pytest.mark.slurm
def test_the_script_lives_over_several_processes(cluster_root, needs_slurm):

    def script(*words, code=0):
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
