"""What nvrx-run asks Slurm, where tools are missing, fail or hang, and on a real cluster."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import nodelist
from nvrx_slurm.slurm.api.cli import Slurm
from nvrx_slurm.slurm.api.facts import NoAnswer, NotInstalled
from nvrx_slurm.slurm.api.tools import Tools
from nvrx_slurm.slurm.control import BatchHost, Control

pytestmark = pytest.mark.fast


@pytest.fixture
def control():
    """Without the back-off after what earlier tests did."""
    return Control("cli")


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Puts shell scripts in the place of Slurm's tools."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def make(name, text):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)

    return make


def test_time_left_from_the_environment_needs_no_tool(control):
    left_s = control.time_left_s(1, {"SLURM_JOB_END_TIME": f"{time.time() + 100:.0f}"})
    assert left_s is not None and 90 < left_s < 102
    assert control.time_left_s(1, {"SLURM_JOB_END_TIME": "1700000100"}) == 0.0


@pytest.mark.parametrize(("value", "found"), [("17 sec", 17.0), ("90", 90.0), ("", 30.0), ("x", 30.0)])
def test_kill_wait(control, tool, value, found):
    tool("scontrol", f"printf 'SLURM_VERSION = 22.05.8\\nKillWait = {value}\\n'")
    assert control.kill_wait_s() == found


def test_without_slurm(control, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert control.time_left_s(1, {}) is None
    assert control.kill_wait_s() == 30.0
    assert control.job_now(1) is None and control.step_id(1, "x") is None
    assert control.node_address("localhost") == "localhost"
    with pytest.raises(UsageError, match=r"node no-such-node\.invalid: .* NodeAddr"):
        control.node_address("no-such-node.invalid")
    with pytest.raises(NotInstalled):
        control.batch_host(1)


def test_node_addr_where_the_name_does_not_resolve(control, tool):
    tool("scontrol", "echo NodeName=$3 NodeAddr=127.0.0.1 State=IDLE")
    assert control.node_address("no-such-node.invalid") == "127.0.0.1"


ANSWERS = """case "$2 $3" in
job*) echo "JobId=7 JobState=RUNNING ExitCode=0:0 BatchHost=n1 Requeue=1 Partition=p QOS={0}";;
config*) printf 'SLURM_VERSION = 22.05.8\nPreemptType = preempt/{1}\nPreemptMode = {2}\n';;
"partition p") echo PartitionName=p PreemptMode={3};;
*"qos=low") printf 'QOS Records\nQOS=low(2) UsageRaw=0.0 PreemptMode={4} Priority=0\n';;
esac"""


@pytest.mark.parametrize(
    ("answers", "requeues"),
    [
        (("(null)", "partition_prio", "CANCEL", "GANG,REQUEUE", ""), True),
        (("low", "partition_prio", "REQUEUE", "CANCEL", "REQUEUE"), False),
        (("low", "qos", "CANCEL", "CANCEL", "REQUEUE"), True),
        (("low", "qos", "REQUEUE", "REQUEUE", "CANCEL"), False),
        (("low", "qos", "GANG,REQUEUE", "CANCEL", "OFF"), True),
        (("(null)", "qos", "REQUEUE", "CANCEL", ""), True),
        (("low", "qos", "CANCEL", "REQUEUE", "OFF"), False),
    ],
)
def test_what_becomes_of_a_preempted_job(control, tool, answers, requeues):
    """As a slurmctld with accounting answers; a partition has no say where a QOS preempts."""
    tool("scontrol", ANSWERS.format(*answers))
    assert control.requeues(7) is requeues


JOB = "echo JobId=7 JobState=RUNNING ExitCode=0:0 BatchHost=n1"
NODE = "echo NodeName=n1 State={state} NodeAddr={address} Port={port}"
UNKNOWN = "echo Invalid job id specified >&2; exit 1"
AWAY = "echo Unable to contact slurm controller >&2; exit 1"
UP = NODE.format(state="ALLOCATED", address="127.0.0.1", port="{port}")


@pytest.mark.parametrize(
    ("job", "node", "found"),
    [
        (JOB, UP, BatchHost.ALIVE),
        (JOB, UP.replace("{port}", "1"), BatchHost.GONE),
        (JOB, NODE.format(state="DOWN*", address="127.0.0.1", port=1), BatchHost.GONE),
        (JOB, NODE.format(state="IDLE", address="no-such-node.invalid", port=1), BatchHost.SILENT),
        (JOB, AWAY, BatchHost.SILENT),
        (f"{JOB} BatchFlag=0", AWAY, BatchHost.ALIVE),
        (UNKNOWN, AWAY, BatchHost.ALIVE),
    ],
)
def test_batch_host(control, tool, job, node, found):
    with socket.create_server(("127.0.0.1", 0)) as slurmd:
        node = node.replace("{port}", str(slurmd.getsockname()[1]))
        tool("scontrol", f"case $2 in job) {job};; node) {node};; *) exit 9;; esac")
        assert control.batch_host(7) is found


def test_what_slurm_refuses_is_tried_again_and_then_cancelled(control, tool, tmp_path):
    node = NODE.format(state="DOWN", address="127.0.0.1", port=1)
    tool("scontrol", f"case $2 in job) {JOB};; node) {node};; *) echo disabled >&2; exit 1;; esac")
    tool("scancel", f"echo $* >> {tmp_path}/cancelled")
    with pytest.raises(NoAnswer, match="disabled"):
        control.end_without_batch_host(7, 1, with_scancel=False, requeue=True)
    assert "scancel ended the job" in control.end_without_batch_host(7, 1, with_scancel=True)
    assert (tmp_path / "cancelled").read_text() == "7\n"


def test_a_job_that_waits_already_is_requeued_and_not_cancelled(control, tool, tmp_path):
    """The first question did its work, and its answer was lost. Slurm still ends the job's processes."""
    node = NODE.format(state="DOWN", address="127.0.0.1", port=1)
    refuses = f"touch {tmp_path}/asked; echo Job is pending execution >&2; exit 1"
    tool("scontrol", f"case $2 in job) {JOB};; node) {node};; *) {refuses};; esac")
    tool("scancel", f"echo $* >> {tmp_path}/cancelled")
    assert control.end_without_batch_host(7, 1, with_scancel=True, requeue=True).endswith("the job is requeued")
    assert (tmp_path / "asked").exists() and not (tmp_path / "cancelled").exists()


