"""What the agent needs of its host: a private directory below TMPDIR, which may be removed."""

from __future__ import annotations

import shutil

import pytest
from agent_harness import CLIENT, Rig

WORK = """
client.send_heartbeat()
say("beaten in", CYCLE)
if CYCLE == 0 and RANK == 0:
    gate()
    os.kill(os.getpid(), signal.SIGKILL)
if CYCLE == 0:
    forever()
"""


@pytest.mark.parametrize("removed", ["nvrx-agent-*", ""])
def test_job_restarts_after_its_directory_or_all_of_tmpdir_was_removed(rig: Rig, removed: str) -> None:
    """It is made again. Where TMPDIR itself is gone, the ranks are not monitored, and that is said."""
    code = CLIENT + WORK
    if not removed:
        code = code.replace("client.", "if CYCLE == 0: client.")
    one = rig.run(rig.script(code), "--standalone", "--nproc-per-node=2", "--max-restarts=2")
    for rank in (0, 1):
        one.line(rf"\[rank {rank}\] beaten in 0$")
    (found,) = (rig.dir / "tmp").glob(removed) if removed else [rig.dir / "tmp"]
    shutil.rmtree(found)
    rig.open()
    assert one.wait() == 0
    assert [rig.log(1, rank, "out") for rank in (0, 1)] == ["beaten in 1\n"] * 2
    assert ("goes on without its monitor" in one.text) == (not removed) and "internal error" not in one.text
    assert removed or not (rig.dir / "tmp").exists()
