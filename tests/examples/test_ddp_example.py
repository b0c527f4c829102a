"""The example trains the same weights whatever happens on the way: real processes, real gloo, real SIGKILL."""

import os
import re
import shutil
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from ranks_harness import Script

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.process, pytest.mark.torch]

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ddp.py"
EVERY = 10
WORLD_SIZE = 3  # the order of two additions cannot matter, that of three does
BOUND_S = 60  # for whatever should happen at once; only a defect waits this long


@contextmanager
def ranks(zygote, directory, steps, world_size, *options):
    """Start the example's ranks with torchrun's environment; none of them outlives the block.

    The rendezvous store lives here, on a port the kernel picked, as it does in a torchrun agent: no port to guess.
    """
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    command = [
        str(SCRIPT),
        f"--steps={steps}",
        f"--checkpoint-every={EVERY}",
        f"--checkpoint-dir={directory}",
        *options,
    ]
    processes = []
    try:
        with tempfile.TemporaryDirectory() as errors:
            for rank in range(world_size):
                env = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(Script(zygote, command, env, Path(errors, f"rank{rank}")))
            yield processes
    finally:
        for process in processes:
            process.close()


def run_to_end(zygote, directory, steps, world_size):
    """Train up to `steps`; rank 0's lines and its stderr."""
    with ranks(zygote, directory, steps, world_size) as processes:
        results = [process.communicate(timeout=BOUND_S) for process in processes]
        assert [process.returncode for process in processes] == [0] * world_size, results
    return results[0][0].splitlines(), results[0][1]


def test_killed_and_resumed_ends_like_uninterrupted(zygote, tmp_path):
    killed = tmp_path / "killed"
    progress = tmp_path / "progress"
    options = ("--step-time=0.005", f"--progress-file={progress}")
    with ranks(zygote, killed, 1_000_000, WORLD_SIZE, *options) as processes:
        assert any(line.startswith(f"step {2 * EVERY} ") for line in processes[0].stdout)
        step, pid = Path(f"{progress}.1").read_text().split()
        assert int(step) >= 2 * EVERY - 1 and int(pid) == processes[1].pid
        processes[1].send_signal(signal.SIGKILL)
        survivor_error = processes[0].communicate(timeout=BOUND_S)[1]
        assert processes[0].returncode > 0, "a rank whose peer died must fail, not wait"
        assert "Error" in survivor_error

    resumed_at = max(int(path.stem.removeprefix("step_")) for path in killed.glob("step_*.pt"))
    last = resumed_at + 2 * EVERY + 3  # also ends between two checkpoints
    resumed, _ = run_to_end(zygote, killed, last, WORLD_SIZE)
    uninterrupted, _ = run_to_end(zygote, tmp_path / "whole", last, WORLD_SIZE)

    assert f"resumed from step {resumed_at}" in resumed
    assert not any(line.startswith("resumed") for line in uninterrupted)
    assert re.fullmatch(rf"final step {last} loss 0x\S+ weights sha256=[0-9a-f]{{64}}", resumed[-1])
    assert resumed[-1] == uninterrupted[-1]
    assert not list(killed.glob(".*.tmp")) and len(list(killed.glob("step_*.pt"))) == 2


@pytest.fixture(scope="module")
def finished(zygote, tmp_path_factory):
    """A training of 2 x EVERY steps on one rank: its checkpoints, and what it said. To be copied."""
    directory = tmp_path_factory.mktemp("finished")
    return directory, run_to_end(zygote, directory, 2 * EVERY, world_size=1)[0]


def tear(path):
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path):
    """In the middle of the weights, where it would load without complaint."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


@pytest.mark.repeats("flip")
@pytest.mark.parametrize("damage", [tear, flip_a_bit])
def test_damaged_newest_checkpoint_is_skipped(zygote, finished, tmp_path, damage):
    directory, first = shutil.copytree(finished[0], tmp_path / "copy"), finished[1]
    newest = directory / f"step_{2 * EVERY:08d}.pt"
    damage(newest)

    again, stderr = run_to_end(zygote, directory, 2 * EVERY, world_size=1)

    assert f"warning: skipping checkpoint {newest}" in stderr
    assert f"resumed from step {EVERY}" in again
    assert again[-1] == first[-1]
