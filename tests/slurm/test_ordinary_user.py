"""A user without privileges, on a cluster of root's daemons. What is forbidden is in the contract of the API."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from minicluster import MiniCluster
from nvrx_job import Jobs, kill

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.xdist_group("slurm-c"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user"),
]

NOBODY = 65534
REPO = Path(__file__).resolve().parents[2]
PACKAGES = f"{REPO}:{sysconfig.get_path('purelib')}"
FIRST_CYCLE_STAYS = """
mark(f"uid={os.getuid()}")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if CYCLE == 0 and "SLURM_RESTART_COUNT" not in os.environ:
    mark("ready")
    signal.pause()
"""


class UsersJobs(Jobs):
    """Jobs that the user submits, with files of that user."""

    python: Path

    def new(self, worker):
        job = super().new(worker)
        launcher = job.directory / "bin" / "nvrx-run"
        launcher.parent.mkdir()
        launcher.write_text(f'#!/bin/sh\nexec {self.python} -m nvrx_slurm.cli.run "$@"\n')
        launcher.chmod(0o755)
        os.chown(job.directory, NOBODY, NOBODY)
        return job

    def environment(self, job):
        path = f"{job.directory}/bin:{self.cluster.env()['PATH']}"
        mine = f"PATH={path},HOME={job.directory},TEST_JOB={job.directory},TMPDIR={job.directory}"
        return (f"--export=ALL,PYTHONPATH={PACKAGES},{mine}",)


@pytest.fixture(scope="module")
def python():
    """A Python of this version that the user may run; the one of this virtual environment may be below /root."""
    usual = Path("/usr/bin", f"python{sys.version_info.major}.{sys.version_info.minor}")
    for one in (Path(sys.executable), usual):
        argv = [str(one), "-c", "import nvrx_slurm.cli.run"]
        env = {"PYTHONPATH": PACKAGES, "PATH": os.environ["PATH"]}
        try:
            subprocess.run(
                argv, env=env, user=NOBODY, group=NOBODY, extra_groups=(), cwd="/", timeout=60, check=True,
                capture_output=True,
            )  # fmt: skip
        except (OSError, subprocess.CalledProcessError):
            continue
        return one
    pytest.skip(f"neither {sys.executable} nor {usual} runs for a user without privileges")


@pytest.fixture
def jobs(python, cluster_root, needs_slurm):
    with MiniCluster(cluster_root, nodes=3, kill_wait_s=5, die_with_owner=True):
        cluster_root.chmod(0o711)
        (cluster_root / "jobs").chmod(0o1777)
        user = MiniCluster.attach(cluster_root)
        user.uid = NOBODY
        made = UsersJobs(user)
        made.python = python
        yield made
        made.check()
    shutil.rmtree(cluster_root / "jobs")


def test_the_job_of_an_ordinary_user_survives(jobs):
    job = jobs.submit(FIRST_CYCLE_STAYS, "--spares=1 --max-restarts=2", 3, ("--requeue", "--time=5"))
    ready = job.wait_marks("ready", 2)

    kill(ready[0].pid, signal.SIGKILL)
    end = job.wait_end()
    assert (end.state, end.exit_code, job.result()["restarts_used"]) == ("COMPLETED", 0, 1), job.said()
    assert len(job.marks(f"uid={NOBODY}")) == 4
    assert {path.stat().st_uid for path in job.run_dir.rglob("*")} == {NOBODY}
