"""The keeper of checkpoints ends with its job on a real Slurm, whatever ends that, and whoever tracks its processes."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from minicluster import MiniCluster
from nvrx_job import Job, Jobs, start_again
from waits import until

from nvrx_slurm.checkpoint.link import LINGER_S

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
FREEZER = Path("/sys/fs/cgroup/freezer")

# Two ranks per node keep something; in the first life of the job they wait then. No torch.
KEEPS = """
import mmap
from nvrx_slurm.checkpoint import link, messages as m

launcher = link.launcher_pid(os.environ)
name = link.address(os.environ, launcher)
link.start(name, os.environ, launcher)
one = link.Link(name, m.Join(RANK, 4, 2, launcher, CYCLE))
held = one.ask(m.AskHeld(), m.HeldSaves)[0].saves
_, fd = one.ask(m.AskSpace(1, 1 << 20), m.Space)
with mmap.mmap(fd, 0) as memory:
    memory[:10] = bytes(10)
os.close(fd)
one.ask(m.SaveDone(), m.Accepted)
first = os.environ.get("SLURM_RESTART_COUNT", "0") == "0"
mark(f"kept{len(held)}" if first else f"again{len(held)}")
with open("keepers", "a") as file:
    file.write(name + "\\n")
if first:
    signal.pause()
"""
FLAGS = "--nnodes=2 --nproc-per-node=2 --max-restarts=0"


@pytest.fixture(scope="module")
def cgroup_cluster(needs_slurm: None) -> Iterator[MiniCluster]:
    """Two nodes whose jobs are tracked by cgroups."""
    probe = FREEZER / f"nvrx-test-{os.getpid()}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        pytest.skip("needs root and the freezer of cgroup version 1")
    root = Path(tempfile.mkdtemp(prefix="nvrx-mg-"))
    with MiniCluster(root, 4, 2, 8, True, variants=("cgroup",)) as cluster:
        yield cluster
    assert cluster.scan() == []
    shutil.rmtree(root)
    for path in sorted(FREEZER.glob("slurm_n*/**/"), reverse=True):  # slurmd leaves them
        path.rmdir()


@pytest.fixture(params=["linuxproc", "cgroup"])
def tracked(request, needs_slurm: None) -> Iterator[Jobs]:
    cluster: MiniCluster = request.getfixturevalue("minicluster" if request.param == "linuxproc" else "cgroup_cluster")
    made = Jobs(cluster)
    yield made
    made.check()


def is_gone(name: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        try:
            one.connect(f"\0{name}")
        except ConnectionRefusedError:
            return True
    return False


def nothing_is_kept(job: Job) -> None:
    """No keeper of the job, and no memory."""
    names = set((job.directory / "keepers").read_text().split())
    assert names
    until(lambda: all(map(is_gone, names)), "the end of each keeper", 20.0)


def test_after_scancel(tracked: Jobs) -> None:
    job = tracked.submit(KEEPS, FLAGS)
    job.wait_marks("kept0", 4)
    tracked.cluster.run("scancel", str(job.job_id))
    assert job.wait_end().state == "CANCELLED"
    nothing_is_kept(job)


def test_after_a_requeue_nothing_is_left_of_the_life_before(tracked: Jobs) -> None:
    job = tracked.submit(KEEPS, FLAGS, sbatch=("--requeue",))
    job.wait_marks("kept0", 4)
    tracked.cluster.run("scontrol", "requeue", str(job.job_id))
    start_again(tracked.cluster, job.job_id)
    job.wait_marks("again0", 4)
    job.ends("COMPLETED", 0)
    assert len(set((job.directory / "keepers").read_text().split())) == 4
    nothing_is_kept(job)


AGENTS_DIE = """
    while len(open("keepers").read().split()) < 4:
        select.select([], [], [], 0.05)
    os.kill(launcher, signal.SIGKILL)
    signal.pause()
"""


def test_after_its_agents_were_killed(tracked: Jobs) -> None:
    """Slurm kills what a task leaves, or the keeper has waited long enough for another launcher."""
    job = tracked.submit("import select\n" + KEEPS.replace("    signal.pause()\n", AGENTS_DIE), FLAGS)
    job.wait_marks("kept0", 4)
    job.wait_end()
    names = set((job.directory / "keepers").read_text().split())
    until(lambda: all(map(is_gone, names)), "the end of each keeper", 2 * LINGER_S)
