"""The minicluster is a real cluster whose nodes can be lost for certain, and nothing of it is left behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import minicluster_init as init
import pytest
from minicluster import MiniCluster

from nvrx_slurm.errors import UsageError

REPO = Path(__file__).resolve().parents[2]
# Each task has a child in its own session: what a kill by process group or session would miss.
SLEEPERS = '#!/bin/sh\nsrun --no-kill -i none -o none sh -c "setsid sleep 1000 & exec sleep 1001"\n'
SLEEPERS_THAT_TELL = """#!/bin/sh
rm -f up; mkfifo up; exec 3<>up
srun --no-kill -i none -o none sh -c 'setsid sleep 1000 & echo here >up; exec sleep 1001' &
for i in 1 2 3 4; do read line <&3; done
echo all are up
wait
"""
FOUR = ("--nodes=4", "--ntasks-per-node=1", "--no-kill")


def gone(one: init.Process) -> bool:
    now = init.process(one.pid)
    return now is None or now.start != one.start


# --- without Slurm --------------------------------------------------------------------------------------------------


def start_init(command: str, lifeline: int = -1) -> subprocess.Popen[str]:
    argv = [sys.executable, "-I", "-S", init.__file__, str(lifeline), "sh", "-c", command]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, pass_fds=[lifeline] if lifeline >= 0 else [])


DETACH = "setsid sh -c 'setsid sleep 1000 & echo $!' & wait; echo ready; exit 3"


def test_init_keeps_detached_processes_and_dies_with_them() -> None:
    machine = start_init(DETACH)
    assert machine.stdout is not None
    sleeper = int(machine.stdout.readline())
    assert machine.stdout.readline() == "ready\n"
    assert sleeper in [one.pid for one in init.descendants(machine.pid)]
    killed = init.kill_tree(machine.pid)
    assert sleeper in [one.pid for one in killed]
    assert machine.wait(timeout=10) == 3  # the command's own code; it had ended long before
    assert all(gone(one) for one in killed)


@pytest.mark.parametrize("how", ["SIGTERM", "lifeline"])
def test_init_takes_its_tree_down(how: str) -> None:
    read_end, write_end = os.pipe()
    machine = start_init(DETACH, read_end)
    os.close(read_end)
    assert machine.stdout is not None
    sleeper = init.process(int(machine.stdout.readline()))
    assert sleeper is not None
    if how == "SIGTERM":
        machine.send_signal(signal.SIGTERM)
        machine.wait(timeout=10)
    os.close(write_end)
    machine.wait(timeout=10)
    assert gone(sleeper)


# --- with Slurm -----------------------------------------------------------------------------------------------------


@pytest.mark.slurm
def test_a_lost_node_takes_all_its_processes_and_no_others_and_comes_back(minicluster: MiniCluster) -> None:
    job = minicluster.submit(SLEEPERS_THAT_TELL, *FOUR)
    minicluster.wait_output(job, "all are up", 30)
    before = {one.pid for one in minicluster.scan()}
    killed = minicluster.kill_node("n3")
    names = [one.name for one in killed]
    assert names.count("slurmd") == 1 and names.count("slurmstepd") == 1 and names.count("sleep") == 2, names
    assert all(gone(one) for one in killed)
    survivors = {one.pid for one in minicluster.scan()}
    assert survivors < before and len(before - survivors) == len(killed) + 1  # its init is the one more
    assert minicluster.status()["n3"].startswith("dead, Slurm says ")  # Slurm notices nothing
    assert minicluster.job(job)["JobState"] == "RUNNING"
    with pytest.raises(UsageError, match="no living node 'n3'"):
        minicluster.kill_node("n3")
    minicluster.run("scancel", str(job))
    minicluster.restart_node("n3")
    assert minicluster.wait_job(job, 30).state == "CANCELLED" and minicluster.status()["n3"] == "idle"


@pytest.mark.slurm
def test_the_script_lives_over_several_processes(cluster_root: Path, needs_slurm: None) -> None:

    def script(*words: str, code: int = 0) -> str:
        argv = [str(REPO / "scripts" / "minicluster"), *words, "--dir", str(cluster_root)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "no cluster in" in script("status", code=2)
    try:
        assert f"export SLURM_CONF={cluster_root}/slurm.conf" in script("up", "--nodes", "2")
        exports = f'eval "$({REPO}/scripts/minicluster env --dir {cluster_root})"'
        shell = f"{exports}; srun -w n2 sh -c 'echo $SLURMD_NODENAME'"
        assert subprocess.run(["sh", "-c", shell], capture_output=True, text=True, timeout=60).stdout == "n2\n"
        assert "slurmd[" in script("kill-node", "n2")
        assert "no living node" in script("kill-node", "n2", code=2)
        script("restart-node", "n2")
        assert script("status").split() == ["munged", "up", "slurmctld", "up", "n1", "idle", "n2", "idle"]
        (cluster_root / "state.json").write_text("damaged")
    finally:
        said = script("down")  # finds all by scanning, the state file being of no use
    assert "slurmctld[" in said
    assert MiniCluster(cluster_root).scan() == []


@pytest.mark.slurm
def test_a_killed_owner_takes_its_cluster_along(cluster_root: Path, needs_slurm: None) -> None:
    code = (
        "import sys, os, signal; from pathlib import Path; from minicluster import MiniCluster\n"
        "MiniCluster(Path(sys.argv[1]), nodes=1, die_with_owner=True).up(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(cluster_root)], cwd=REPO / "scripts" / "lib", timeout=60, check=False
    )
    attached = MiniCluster.attach(cluster_root)
    for one in attached.scan():
        try:
            fd = os.pidfd_open(one.pid)
        except ProcessLookupError:
            continue
        assert select.select([fd], [], [], 10)[0], f"{one} lives on"
        os.close(fd)
    assert attached.scan() == []
