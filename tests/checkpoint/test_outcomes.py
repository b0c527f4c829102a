"""What becomes of a restart is said in one line: on the console, in the event log, status, report and account."""

import json
import tempfile
from pathlib import Path

import pytest
from test_jobs import keepers, launch

from nvrx_slurm.views.report import facts_of

pytest.importorskip("torch")
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
BOUND_S = 240.0  # torch is imported, perhaps on a busy machine

# Two ranks keep each step but the last one before the fault; then one of them is killed.
FAULT_AT = 4
TRAINING = """
import os, signal, socket, struct
import torch
import torch.distributed as dist
from nvrx_slurm import checkpoint
from nvrx_slurm.checkpoint import link, messages as m, rank as keeping

dist.init_process_group("gloo")
rank, cycle = dist.get_rank(), int(os.environ["NVRX_CYCLE"])
weights = torch.nn.Parameter(torch.zeros(8))
optimizer = torch.optim.SGD([weights], lr=1.0)

def keeper():
    with link.connect(link.address(os.environ, 0)) as one:
        return struct.unpack("iII", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]

def flip(count):
    held, _ = keeping._keeper.ask(m.AskHeld(), m.HeldSaves)
    for save in held.saves:
        os.close(keeping._keeper.ask(m.AskSaved(save), m.Saved)[1])  # its checksum is made by now
    for mapped in list(keeping._keeper._mapped.values())[-count:]:
        mapped.pages[0] ^= 1

found = checkpoint.load({"weights": weights})
for step in range(0 if found is None else found[1], FAULT_AT + 1):
    if cycle == 0 and step == FAULT_AT:
        dist.barrier()
        if rank == 1:
            PREPARED
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    weights.grad = torch.ones(8)
    dist.all_reduce(weights.grad)
    optimizer.step()
    if cycle or step + 1 < FAULT_AT:
        assert checkpoint.save({"weights": weights}, step + 1)
dist.destroy_process_group()
"""
# What happens to memory before that.
PREPARED = {
    "whole": "pass",
    "newest-damaged": "flip(1)",
    "all-damaged": "flip(2)",
    "keeper-killed": "os.kill(keeper(), signal.SIGKILL)",
}


def run(directory, prepared):
    """Console, result, and the place of the run."""
    program = TRAINING.replace("FAULT_AT", str(FAULT_AT)).replace("PREPARED", prepared)
    (directory / "train.py").write_text(program)
    with launch(directory, [str(directory / "train.py")]) as job:
        text, _ = job.communicate(timeout=BOUND_S)
    assert job.returncode == 0, text
    assert keepers(job.pid) == []
    (path,) = (directory / "logs").glob("*/r0/result.json")
    return text, json.loads(path.read_text()), path.parent


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="nvrx-ko-") as name:
        yield Path(name)


OUTCOMES = {
    "whole": (FAULT_AT - 1, "memory", 1, ["is loaded from memory"]),
    "newest-damaged": (FAULT_AT - 2, "memory", 2, [f"iteration {FAULT_AT - 1} is not whole on rank 1", "is loaded"]),
    "all-damaged": (-1, "disk", -1, [f"iteration {FAULT_AT - 1} is not whole", "read the disk"]),
    "keeper-killed": (-1, "disk", -1, ["nothing is in memory", "read the disk"]),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_each_outcome_is_one_line_and_counted(directory, case):
    iteration, source, steps, words = OUTCOMES[case]
    text, result, place = run(directory, PREPARED[case])
    (restart,) = result["restarts"]
    assert (restart["memory"], restart["source"], restart["steps"]) == (iteration, source, steps), text
    line = restart["resumed"]
    assert all(word in line for word in words)
    assert text.count(f"cycle 1: {line}") == 1
    events = "".join(path.read_text() for path in place.glob("events/coordinator*.jsonl"))
    assert line in events
    facts = facts_of(place)
    assert facts.incidents[0].resumed == line
    reloads = result["account"]["reloads"]
    assert list(reloads) == [source]
    assert 0 < reloads[source] <= result["account"]["node_seconds"]["reload"]
    grade = result["account"]["grades"]["recomputed"]
    assert grade == ("estimated" if source == "disk" else "bounded")
