"""Both examples under nvrx-run: a rank is stopped, its monitor notices by a learned limit, the training ends well."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ranks_harness import Zygote
from test_ddp_example import run_to_end

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("hang examples")]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NVRX_RUN = [sys.executable, "-m", "nvrx_slurm.cli.run"]
LEARNED_S = "2"  # the configured limits are far beyond BOUND_S
BOUND_S = 90.0
STEPS = 120
LIMITS = {
    "ddp.py": ["--ft-initial-rank-heartbeat-timeout=600", "--ft-rank-heartbeat-timeout=600"],
    "ddp_sections.py": [
        "--ft-rank-section-timeouts=setup:600,step:600,checkpointing:600",
        "--ft-rank-out-of-section-timeout=600",
    ],
}
# The stop lands in whatever rank 1 does after step 50: usually the next step, at times still the checkpoint before it.
SEEN = {"ddp.py": r"no heartbeat for", "ddp_sections.py": r"in section '(step|checkpointing)' for"}


@contextmanager
def training(script: str, directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    command = [*NVRX_RUN, "--standalone", "--nproc-per-node=2", "--max-restarts=1", f"--log-dir={directory / 'logs'}"]
    command += [*LIMITS[script], f"--ft-workload-check-interval={LEARNED_S}", str(EXAMPLES / script)]
    command += [f"--steps={STEPS}", "--checkpoint-every=10", f"--checkpoint-dir={directory / 'ckpt'}", *options]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "FT_", "NVRX_"))}
    process = subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    watchdog = threading.Timer(BOUND_S, process.kill)  # a defect, not a way to end
    watchdog.start()
    try:
        yield process
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(scope="module")
def final(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The last line of an undisturbed training; both scripts train the same model."""
    zygote = Zygote("torch._dynamo")
    try:
        return run_to_end(zygote, tmp_path_factory.mktemp("whole"), STEPS, world_size=2)[0][-1]
    finally:
        zygote.close()


@pytest.mark.parametrize("script", LIMITS)
def test_a_stopped_rank_is_noticed_by_a_learned_limit_and_the_training_ends_as_without(
    script: str, tmp_path: Path, final: str
) -> None:
    progress, lines, stopped = tmp_path / "progress", [], 0
    options = ("--learn-timeouts", "--step-time=0.02", f"--progress-file={progress}")
    with training(script, tmp_path / "hung", *options) as process:
        for line in process.stdout:
            lines.append(line)
            if " step 50 " in line and not stopped:  # after the fifth checkpoint: the limits have been learned
                stopped = int(Path(f"{progress}.1").read_text().split()[1])
                os.kill(stopped, signal.SIGSTOP)
        assert process.wait() == 0, "".join(lines)
    text = "".join(lines)
    assert stopped
    hangs = [line for line in lines if " hung: " in line and "rank" in line]
    assert hangs and all(re.search(SEEN[script], line) for line in hangs), text
    assert "resumed from step" in text and text.count("ranks 0..1") == 2, text

    assert [line for line in text.splitlines() if f"final step {STEPS}" in line] == [f"[rank 0] {final}"]

    newest = sorted((tmp_path / "hung" / "ckpt").glob("step_*.pt"))[-1]
    timeouts = torch.load(newest, weights_only=True)["timeouts"]["current_timeouts"]
    if script == "ddp.py":
        assert timeouts["heartbeat"]["were_calculated"] and timeouts["heartbeat"]["subsequent"] < 600
    else:
        assert timeouts["section"]["calculated_sections"] == ["checkpointing", "setup", "step"]  # resumed: setup, too
        assert not timeouts["section"]["is_out_of_section_calculated"]
