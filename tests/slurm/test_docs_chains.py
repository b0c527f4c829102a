"""The batch scripts of docs/how-to/requeue-and-chain.md, as they stand there, on a real Slurm."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from minicluster import MiniCluster
from nvrx_job import PATIENCE_S, start_again

REPO = Path(__file__).resolve().parents[2]
TRAIN = """
import os, threading
from nvrx_slurm.fault_tolerance import RankMonitorClient
monitor = RankMonitorClient()
monitor.init_workload_monitoring()
life = os.environ.get("SLURM_RESTART_COUNT", "0")
print(f"trains in life {life}", flush=True)
while life == "0" and not monitor.should_stop():
    threading.Event().wait(0.05)
"""


def script(mark: str) -> str:
    """The script of the document that has `mark` in it."""
    scripts = re.findall(
        r"^```bash\n(.*?)^```", (REPO / "docs/how-to/requeue-and-chain.md").read_text(), re.MULTILINE | re.DOTALL
    )
    (text,) = (text for text in scripts if mark in text)
    return text


def submit(cluster: MiniCluster, directory: Path, mark: str, train: str) -> int:
    """That script for two nodes and with our nvrx-run on PATH."""
    text = script(mark)
    assert "--nodes=5 " in text and "\ntrap" in text
    text = text.replace("--nodes=5 ", "--nodes=2 ")
    text = text.replace("\ntrap", f"\nexport PATH={Path(sys.executable).parent}:$PATH\ntrap", 1)
    (directory / "train.py").write_text(train)
    return cluster.submit(text, f"--chdir={directory}")


@pytest.mark.slurm
def test_a_job_that_was_warned_requeues_itself_and_finishes(minicluster: MiniCluster, tmp_path: Path) -> None:
    job = submit(minicluster, tmp_path, "scontrol requeue", TRAIN)
    minicluster.wait_output(job, "trains in life 0", PATIENCE_S)
    minicluster.run("scancel", "--signal=USR1", str(job))
    start_again(minicluster, job)
    minicluster.wait_output(job, "trains in life 1", PATIENCE_S)
    end = minicluster.wait_job(job, PATIENCE_S)
    assert (end.state, end.exit_code) == ("COMPLETED", 0), minicluster.output(job)
    results = [tmp_path / f"nvrx_logs/{job}/{life}/result.json" for life in ("r0", "r1")]
    assert [json.loads(result.read_text())["code"] for result in results] == [138, 0]
