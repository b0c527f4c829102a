"""scripts/dev/gpu-trial where there is no GPU: a stand-in of NVML, gloo, and rows that say that they are untried."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from waits import WAIT_S

pytestmark = pytest.mark.process


SCRIPT = Path(__file__).parents[1] / "scripts" / "dev" / "gpu-trial"


def trial(directory, *args):
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "NVRX_"))}
    return subprocess.run(
        [str(SCRIPT), *args], cwd=directory, env=env | {"PYTHON": sys.executable}, text=True, capture_output=True,
        timeout=WAIT_S,
    )  # fmt: skip


@pytest.mark.matrix
@pytest.mark.torch
def test_rows(tmp_path):
    pytest.importorskip("torch")
    ended = trial(tmp_path, "--rows=nvml,checks,nproc-gpu,killed-warm,template")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = {row["row"]: row for row in json.loads((tmp_path / "gpu-trial.json").read_text())["rows"]}
    verdicts = {name: row["verdict"] for name, row in rows.items()}
    assert verdicts.pop("nproc-gpu") == "untried" and set(verdicts.values()) == {"ok"}
    assert rows["killed-warm"]["value"]["forked"] == [True, True]
    assert rows["template"]["value"] == {"template and standbys": 3, "devices open in them": 0}


def test_bad_arguments(tmp_path):
    ended = trial(tmp_path, "--rows=nvml,x")
    assert ended.returncode == 2 and "called x" in ended.stderr
