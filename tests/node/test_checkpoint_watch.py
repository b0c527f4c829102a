"""--ft-checkpoint-dir in real jobs: where ranks resume, torn and stale checkpoints, a dead file system."""

import os
import time

import pytest
from agent_harness import UNTIL_TOLD, UP
from waits import until

from nvrx_slurm.views import status

pytestmark = pytest.mark.process


OFTEN = """
from nvrx_slurm.node.coordination import checkpoints
from nvrx_slurm.node.publish import publisher
checkpoints.INTERVAL_S = publisher.INTERVAL_S = 0.2
"""
SAVES = """
import zipfile
saves = os.path.join(os.environ["NVRX_TEST_GATES"], "saves")
def save(n, fill, torn=False):
    path = os.path.join(saves, f"step_{n}.pt")
    with zipfile.ZipFile(path + ".new", "w") as file:
        file.writestr("data/0", bytes([fill]) * 60000)
    if torn:
        os.truncate(path + ".new", 30000)
    os.rename(path + ".new", path)
say("from", os.path.basename(os.environ.get("NVRX_RESUME_FROM", "nothing")))
"""


def rig_flags(rig):
    (rig.dir / "saves").mkdir()
    return f"--ft-checkpoint-dir={rig.dir / 'saves'}", "--max-restarts=9", "--ft-crash-loop-backoff=0"


def test_ranks_resume_from_the_newest_complete_checkpoint(rig):
    """Cycle 1 may find 100 and 200, and a torn 300. The job after that begins with the last one."""
    script = rig.script(
        UP + SAVES + "if CYCLE == 0:\n    save(100, 1), save(200, 2), save(300, 3, torn=True)\n    sys.exit(3)\n"
        "save(400, 4)\n"
    )
    flags = rig_flags(rig)
    one = rig.run(script, *flags)
    assert (one.wait(), one.cycles) == (0, [0, 1])
    one.line("from nothing$"), one.line("from step_200.pt$")
    one.line("checkpoint step_300.pt is torn: .*cut off.*; step_200.pt is complete")
    assert [found["checkpoint"] for found in rig.result["restarts"]] == [200]
    again = rig.run(rig.script(UP + SAVES, "again.py"), *flags)
    assert again.wait() == 0
    again.line("from step_400.pt$")
    assert sorted(os.listdir(rig.dir / "saves")) == [f"step_{n}.pt" for n in (100, 200, 300, 400)]  # nothing of ours


def test_cycles_without_a_new_checkpoint_end_the_job(rig):
    one = rig.run(rig.script(UP + SAVES + "if CYCLE == 0:\n    save(100, 1)\nsys.exit(3)\n"), *rig_flags(rig))
    assert one.wait() == 93
    assert rig.result["reason"].startswith("no progress in 3 cycles: the last checkpoint is of iteration 100")


@pytest.mark.parametrize(
    ("name", "flags", "said"),
    [
        ("last.pt", (), "last.pt has no iteration in its name"),
        ("model-v2.7.pt", (), r"--ft-checkpoint-pattern 'model\\-v2\\.\(\\d\+\)\\.pt'"),
        ("model-7.pt", (r"--ft-checkpoint-pattern=m(\d+)\.pt",), "--ft-checkpoint-pattern"),
    ],
)
def test_a_name_without_an_iteration_is_said_once(rig, name, flags, said):
    saves = rig.dir / "saves"
    one = rig.run(
        rig.script(UP + f"path = {str(saves)!r}\nos.makedirs(path, exist_ok=True)\nopen(path + '/{name}', 'w')\n"
                   "sys.exit(3 * (CYCLE < 2))\n"),
        f"--ft-checkpoint-dir={saves}", "--max-restarts=9", "--ft-crash-loop-backoff=0", *flags,
    )  # fmt: skip
    assert one.wait() == 0
    one.line(said)
    assert sum(name in line for line in one.said) == 1 and not any("not known" in line for line in one.said)


def test_a_checkpoint_with_the_same_bytes_is_said_while_the_job_runs(rig):
    rig.before = OFTEN
    one = rig.run(rig.script(SAVES + "save(100, 7), save(200, 7)\n" + UNTIL_TOLD), *rig_flags(rig))
    one.line("the last checkpoint has the same bytes as step_100.pt")
    path = rig.run_dir / "status.json"
    until(lambda: path.exists() and "same bytes" in path.read_text(), "status.json tells of it")
    seen = status.observe(rig.run_dir, time.time())
    assert seen.code == status.NEEDS_A_PERSON and "same bytes" in seen.verdict
    assert "iteration 200 (step_200.pt), complete" in "\n".join(seen.lines)
    rig.ends_well("end0", one)


def test_a_file_system_that_hangs_delays_the_first_start_and_nothing_else(rig):
    flags = rig_flags(rig)
    hangs = f"if str(where).startswith({str(rig.dir / 'saves')!r}): threading.Event().wait()"
    rig.before = (
        f"import os, threading\nreal = os.scandir\ndef scandir(where='.'):\n    {hangs}\n    return real(where)\n"
        "os.scandir = scandir\n"
        "from nvrx_slurm.node.coordination import checkpoints\ncheckpoints._READ_TIMEOUT_S = 0.1\n"
    )
    one = rig.run(rig.script(UP + SAVES + "sys.exit(3 * (CYCLE == 0))\n"), *flags)
    assert (one.wait(), one.cycles) == (0, [0, 1])
    one.line("the checkpoints in .* are not known"), one.line("from nothing$")
