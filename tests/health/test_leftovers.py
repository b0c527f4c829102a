"""Which processes are a job's: by cgroups of several kinds, by user and environment; on trees of files."""

import os
import signal
import subprocess
import sys
import time

import pytest

from nvrx_slurm.health.check import NodeView, Verdict
from nvrx_slurm.health.hooks import leftovers
from nvrx_slurm.system.hardware import Absent

pytestmark = pytest.mark.process


JOB = ("7", "s9XYZ")
V2 = "0::/system.slice/slurmstepd.scope/job_{job}/step_0/user/task_0\n"
V1 = "5:cpuset:/slurm_n1/uid_1000/job_{job}/step_batch\n2:devices:/slurm_n1/uid_1000/job_{job}\n0::/\n"


def process(root, cgroup, pid=50):
    """A node with one process that has a GPU open."""
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "fd" / "4").symlink_to(root / "dev" / "nvidia3")
    return NodeView(str(root))


@pytest.mark.parametrize(
    "cgroup, is_jobs",
    [
        (V2.format(job=7), True),
        (V1.format(job=7), True),
        (V2.format(job="s9XYZ"), True),
        (V2.format(job=77), False),
        ("0::/../slurmstepd.scope/job_7\n", True),  # in a cgroup namespace
        ("0::/docker/not_slurm_at_all/job_7\n", False),
        ("0::/system.slice/slurmd.service\n", False),
        ("0::/user.slice/user-1001.slice/job_7\n", False),  # named so by another user
    ],
)
def test_whose_a_process_is(tmp_path, cgroup, is_jobs):
    assert leftovers._is_to_end(process(tmp_path, cgroup), JOB, 50) == is_jobs


def test_a_node_without_gpus_is_not_searched(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    with pytest.raises(Absent):
        leftovers.end(NodeView(str(tmp_path)), JOB)


NOBODY, BOUND_S = 65534, 60.0
# As UID, a process with a GPU open; if TRACER is not empty, that user traces it and never lets it end.
TARGET = """
import ctypes, os, signal, sys
uid, tracer, device = int(sys.argv[1]), sys.argv[2], sys.argv[3]
libc = ctypes.CDLL(None, use_errno=True)
ours, theirs = os.pipe()
target = os.fork()
if target == 0:
    os.open(device, os.O_RDONLY)
    os.setresuid(uid, uid, uid)
    libc.prctl(4, 1)  # PR_SET_DUMPABLE: setresuid has taken that away
    os.write(theirs, b"x")
    signal.pause()
os.read(ours, 1)
if tracer:
    os.setresuid(int(tracer), int(tracer), int(tracer))
    if libc.ptrace(0x4206, target, None, ctypes.c_void_p(0x40)):  # PTRACE_SEIZE, PTRACE_O_TRACEEXIT
        sys.exit(f"ptrace: {os.strerror(ctypes.get_errno())}")
print(target, flush=True)
signal.pause()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("tracer, fate", [("", "ended"), ("0", "left"), ("", "alive")])
def test_processes_of_the_job_are_ended_and_no_others(tmp_path, monkeypatch, tracer, fate):
    """`left`: a tracer keeps it from its end."""
    (tmp_path / "proc").symlink_to("/proc")
    (tmp_path / "dev").mkdir()
    device = tmp_path / "dev/nvidia0"
    device.touch()
    node = NodeView(str(tmp_path))
    argv = [sys.executable, "-c", TARGET, str(NOBODY), tracer, str(device)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline() or "0")
        if not pid:
            pytest.skip(f"no process can be traced here: {parent.stderr.read()}")
        of = {pid: {"8" if fate == "alive" else "7"}}
        monkeypatch.setattr(leftovers.jobs, "of_cgroup", lambda node, pid: of.get(pid, set()))
        pidfd = os.pidfd_open(pid)
        try:
            node.deadline_s = time.monotonic() + (BOUND_S if fate == "ended" else 1.0)
            verdict, text = leftovers.end(node, JOB)
        finally:
            parent.kill()
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
    said = {"ended": "ended 1 left-over", "left": "do not end: ", "alive": "no GPU process"}[fate]
    assert said in text and (f"({pid})" in text) == (fate != "alive")
    assert verdict is (Verdict.FAIL if fate == "left" else Verdict.PASS)
