"""Which processes are a job's: by cgroups of several kinds, by user and environment; on trees of files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nvrx_slurm.health.check import NodeView, Verdict
from nvrx_slurm.health.hooks import leftovers
from nvrx_slurm.health.hooks.leftovers import Facts, Job
from nvrx_slurm.system.hardware import Absent

JOB = Job(("7", "s9XYZ"), 1000)
V2 = "0::/system.slice/slurmstepd.scope/job_{job}/step_0/user/task_0\n"
V1 = "5:cpuset:/slurm_n1/uid_1000/job_{job}/step_batch\n2:devices:/slurm_n1/uid_1000/job_{job}\n0::/\n"
NONE = "0::/system.slice/slurmd.service\n"


def process(root: Path, cgroup: str, uid: int = 1000, environ: str = "", pid: int = 50) -> NodeView:
    """A node with one process that has a GPU open."""
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "status").write_text(f"Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
    (folder / "environ").write_text(environ)
    (folder / "fd" / "4").symlink_to(root / "dev" / "nvidia3")
    return NodeView(str(root))


@pytest.mark.parametrize(
    ("cgroup", "uid", "environ", "belongs"),
    [
        (V2.format(job=7), 1000, "", True),
        (V1.format(job=7), 1000, "", True),
        (V2.format(job=7), 0, "", True),  # in a container of the job, as its root
        (V2.format(job="s9XYZ"), 1000, "", True),
        (V2.format(job=77), 1000, "SLURM_JOB_ID=7\0", False),
        (NONE, 1000, "A=1\0SLURM_JOB_ID=7\0B=2\0", True),
        (NONE, 1000, "SLURM_JOB_ID=77\0", False),
        (NONE, 1001, "SLURM_JOB_ID=7\0", False),
        (NONE, 0, "SLURM_JOB_ID=7\0", False),
        ("0::/user.slice/user-1001.slice/job_7\n", 1001, "", False),  # named so by another user
    ],
)
def test_whose_a_process_is(tmp_path: Path, cgroup: str, uid: int, environ: str, belongs: bool) -> None:
    assert leftovers.belongs(process(tmp_path, cgroup, uid, environ), JOB, 50) == belongs


def test_a_node_without_gpus_is_not_searched(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    with pytest.raises(Absent):
        leftovers.end(NodeView(str(tmp_path)), JOB)


def test_a_process_that_has_ended_is_not_signalled(tmp_path: Path) -> None:
    """No process on this machine has its pid by the time it would be used."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia3").touch()
    gone = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(gone, 0)
    assert leftovers.end(process(tmp_path, V2.format(job=7), pid=gone), JOB) == Facts([], [])


@pytest.mark.parametrize(
    ("facts", "verdict", "named"),
    [
        (Facts([], []), Verdict.PASS, "no GPU process"),
        (Facts(["a (1)"], []), Verdict.PASS, "a (1)"),
        (Facts(["a (1)"], ["b (2)"]), Verdict.FAIL, "b (2)"),
    ],
)
def test_only_a_process_that_the_driver_holds_is_a_failure(facts: Facts, verdict: Verdict, named: str) -> None:
    found, text = leftovers.judge(facts, {})
    assert found is verdict and named in text


# --- real processes ---------------------------------------------------------------------------------------------------

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
@pytest.mark.parametrize(
    ("uid", "tracer", "fate"), [(NOBODY, "", "ended"), (NOBODY, "0", "left"), (65533, "", "alive")]
)
def test_processes_of_the_job_are_ended_and_no_others(tmp_path: Path, uid: int, tracer: str, fate: str) -> None:
    (tmp_path / "proc").symlink_to("/proc")
    (tmp_path / "dev").mkdir()
    device = tmp_path / "dev/nvidia0"
    device.touch()
    job, node = Job((str(os.getpid()),), NOBODY), NodeView(str(tmp_path))
    argv = [sys.executable, "-c", TARGET, str(uid), tracer, str(device)]
    env = {"SLURM_JOB_ID": job.ids[0]}
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        pid = int(parent.stdout.readline() or "0")
        if not pid:
            pytest.skip(f"no process can be traced here: {parent.stderr.read()}")
        pidfd = os.pidfd_open(pid)
        try:
            node.deadline_s = time.monotonic() + (BOUND_S if fate == "ended" else 1.0)
            facts = leftovers.end(node, job)
        finally:
            parent.kill()
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
    found = {"ended": facts.ended, "left": facts.left}
    assert {name: [who.split()[-1] for who in whom] for name, whom in found.items() if whom} == (
        {} if fate == "alive" else {fate: [f"({pid})"]}
    )
