"""What the agent needs of its host: a private directory below TMPDIR, which may be removed."""

from __future__ import annotations

import re
import shutil

import pytest
from agent_harness import Rig

WORK = """
from nvrx_slurm.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
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
    code = WORK if removed else WORK.replace("client.", "if CYCLE == 0: client.")
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


def test_nothing_of_ours_is_predictable_or_open_to_others_in_a_shared_tmp(rig: Rig) -> None:
    """Two jobs in a directory like /tmp: what is there is its owner's alone, under names that nobody can guess."""
    shared = rig.dir / "tmp"
    shared.chmod(0o1777)
    script = rig.script("""
        from nvrx_slurm.fault_tolerance import RankMonitorClient
        RankMonitorClient().init_workload_monitoring()
        here = os.environ["TMPDIR"]
        for name in os.listdir(here):
            say("found", name, oct(os.lstat(os.path.join(here, name)).st_mode))
        say("socket", os.environ["FT_RANK_MONITOR_IPC_SOCKET"])
    """)
    names = []
    for _ in range(2):
        one = rig.run(script, "--standalone")
        assert one.wait() == 0
        found = re.findall(r"found (\S+) (\S+)", one.text)
        assert [mode for _, mode in found] == ["0o40700"], one.text
        names.append(found[0][0])
        assert f"socket {shared / names[-1]}/" in one.text
    assert names[0] != names[1]
    assert all(len(name.removeprefix("nvrx-agent-")) >= 8 for name in names)
    assert not list(shared.iterdir())