def test_slow_tools_are_not_asked_again_and_again(tool, tmp_path):
    tool("scontrol", f"echo asked >> {tmp_path}/asked; exec sleep 60")
    slurm = Slurm(Tools(timeout_s=2.0))
    for _ in range(5):
        with pytest.raises(NoAnswer):
            slurm.job(1)
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_one_call_at_a_time(tool, tmp_path):
    """Two at once would find the lock directory there."""
    tool("squeue", f"mkdir {tmp_path}/one || exit 9; sleep 0.05; rmdir {tmp_path}/one; echo '7.0|x'")
    slurm = Slurm()
    with ThreadPoolExecutor(4) as pool:
        assert [len(steps) for steps in pool.map(slurm.steps, range(8))] == [1] * 8


@pytest.mark.slurm
def test_against_a_real_cluster(control, minicluster, monkeypatch):
    for name, value in minicluster.env().items():
        monkeypatch.setenv(name, value)
    assert control.kill_wait_s() == 8.0
    assert control.node_address("n3") == "127.0.0.1"
    job = minicluster.submit("#!/bin/sh\nsleep 60\n", "--time=10")
    minicluster.wait_job(job, 20, until="RUNNING")
    left = control.time_left_s(job, {})
    assert left is not None and 500 < left <= 600
    minicluster.run("scontrol", "update", "NodeName=n4", "State=DOWN", "Reason=test")
    assert "DOWN" in control.slurm.nodes(["n4"])["n4"].states
    for text in ("n[01-03,7]-ib[0-1]", "a[8-11],b,c[9-10]", "n[08-12]", "x[1-2]y[03-04]", "n1,n1"):
        assert nodelist.expand(text) == minicluster.run("scontrol", "show", "hostnames", text).split()
