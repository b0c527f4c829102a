"""Both examples under nvrx-run: a rank is stopped, its monitor notices by a learned limit, the training ends well."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.process, pytest.mark.torch, pytest.mark.xdist_group("hang examples")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
# A learned limit is twice the first step, at least 1 s. The configured limits are far beyond BOUND_S.
LEARNED = ["--ft-workload-check-interval=1", "--ft-safety-factor=2"]
BOUND_S = 90.0
STEPS = 50
HEARTBEATS = ["--ft-initial-rank-heartbeat-timeout=600", "--ft-rank-heartbeat-timeout=600"]
SECTIONS = ["--ft-rank-section-timeouts=setup:600,step:600,checkpointing:600", "--ft-rank-out-of-section-timeout=600"]


# The stop lands in whatever rank 1 does after step 30: usually the next step, at times still the checkpoint before it.
@pytest.mark.repeats("ddp", "sections")
@pytest.mark.parametrize(
    "script, limits, seen",
    [
        ("ddp.py", HEARTBEATS, r"no heartbeat for"),
        ("ddp_sections.py", SECTIONS, r"in section '(step|checkpointing)' for"),
    ],
    ids=["ddp", "sections"],
)
def test_a_stopped_rank_is_noticed_by_a_learned_limit_and_the_training_goes_on(script, limits, seen, tmp_path):
    progress, checkpoints = tmp_path / "progress", tmp_path / "checkpoints"
    command = [sys.executable, "-m", "nvrx_slurm.cli.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += [f"--log-dir={tmp_path / 'logs'}", "--ft-preload=torch,torch._dynamo", *limits, *LEARNED]
    command += [str(EXAMPLES / script), f"--steps={STEPS}", "--checkpoint-every=10", f"--checkpoint-dir={checkpoints}"]
    command += ["--learn-timeouts", "--step-time=0.02", f"--progress-file={progress}"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "FT_", "NVRX_"))}
    text, stopped = "", False
    with subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        watchdog = threading.Timer(BOUND_S, process.kill)  # a defect, not a way to end
        watchdog.start()
        try:
            for line in process.stdout:
                text += line
                if " step 30 " in line and not stopped:  # after the third checkpoint: the limits have been learned
                    stopped = True
                    os.kill(int(Path(f"{progress}.1").read_text().split()[1]), signal.SIGSTOP)
        finally:
            watchdog.cancel()
            process.kill()
    assert process.returncode == 0 and stopped, text
    hangs = re.findall(r".* hung: .*", text)
    assert hangs and all(re.search(seen, line) for line in hangs), text
    assert "resumed from step" in text and text.count("ranks 0..1") == 2, text
    assert len(re.findall(rf"^\[rank 0\] final step {STEPS} ", text, re.MULTILINE)) == 1, text

    timeouts = torch.load(checkpoints / f"step_{STEPS:08d}.pt", weights_only=True)["timeouts"]["current_timeouts"]
    if script == "ddp.py":
        assert timeouts["heartbeat"]["were_calculated"] and timeouts["heartbeat"]["subsequent"] < 600
    else:
        assert timeouts["section"]["calculated_sections"] == ["checkpointing", "setup", "step"]  # resumed: setup, too
        assert not timeouts["section"]["is_out_of_section_calculated"]
