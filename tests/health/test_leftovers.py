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
        (V1.format(job=8), 1000, "SLURM_JOB_ID=7\0", False),
        (NONE, 1000, "A=1\0SLURM_JOB_ID=7\0B=2\0", True),
        (NONE, 1000, "SLURM_JOB_ID=77\0", False),
        (NONE, 1000, "XSLURM_JOB_ID=7\0", False),
        (NONE, 1000, "", False),
        (NONE, 1001, "SLURM_JOB_ID=7\0", False),
        (NONE, 0, "SLURM_JOB_ID=7\0", False),
        ("0::/user.slice/user-1001.slice/job_7\n", 1001, "", False),  # named so by another user
        ("", 1000, "SLURM_JOB_ID=7\0", True),
    ],
)
def test_whose_a_process_is(tmp_path: Path, cgroup: str, uid: int, environ: str, belongs: bool) -> None:
    assert leftovers.belongs(process(tmp_path, cgroup, uid, environ), JOB, 50) == belongs


def test_a_job_of_root_is_known_by_its_cgroup_only(tmp_path: Path) -> None:
    node = process(tmp_path, NONE, 0, "SLURM_JOB_ID=7\0")
    assert not leftovers.belongs(node, Job(("7",), 0), 50)


def test_a_node_without_gpus_is_not_searched(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()
    with pytest.raises(Absent):
        leftovers.end(NodeView(str(tmp_path)), JOB)


def test_nobody_is_ended_who_is_gone(tmp_path: Path) -> None:
    """The number belongs to nobody on this machine by the time it would be used."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia3").touch()
    gone = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(gone, 0)
    assert leftovers.end(process(tmp_path, V2.format(job=7), pid=gone), JOB) == Facts([], [])


def test_one_that_does_not_end_is_a_failure() -> None:
    assert leftovers.judge(Facts(["a (1)"], ["b (2)"]), {}) == (
        Verdict.FAIL, "GPU processes of a job that ended do not end: b (2)",
    )  # fmt: skip


# --- processes that somebody traces -----------------------------------------------------------------------------------

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
NOBODY, BOUND_S = 65534, 60.0
# As UID, a process with a GPU open and two threads; one of them is traced, as TRACER, by who never lets it end.
TRACED = """
import ctypes, os, signal, sys, threading
uid, tracer, which, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
libc = ctypes.CDLL(None, use_errno=True)
ours, theirs = os.pipe()
target = os.fork()
if target == 0:
    os.open(device, os.O_RDONLY)
    os.setresuid(uid, uid, uid)
    libc.prctl(4, 1)  # PR_SET_DUMPABLE: setresuid has taken that away
    def work():
        os.write(theirs, b"%d %d" % (os.getpid(), threading.get_native_id()))
        signal.pause()
    threading.Thread(target=work).start()
    signal.pause()
thread = dict(zip(("leader", "thread"), map(int, os.read(ours, 64).split())))[which]
os.setresuid(tracer, tracer, tracer)
if libc.ptrace(0x4206, thread, None, ctypes.c_void_p(0x40)):  # PTRACE_SEIZE, PTRACE_O_TRACEEXIT
    sys.exit(f"ptrace: {os.strerror(ctypes.get_errno())}")
print(target, flush=True)
signal.pause()
"""


class Traced:
    """It, and what the check finds about its job; `tracer`: as whom."""

    def __init__(self, root: Path, tracer: int, which: str) -> None:
        (root / "proc").symlink_to("/proc")
        (root / "dev").mkdir()
        (root / "dev/nvidia0").touch()
        self.node = NodeView(str(root))
        self.job = Job((str(os.getpid()),), NOBODY)
        argv = [sys.executable, "-c", TRACED, str(NOBODY), str(tracer), which, str(root / "dev/nvidia0")]
        env = {"SLURM_JOB_ID": self.job.ids[0]}
        self.tracer = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.tracer.stdout is not None and self.tracer.stderr is not None
        self.pid = int(self.tracer.stdout.readline() or "0")
        if not self.pid:
            pytest.skip(f"nobody can trace here: {self.tracer.stderr.read()}")

    def end(self, within_s: float) -> Facts:
        self.node.deadline_s = time.monotonic() + within_s
        return leftovers.end(self.node, self.job)

    def close(self) -> None:
        """The tracer's end lets the process end."""
        pidfd = os.pidfd_open(self.pid) if os.path.exists(f"/proc/{self.pid}") else -1
        self.tracer.kill()
        self.tracer.communicate(timeout=BOUND_S)
        if pidfd >= 0:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)


@root_only
@pytest.mark.parametrize("which", ["leader", "thread"])
def test_a_user_cannot_keep_his_process_from_its_end(tmp_path: Path, which: str) -> None:
    traced = Traced(tmp_path, NOBODY, which)
    try:
        facts = traced.end(BOUND_S)
        assert (facts.left, facts.held) == ([], ()) and [who.split()[-1] for who in facts.ended] == [f"({traced.pid})"]
        assert traced.tracer.wait(BOUND_S) == -signal.SIGKILL
        assert leftovers.judge(facts, {})[0] is Verdict.PASS
    finally:
        traced.close()


@root_only
def test_a_process_that_somebody_else_traces_is_unknown(tmp_path: Path) -> None:
    """Root's debugger, as it were."""
    traced = Traced(tmp_path, 0, "leader")
    try:
        facts = traced.end(1.5)
        assert (facts.ended, facts.left) == ([], []) and [who.split()[-1] for who in facts.held] == [f"({traced.pid})"]
        assert traced.tracer.poll() is None
        assert leftovers.judge(facts, {})[0] is Verdict.UNKNOWN
    finally:
        traced.close()
