"""Which processes are a job's: by cgroups of several kinds, by user and environment; on trees of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvrx_slurm.health import leftovers
from nvrx_slurm.health.check import NodeView, Verdict
from nvrx_slurm.health.leftovers import Facts, Job
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
