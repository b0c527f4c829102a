"""One node without Slurm: success, crashes, the restart budget, the first cause, hangs, killed monitors."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import minicluster_init as init
import pytest
from agent_harness import CLIENT, REPO
from stage import await_end
from waits import WAIT_S, until

pytestmark = pytest.mark.process


def test_crash_restarts_all_ranks_in_the_same_job(rig):
    script = rig.script("""
        say("up", CYCLE, os.environ["TORCHELASTIC_RESTART_COUNT"])
        print("err", RANK, file=sys.stderr)
        if CYCLE == 0 and RANK == 1:
            gate()
            raise ValueError("bad luck")
        if CYCLE == 0:
            forever()
    """)
    one = rig.run(script, "--nproc-per-node=2", "--max-restarts=1")
    one.line(r"\[rank 0\] up")
    rig.ends_well("go", one)
    assert rig.log(0, 0, "out") == "up 0 0\n" and rig.log(1, 0, "out") == "up 1 1\n"
    assert rig.log(0, 1, "out") == "up 0 0\n" and rig.log(1, 1, "out") == "up 1 1\n"
    assert "exited with code 1: ValueError: bad luck; restart 1 of 1" in one.text
    assert re.search(rf"at: {script}:\d+\n.*log: \S+/cycle_0/node_0_\S+/rank_1\.err\n", one.text, re.S)
    assert "first cause" not in one.text and (rig.result["code"], rig.result["first_cause"]) == (0, None)
    for rank in (0, 1):
        assert rig.log(1, rank, "err") == f"err {rank}\n" and f"[rank {rank}] err {rank}\n" in one.text
    assert (rig.logs / "latest").resolve() == rig.run_dir.resolve()


@pytest.mark.matrix
@pytest.mark.torch
def test_the_real_record_decorator(rig):
    script = rig.script("""
        from torch.distributed.elastic.multiprocessing.errors import record
        @record
        def main():
            raise LookupError("from torch")
        main()
    """)
    one = rig.run(script)
    assert one.wait(60) == 1
    _, _, last = one.text.rpartition("first cause:")
    assert "LookupError" in last.splitlines()[0] and "from torch" in last.splitlines()[0] and "in main" in last


def test_error_file_that_cannot_be_read_does_not_hold_up_the_end(rig):
    """A FIFO nobody writes to stands for a file system that hangs."""
    script = rig.script("os.mkfifo(os.environ['TORCHELASTIC_ERROR_FILE']); say('made'); os._exit(5)")
    one = rig.run(script)
    assert one.wait(10) == 1
    assert rig.log(0, 0, "out") == "made\n"
    assert "exited with code 5" in one.text.rpartition("first cause:")[2]


def test_hang_is_seen_and_the_job_goes_on(rig):
    script = rig.script(f"""{CLIENT}
def spin_for_ever():
    while True:
        pass
client.send_heartbeat()
say("up", CYCLE)
if CYCLE == 0 and RANK == 1:
    spin_for_ever()
while CYCLE == 0:
    client.send_heartbeat()
    time.sleep(0.02)
client.shutdown_workload_monitoring()
""")
    one = rig.ran(script, "--nproc-per-node=2", "--max-restarts=1", "--ft-rank-heartbeat-timeout=0.6")
    one.line(r"rank 1 .*hung: .*no heartbeat for ")
    stacks = rig.log(0, 1, "err")
    assert "in spin_for_ever" in stacks and "Fatal Python error" not in stacks
    assert rig.log(1, 1, "out") == "up 1\n"


def test_killed_monitor_comes_back_and_its_rank_does_not_notice(rig):
    """After that its successor still sees the hang."""
    script = rig.script(CLIENT + """
say("up", os.getpid())
go = [False]
signal.signal(signal.SIGUSR1, lambda *_: go.__setitem__(0, True))
while not go[0]:
    client.send_heartbeat()
    time.sleep(0.02)
say("beats on")
os.kill(os.getpid(), signal.SIGSTOP)
""")  # fmt: skip
    one = rig.run(script, "--ft-rank-heartbeat-timeout=1")
    worker = int(one.line(r"up (\d+)")[1])
    until(one.monitors, "the monitor")
    (monitor,) = one.monitors()
    os.kill(monitor, signal.SIGKILL)
    until(lambda: [m for m in one.monitors() if m != monitor], "a new monitor")
    os.kill(worker, signal.SIGUSR1)
    one.line("beats on")
    assert one.wait() == 1
    cause = one.text.rpartition("first cause:")[2]
    assert f"pid {worker}" in cause and "no heartbeat for 1." in cause


BEATS = """
client.send_heartbeat()
say("beaten in", CYCLE)
if CYCLE == 0 and RANK == 0:
    gate()
    os.kill(os.getpid(), signal.SIGKILL)
if CYCLE == 0:
    forever()
"""


def test_job_restarts_after_its_directory_was_removed(rig):
    """As by a cleaner of /tmp. It is made again."""
    one = rig.run(rig.script(CLIENT + BEATS), "--standalone", "--nproc-per-node=2", "--max-restarts=2")
    one.ranks("beaten in 0$")
    (found,) = (rig.dir / "tmp").glob("nvrx-agent-*")
    shutil.rmtree(found)
    rig.ends_well("go", one)
    assert [rig.log(1, rank, "out") for rank in (0, 1)] == ["beaten in 1\n"] * 2
    assert "goes on without its monitor" not in one.text and "internal error" not in one.text


FAMILY = """
child = subprocess.Popen([sys.executable, "-c", "import signal, time;"
                          "signal.signal(signal.SIGTERM, signal.SIG_IGN), signal.signal(signal.SIGINT, signal.SIG_IGN);"
                          "print('child up', flush=True); time.sleep(1000)"])
say("family", os.getpid(), child.pid)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
"""


def test_sigkill_of_the_agent_takes_everything_down(rig):
    one = rig.run(rig.script(FAMILY + "forever()"), "--nproc-per-node=2")
    pids = [int(pid) for rank in (0, 1) for pid in one.line(rf"\[rank {rank}\] family (\d+) (\d+)").groups()]
    one.ranks("child up")
    until(lambda: len(one.monitors()) == 2, "both monitors")
    processes = [init.process(pid) for pid in (*pids, *one.monitors())]
    assert None not in processes
    one.signal(signal.SIGKILL)
    assert await_end(processes, 60.0) == []
    assert one.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("turns", "told"),
    [("8", "1 0 \n" * 8), ("0", "1 0 the lease of this node is over (process)\n")],
    ids=["stop", "lease"],
)
def test_no_worker_starts_after_a_stop_that_comes_while_it_is_about_to(tmp_path, turns, told):
    """Its exit is told once, whatever the event loop has just done. Nor does one where the lease is over."""
    driver = Path(__file__).with_name("stop_driver.py")
    argv, env = [sys.executable, str(driver), str(tmp_path), turns], {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.stdout, done.stderr) == (told, "")
