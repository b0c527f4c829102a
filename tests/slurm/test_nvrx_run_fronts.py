"""The front in a batch script: several in one allocation, after a shrink, killed, and where users keep odd files."""

import os
import re
import signal
from datetime import datetime
from pathlib import Path

import minicluster_init as init
import pytest
from minicluster import until
from nvrx_job import kill
from stage import running_with
from waits import WAIT_S

from nvrx_slurm.core.words import unix_s

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm-b")]


# What the two nvrx-runs of one batch script do; they meet in the FIFO "go".
BY_NAME = """
which = os.environ["WHICH"]
if which == "waits":
    open("begun", "w").write("x")
    open("go").read(1)
elif which == "fails":
    sys.exit(3)
elif which == "tells":
    open("go", "w").write("x")
    signal.pause()
elif which == "holds" and CYCLE == 0:
    signal.pause()
"""


@pytest.mark.matrix
def test_several_in_one_allocation(jobs):
    """One beside files that shadow modules, two side by side, one that is killed with its step, and one more."""
    lead = """mkfifo go begun
mkdir odd; for m in json asyncio logging socket random; do echo 'x = 1' > odd/$m.py; done
(cd odd; nvrx-run --no-python /bin/true); echo "odd: $?"
WHICH=waits nvrx-run --srun-arg=--overlap worker.py & first=$!
exec 3<> begun; read -n 1 <&3
WHICH=fails nvrx-run --srun-arg=--overlap worker.py; echo "second: $?"
echo x > go
wait $first; echo "first: $?"
WHICH=tells nvrx-run worker.py & front=$!
read -n 1 < go
kill -KILL $front; wait $front; echo "killed: $?"
export WHICH=ends"""
    job = jobs.submit(BY_NAME, nodes=1, lead=lead)
    assert job.wait_end().exit_code == 0, job.said()
    for line in ("odd: 0", "second: 1", "first: 0", "killed: 137"):
        assert line in job.said(), job.said()
    runs = sorted(path.name for path in (job.directory / "nvrx_logs" / str(job.job_id)).iterdir())
    assert runs == ["r0", "r0_2", "r0_3", "r0_4"]


@pytest.mark.parametrize("given", ["--kill-on-bad-exit=1", "--no-kill"])
def test_an_srun_without_no_kill_is_said(jobs, given):
    job = jobs.submit("", nodes=2, lead=f"srun --ntasks-per-node=1 {given} nvrx-run worker.py; exit")
    assert job.wait_end().exit_code == 0, job.said()
    said = "--no-kill --kill-on-bad-exit=0 --wait=0" in job.said()
    assert said is ("no-kill" not in given), job.said()


def pipes(pid):
    return {link for fd in Path(f"/proc/{pid}/fd").iterdir() if (link := os.readlink(fd)).startswith("pipe:")}


def test_a_killed_srun_costs_the_job_nothing(jobs):
    job = jobs.submit("import time\nwhile not os.path.exists('go'):\n    time.sleep(0.05)\nsys.exit(7)\n", nodes=2)
    job.wait_marks("up", 2)
    parents = {one.pid: init._stat(one.pid)[1] for one in running_with(str(job.directory)) if one.name == "srun"}
    ((shepherd, srun),) = ((pid, parent) for pid, parent in parents.items() if parent in parents)
    assert until(lambda: bool(pipes(shepherd) & pipes(parents[srun])), WAIT_S)  # the front holds it
    kill(srun, signal.SIGKILL)
    assert until(lambda: "srun was killed by SIGKILL" in job.said(), WAIT_S)
    (job.directory / "go").touch()
    assert job.wait_end().exit_code == 1, job.said()
    assert len(job.marks("up")) == 2 and job.result()["first_cause"]["exit_code"] == 7
    began = unix_s(job.result()["started"])
    heads = re.findall(r"^(\d\d:\d\d:\d\d) \+([\d.]+)s nvrx-run(\[?)", job.said(), re.MULTILINE)
    assert {agent for _, _, agent in heads} == {"", "["}  # the front and the coordinator's agent have one clock
    for clock, plus, _ in heads:
        at = datetime.combine(datetime.fromtimestamp(began), datetime.strptime(clock, "%H:%M:%S").time())
        assert -1.2 < at.timestamp() - began - float(plus) < 0.2, job.said()


@pytest.mark.matrix
def test_after_a_shrink_the_next_one_uses_the_nodes_that_are_left(jobs):
    lead = """WHICH=holds nvrx-run --spares=1 --max-restarts=1 worker.py; echo "first: $?"
scontrol update nodename=n2 state=down reason=test
export WHICH=ends"""
    job = jobs.submit(BY_NAME, "--spares=1", nodes=3, lead=lead)
    job.wait_marks("up", 2)
    assert jobs.cluster.kill_node("n2")
    assert job.wait_end().exit_code == 0, job.said()
    assert "first: 0" in job.said()
    assert "--nodelist=n1,n3" in (job.run_dir / "srun_command").read_text()


def test_a_step_that_slurm_does_not_start_is_given_up(jobs):
    lead = """mkfifo go begun
srun --exact bash -c 'echo x > begun; read < go' & busy=$!
read -n 1 < begun
nvrx-run --rdzv-conf=join_timeout=4 --srun-arg=--exact worker.py; echo "waited: $?"
echo x > go; wait $busy; exit 0"""
    job = jobs.submit("", nodes=1, lead=lead)
    assert job.wait_end().exit_code == 0, job.said()
    assert "waited: 94" in job.said() and "Slurm has not started the step within 4 s" in job.said(), job.said()
