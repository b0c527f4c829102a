"""The callback for the Trainer of transformers, where that is installed. Faults: scripts/dev/clients."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process


pytest.importorskip("transformers", reason="extra: transformers")
PROGRAM = Path(__file__).resolve().parents[2] / "scripts/lib/client_programs/hf_trainer.py"


@pytest.mark.torch
def test_a_warned_run_saves_and_the_next_one_learns(tmp_path):
    limits = ["--ft-initial-rank-heartbeat-timeout=60", "--ft-rank-heartbeat-timeout=60"]
    words = ["--standalone", "--nproc-per-node=2", *limits, str(PROGRAM), "out"]
    command = [sys.executable, "-m", "nvrx_slurm", *words]
    with subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE) as job:
        assert any("step 15" in line for line in job.stdout)
        job.send_signal(signal.SIGUSR1)
        rest = job.stdout.read()
        assert job.wait(60) == 128 + signal.SIGUSR1
    (last,) = [line.split()[4] for line in rest.splitlines() if "final step" in line]
    assert 15 < int(last) < 60 and (tmp_path / f"out/checkpoint-{last}").is_dir()
    assert "final step 60" in subprocess.check_output(command, cwd=tmp_path, text=True, timeout=100)
    assert json.loads((tmp_path / "out/ft_state.json").read_text())["current_timeouts"]["heartbeat"]
