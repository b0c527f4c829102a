"""What the tests of nvrx-run on a real Slurm share: jobs whose workers tell what they do, and what must be left after.

Workers are plain Python scripts. They append lines to one file per job (`mark`), and a test waits for those lines by
inotify; a job's end is Slurm's business and waited for by MiniCluster.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import minicluster_init as init
from minicluster import MiniCluster, until
from stage import await_end, running_with
from waits import WAIT_S

from nvrx_slurm.system.inotify import Inotify

PRELUDE = """
import os, signal, sys
RANK, CYCLE = int(os.environ["RANK"]), int(os.environ["NVRX_CYCLE"])
def mark(what):
    line = f"{what} {RANK} {CYCLE} {os.environ.get('SLURMD_NODENAME')} {os.getpid()}\\n"
    fd = os.open(os.environ["TEST_JOB"] + "/marks", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, line.encode())
    os.close(fd)
mark("up")
"""
CLIENT = """
from nvrx_slurm.fault_tolerance import RankMonitorClient
client = RankMonitorClient()
client.init_workload_monitoring()
"""
EXCLUDES_N2 = CLIENT + """
from nvrx_slurm.fault_tolerance import WorkloadAction, WorkloadControlRequest
if CYCLE == 0:
    if os.environ["SLURMD_NODENAME"] == "n2":
        client.send_workload_control_request(WorkloadControlRequest(WorkloadAction.ExcludeThisNode, "its GPU lies"))
    signal.pause()
"""  # fmt: skip


def wait_in(directory, done, wait_s):
    """Wait for something in a directory, by inotify; whether it came in time."""
    deadline = time.monotonic() + wait_s
    changes = Inotify()
    try:
        changes.watch(str(directory))
        while not (came := done()) and (left := deadline - time.monotonic()) > 0:
            if select.select([changes.fd], [], [], left)[0]:
                changes.wait()
        return came
    finally:
        changes.close()


def start_again(cluster, job_id):
    """Wait until the job is requeued, and have it start now; Slurm alone would hold it for two minutes.

    A start in the second of the requeue may be refused ("Job credential revoked"): it waits again, and Slurm sets its
    time two minutes later.
    """

    def runs():
        job = cluster.job(job_id)
        just_now = job["JobState"] == "RUNNING" and job["RunTime"] < "00:00:02"
        return job["JobState"] not in ("PENDING", "CONFIGURING", "COMPLETING") and not just_now

    cluster.wait_job(job_id, WAIT_S, until="PENDING")
    for _ in range(8):
        if cluster.job(job_id)["JobState"] == "PENDING":
            cluster.run("scontrol", "update", f"JobId={job_id}", "StartTime=now+2")
        if until(runs, 10.0):
            return
    raise AssertionError(f"job {job_id} does not start: {cluster.job(job_id)}")


class Mark(NamedTuple):
    """One line of a worker."""

    what: str
    rank: int
    cycle: int
    node: str
    pid: int


@dataclass
class Job:
    """One submitted job; its files are below `directory`, the log tree in `directory`/nvrx_logs."""

    cluster: MiniCluster
    directory: Path
    job_id: int = 0

    def marks(self, what, cycle=None):
        """Lines `what` so far, in rank order (a torn last line is left out)."""
        try:
            lines = (self.directory / "marks").read_text().rpartition("\n")[0].splitlines()
        except FileNotFoundError:
            return []
        found = [Mark(w[0], int(w[1]), int(w[2]), w[3], int(w[4])) for w in map(str.split, lines)]
        wanted = [m for m in found if m.what == what and cycle in (None, m.cycle)]
        return sorted(wanted, key=lambda m: (m.cycle, m.rank))

    def wait_marks(self, what, count, cycle=None):
        """Wait until `count` ranks have said `what`."""
        self.wait_for(lambda: len(self.marks(what, cycle)) >= count, f"{count} x {what!r} of cycle {cycle}")
        return self.marks(what, cycle)

    def wait_for(self, done, what, wait_s=WAIT_S):
        """Wait for something in the job's directory, by inotify."""
        if not wait_in(self.directory, done, wait_s):
            files = [*self.directory.glob("*.out"), *self.directory.rglob("agents/*.log")]
            logs = "\n".join(f"{path.name}:\n{path.read_text()}" for path in files)
            raise AssertionError(f"never came: {what}; the job said:\n{self.said()}\n{logs}")

    def wait_end(self):
        """Wait for the job's end, repairing nodes that were lost (Slurm calls it "completing" until then)."""
        self.cluster.wait_job(self.job_id, WAIT_S, until="COMPLETING")
        for name, state in self.cluster.status().items():
            if state.startswith("dead"):
                self.cluster.restart_node(name)
        return self.cluster.wait_job(self.job_id, WAIT_S)

    def ends(self, state, code):
        """It ends like that."""
        end = self.wait_end()
        assert (end.state, end.exit_code) == (state, code), self.said()

    def places(self, cycle):
        """(rank, node) of all workers of a cycle."""
        return [(mark.rank, mark.node) for mark in self.marks("up", cycle)]

    @property
    def run_dir(self):
        """The log tree of the newest run."""
        return self.directory / "nvrx_logs" / "latest"

    def said(self):
        return self.cluster.output(self.job_id)

    def agent_log(self, infra_rank):
        """What one agent and its workers printed."""
        return (self.run_dir / "agents" / f"agent_{infra_rank}.log").read_text()

    def result(self):
        return dict(json.loads((self.run_dir / "result.json").read_text()))

    def assert_nothing_left(self):
        """No process, and no node that Slurm would not use again."""
        steps = [one for one in self.cluster.scan() if one.name.startswith("slurmstepd")]  # of any job
        left = await_end([*running_with(f"TEST_JOB={self.directory}"), *steps], 5.0)
        assert left == [], f"still running: {left}"
        states = self.cluster.status()
        assert not [s for s in states.values() if "drain" in s or "down" in s], states


