"""What workers leave behind in sessions and groups of their own: gone after a fault, and when the agent ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from agent_harness import ended, stat
from waits import until

pytestmark = pytest.mark.process


HELPERS = """
def helper(place, note, name="daemon"):
    # A process that leaves our group, on request by way of a parent that ends at once, and lives on.
    ready_r, ready_w = os.pipe()
    if os.fork() == 0:
        os.close(ready_r)
        if place == "setpgid":
            os.setpgid(0, 0)
        else:
            os.setsid()
        if place == "daemon":
            if os.fork():
                os._exit(0)
            os.setsid()
            open("/proc/self/comm", "w").write(name)
        if place == "setsid" and os.fork() == 0:
            os.setsid()  # below one that will be killed
            os.write(ready_w, b"%d " % os.getpid())
            forever()
        os.write(ready_w, b"%d " % os.getpid())
        forever()
    pids = b""
    while pids.count(b" ") < (2 if place == "setsid" else 1):
        pids += os.read(ready_r, 100)
    note.extend(map(int, pids.split()))
"""


def gone(pid):
    return not Path(f"/proc/{pid}").exists()


def test_orphans_of_a_crash_are_gone_in_the_next_cycle(rig):
    script = rig.script(HELPERS + """
pids = os.path.join(os.environ["NVRX_TEST_GATES"], "pids")
if CYCLE == 0:
    note = []
    for place in ("setsid", "setpgid", "daemon"):
        helper(place, note)
    helper("daemon", note, "nvrx-standby")  # it may be one of ours
    open(pids, "w").write(json.dumps(note))
    os._exit(3)
*others, standby = json.load(open(pids))
for pid in others:
    while os.path.exists(f"/proc/{pid}"):  # reaped, too
        os.sched_yield()
say("all others gone", os.path.exists(f"/proc/{standby}"))
""")  # fmt: skip
    one = rig.ran(script, "--max-restarts=1")
    one.line("all others gone True")
    pids = json.loads((rig.dir / "pids").read_text())
    assert len(pids) == 5 and all(map(gone, pids))


def test_after_a_success_they_live_until_the_agent_ends(rig):
    script = rig.script(HELPERS + """
if RANK == 0:
    note = []
    for place in ("setsid", "daemon"):
        helper(place, note)
    say("left", note[1], note[2], "by", os.getpid())
    sys.exit()
gate()
""")  # fmt: skip
    one = rig.run(script, "--nproc-per-node=2")
    *left, worker = map(int, one.line(r"left (\d+) (\d+) by (\d+)").groups())
    until(lambda: gone(worker), "the end of rank 0")
    assert not any(map(gone, left))
    rig.ends_well("go", one)
    until(lambda: all(map(gone, left)), "the end of what it has left")


def test_helpers_of_a_stopped_worker_outlive_its_last_words(rig):
    """Rank 1 crashes; rank 0 is told to end and may still use its daemon until it has."""
    script = rig.script(HELPERS + """
if CYCLE == 1:
    sys.exit()
if RANK == 0:
    note = []
    helper("daemon", note)
    def last(*_):
        os.kill(note[0], 0)
        say("helper", note[0], "lives")
        sys.exit()
    signal.signal(signal.SIGTERM, last)
    say("ready")
    forever()
gate()
os._exit(1)
""")  # fmt: skip
    one = rig.run(script, "--nproc-per-node=2", "--max-restarts=1")
    one.line("ready")
    rig.open()
    helper = int(one.line(r"helper (\d+) lives")[1])
    assert one.wait() == 0
    assert gone(helper)


def test_ended_orphans_of_a_living_worker_are_reaped(rig):
    one = rig.run(rig.script(HELPERS + 'note = []\nhelper("daemon", note)\nsay("orphan", note[0])\ngate()\n'))
    orphan = int(one.line(r"orphan (\d+)")[1])
    until(lambda: stat(orphan)[2] == one.pid, "re-parented to the agent")
    os.kill(orphan, signal.SIGKILL)
    until(lambda: gone(orphan), "reaped")
    rig.ends_well("go", one)


def test_children_from_before_the_agent_are_left_alone(rig):
    """A shell that has a background job and becomes nvrx-run."""
    script = rig.script("os._exit(4)")
    line = f"sleep 1000 & echo $! >&2; exec {sys.executable} -m nvrx_slurm.cli.run --log-dir={rig.logs} {script}"
    env = rig.env() | {"NVRX_TEST_MARK": "not looked for"}
    shell = subprocess.Popen(["bash", "-c", line], env=env, stderr=subprocess.PIPE, start_new_session=True)
    pid = int(shell.stderr.readline())
    fd = os.pidfd_open(pid)
    try:
        assert shell.wait(30) == 1
        assert not ended(fd, 0) and stat(pid)[1] in "SR"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.close(fd)
        shell.stderr.close()
