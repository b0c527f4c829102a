"""What becomes of a restart is said in one line: on the console, in the event log, status, report and account."""

import json
import tempfile
from pathlib import Path

import pytest
from test_jobs import FAULT_AT, STEPS, TRAINING, keepers, launch

from nvrx_slurm.views.report import facts_of

pytest.importorskip("torch")
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
BOUND_S = 240.0  # torch is imported, perhaps on a busy machine

# What happens to memory before the fault, by the rank that will be killed.
PREPARED = {
    "whole": "",
    "newest-damaged": "flip(1)",
    "all-damaged": "flip(2)",
    "keeper-killed": "os.kill(keeper(), signal.SIGKILL)",
}
HELPERS = """
import socket, struct
from nvrx_slurm.checkpoint import messages as m

def keeper():
    with link.connect(link.address(os.environ, 0)) as one:
        return struct.unpack("iII", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]

def flip(count):
    held, _ = keeping._keeper.ask(m.AskHeld(), m.HeldSaves)
    for save in held.saves:
        os.close(keeping._keeper.ask(m.AskSaved(save), m.Saved)[1])  # its checksum is made by now
    for mapped in list(keeping._keeper._mapped.values())[-count:]:
        mapped.pages[0] ^= 1

def prepare():
    PREPARED
"""


def run(directory, prepared, *more, fault_at=FAULT_AT):
    """A rank is killed after a step that is in no memory. Console, result, and the place of the run."""
    program = TRAINING.replace(
        "fault, fault_at", HELPERS.replace("PREPARED", prepared or "pass") + "\nfault, fault_at", 1
    )
    program = program.replace(
        "    assert checkpoint.save", "    if step + 1 != fault_at or cycle:\n        assert checkpoint.save"
    )
    program = program.replace(
        "        if rank == 1 and fault not in",
        "        if rank == 1:\n            prepare()\n        if rank == 1 and fault not in",
    )
    (directory / "train.py").write_text(program)
    with launch(directory, [str(directory / "train.py"), "killed", str(fault_at), str(STEPS)], *more) as job:
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