class Jobs:
    """Makes jobs; the fixture `jobs` checks at the end that nothing of them is left."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.made = []

    def new(self, worker):
        """A job that is not submitted yet, with `worker` as its worker.py."""
        directory = Path(tempfile.mkdtemp(prefix="job-", dir=self.cluster.root / "jobs"))
        (directory / "worker.py").write_text(PRELUDE + worker)
        self.made.append(Job(self.cluster, directory))
        return self.made[-1]

    def submit(self, worker, flags="", nodes=4, sbatch=(), lead=""):
        """sbatch `exec nvrx-run FLAGS worker.py`, the shell lines `lead` before it, one task per node."""
        job = self.new(worker)
        script = f"#!/bin/bash\n{lead}\nexec nvrx-run {flags} worker.py\n"
        shape = (f"--nodes={nodes}", "--ntasks-per-node=1", "--no-kill", "--open-mode=append")
        job.job_id = self.cluster.submit(script, *shape, *self.environment(job), f"--chdir={job.directory}", *sbatch)
        return job

    def environment(self, job):
        """For sbatch: our nvrx-run in PATH, and a mark by which all of the job's processes are known.

        TMPDIR: what a lost node leaves in it goes with the cluster's directory.
        """
        return (f"--export=ALL,PATH={self._path()},TEST_JOB={job.directory},TMPDIR={job.directory}",)

    def srun(self, job, *words, code=0):
        """srun directly, without a batch script; returns its output and errors. `code`: what it must exit with."""
        argv = ["srun", f"--chdir={job.directory}", *words]
        env = {k: v for k, v in os.environ.items() if k != "NVRX_TOKEN"} | self.cluster.env()
        env |= {"PATH": self._path(), "TEST_JOB": str(job.directory), "TMPDIR": str(job.directory)}
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=WAIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout
        return done.stdout

    def check(self):
        for job in self.made:
            job.assert_nothing_left()

    def _path(self):
        return f"{Path(sys.executable).parent}:{self.cluster.env()['PATH']}"


def nvrx_submit(jobs, worker, *flags, code=0):
    """`nvrx submit FLAGS worker.py` as a user types it; the (first) job and what was printed."""
    job = jobs.new(worker)
    env = {k: v for k, v in os.environ.items() if k != "NVRX_TOKEN"} | jobs.cluster.env()
    env |= {"TEST_JOB": str(job.directory), "TMPDIR": str(job.directory)}
    done = subprocess.run(
        [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "submit", *flags, "worker.py"],
        env=env, cwd=job.directory, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    job.job_id = int(done.stdout.split()[2].rstrip(":,"))
    return job, done.stdout


def kill(pid, signum):
    """Send a signal to a living process; a fault that hits no process fails the test."""
    target = init.process(pid)
    assert target is not None and init.signal_process(target, signum), f"pid {pid} did not live to get {signum.name}"
