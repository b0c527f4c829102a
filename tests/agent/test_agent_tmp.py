"""What the agent needs of its host: a private directory below TMPDIR, which may be removed."""

from __future__ import annotations

import re
import shutil

from agent_harness import Rig, until


def clear_tmp(rig: Rig) -> None:
    """Remove the directory of the agent's sockets."""
    found = list((rig.dir / "tmp").glob("nvrx-agent-*"))
    assert len(found) == 1
    shutil.rmtree(found[0])


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


def test_job_restarts_and_is_monitored_after_its_directory_was_removed(rig: Rig) -> None:
    one = rig.run(rig.script(WORK), "--standalone", "--nproc-per-node=2", "--max-restarts=2")
    for rank in (0, 1):
        one.line(rf"\[rank {rank}\] beaten in 0$")
    clear_tmp(rig)
    rig.open()
    assert one.wait() == 0
    for rank in (0, 1):
        assert rig.log(1, rank, "out") == "beaten in 1\n"
    assert "without its monitor" not in one.text and "internal error" not in one.text


def test_job_restarts_unmonitored_where_nothing_can_be_made(rig: Rig) -> None:
    """TMPDIR itself is gone: one sentence per rank and cycle, and the job goes on."""
    code = WORK.replace("client.", "if CYCLE == 0: client.")
    one = rig.run(rig.script(code), "--standalone", "--nproc-per-node=2", "--max-restarts=2")
    for rank in (0, 1):
        one.line(rf"\[rank {rank}\] beaten in 0$")
    shutil.rmtree(rig.dir / "tmp")
    rig.open()
    assert one.wait() == 0
    assert rig.log(1, 1, "out") == "beaten in 1\n"
    assert "goes on without its monitor" in one.text and "internal error" not in one.text
    until(lambda: not (rig.dir / "tmp").exists(), "nothing was made there")


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
