"""`nvrx submit` on a real Slurm: the job, its chain, what ends it, and what the next link is told."""

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from minicluster import MiniCluster, until
from minicluster_init import signal_process
from nvrx_job import CLIENT, EXCLUDES_N2, Jobs, nvrx_submit, start_again
from waits import WAIT_S

from nvrx_slurm.cli.toolbox import main

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm-c")]


TRAINS = "print('trained in', os.environ['SLURM_JOB_ID'], flush=True)\n"
FAILS = "sys.exit(7)\n"
# Trains until it is warned; in a second life it is done at once.
STOPS_EARLY = CLIENT + """
import threading
if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    while not client.should_stop():
        threading.Event().wait(0.05)
mark("saved")
client.shutdown_workload_monitoring()
"""  # fmt: skip


PLAIN = "if os.environ.get('SLURM_RESTART_COUNT', '0') == '0':\n    signal.pause()\n"


def output(job, job_id=0):
    path = job.directory / f"nvrx_logs/nvrx_{job_id or job.job_id}.out"
    return path.read_text() if path.exists() else ""


def chain(job):
    """Ids of all jobs of the chain."""
    (links,) = job.directory.glob("nvrx_logs/chain_*")
    return [int(line) for line in links.read_text().split()]


def ends(jobs, job_ids):
    found = [jobs.cluster.wait_job(job_id, WAIT_S) for job_id in job_ids]
    return [(end.state, end.exit_code) for end in found]


def codes(job, *runs):
    return [json.loads((job.directory / "nvrx_logs" / run / "result.json").read_text())["code"] for run in runs]


def goes_on(jobs, job, code):
    """The job, whose first life ends with `code`, is requeued and completes."""
    start_again(jobs.cluster, job.job_id)
    assert ends(jobs, [job.job_id]) == [("COMPLETED", 0)], output(job) or job.said()
    assert codes(job, f"{job.job_id}/r0", f"{job.job_id}/r1") == [code, 0]


def test_a_job_is_submitted_followed_and_ends_with_its_own_code(jobs):
    said = '--comment=it\'s "a, b" #1'
    job, printed = nvrx_submit(
        jobs, TRAINS + FAILS, "--nodes", "2", "--spares", "1", "--wait", "-J", "train", "--time", "5",
        f"--sbatch-arg={said}", "--output", "out_%j", code=1,
    )  # fmt: skip
    assert f"trained in {job.job_id}" in (job.directory / f"out_{job.job_id}").read_text()
    assert f"trained in {job.job_id}" in printed
    facts = jobs.cluster.job(job.job_id)
    assert (facts["JobName"], facts["NumNodes"], facts["TimeLimit"]) == ("train", "2", "00:05:00")
    comment = jobs.cluster.run("squeue", "-h", "-t", "all", "-j", str(job.job_id), "-o", "%k")
    assert comment.strip() == said.partition("=")[2]
    rendered = (job.directory / f"nvrx_logs/{job.job_id}/submit.sbatch").read_text()
    assert rendered.startswith("#!/bin/bash\n#SBATCH --job-name=train\n") and rendered.endswith("    worker.py\n")


def test_submit_wait_and_the_output_follow_the_coordinator_when_the_batch_host_dies(jobs):
    holds = "if CYCLE == 0:\n    signal.pause()\nprint('trained on', flush=True)\nsys.exit(7)\n"
    flags = ("--nodes", "3", "--spares", "1", "--max-restarts", "1", "--wait")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(nvrx_submit, jobs, holds, *flags, code=1)
        assert until(lambda: bool(jobs.made) and len(jobs.made[-1].marks("up")) == 2, WAIT_S)
        assert jobs.cluster.kill_node("n1")
        assert until(lambda: (jobs.made[-1].run_dir / "result.json").exists(), WAIT_S)
        ended_s = time.monotonic()
        job, printed = waiting.result(WAIT_S)
        assert time.monotonic() - ended_s < 5.0
    assert "job ends with code 1" in printed and "job ends with code 1" in output(job)
    jobs.cluster.restart_node("n1")


@pytest.mark.matrix
def test_without_its_batch_host_the_job_is_requeued_by_an_agent(jobs):
    job, _ = nvrx_submit(jobs, STOPS_EARLY, "--nodes", "3", "--spares", "1", "--until-done", "--max-restarts", "1")
    job.wait_marks("up", 2)
    assert jobs.cluster.kill_node("n1")
    job.wait_marks("up", 2, cycle=1)
    jobs.cluster.run("scancel", "--signal=USR1", str(job.job_id))
    job.wait_marks("saved", 2)
    jobs.cluster.wait_job(job.job_id, WAIT_S, until="COMPLETING")
    jobs.cluster.restart_node("n1")
    goes_on(jobs, job, 138)


def test_the_time_limit_leads_into_the_next_link(jobs):
    """Of a job that is stopped; the tests below show those that are warned.

    Slurm's own warning may come a minute early (sbatch(1), --signal), before the step of such a short job.
    """
    limit = ("--until-done", "--time", "1", "--warn-time", "0", "--ft-stop-before-end", "45")
    job, _ = nvrx_submit(jobs, PLAIN, *limit)
    assert until(lambda: "is requeued" in output(job), WAIT_S), output(job)
    goes_on(jobs, job, 143)


def test_an_end_without_a_coordinator_is_the_job_s_own(jobs):
    """As in an image without nvrx-run; the directory of --output is new."""
    prefix = ("--step-prefix=env", "--step-prefix=PATH=/nowhere")
    job, _ = nvrx_submit(jobs, "", *prefix, "--output", "new/out")
    assert ends(jobs, [job.job_id]) == [("FAILED", 127)], output(job)
    told = CliRunner().invoke(main, ["why", str(job.directory / "nvrx_logs")]).output
    assert f"job {job.job_id} " in told and "code 127" in told and "nvrx-run" in told


def test_a_cancelled_job_is_not_requeued(jobs):
    job, _ = nvrx_submit(jobs, STOPS_EARLY, "--until-done")
    job.wait_marks("up", 1)
    jobs.cluster.run("scancel", str(job.job_id))
    assert ends(jobs, [job.job_id])[0][0] == "CANCELLED", output(job)
    assert "cancelled" in job.result()["ended_by"]
    assert jobs.cluster.job(job.job_id)["Restarts"] == "0"


def test_a_chain_goes_on_after_a_failure_and_ends_with_the_work(jobs):
    fails_once = f"if not os.path.exists('failed'):\n    open('failed', 'w')\n    {FAILS}"
    job, _ = nvrx_submit(jobs, fails_once + TRAINS, "--chain", "3")
    first, second, third = ends(jobs, chain(job))
    assert (first, second, third[0]) == (("FAILED", 1), ("COMPLETED", 0), "CANCELLED"), output(job)


def test_a_storm_of_failures_ends_the_chain(jobs):
    """Also of steps that never start."""
    job, _ = nvrx_submit(jobs, "", "--chain", "3", "--chain-failures", "2", "--srun-arg=--no-such-option")
    found = [state for state, _ in ends(jobs, chain(job))]
    assert found == ["FAILED", "FAILED", "CANCELLED"], output(job)


def test_slurmctld_that_is_away_at_the_end_costs_the_job_nothing(cluster_root):
    worker = "mark('ready')\nimport time\nwhile not os.path.exists('go'):\n    time.sleep(0.05)\n"
    with MiniCluster(cluster_root, 1, kill_wait_s=5, extra=("MessageTimeout=2",)) as cluster:
        jobs = Jobs(cluster)
        job, _ = nvrx_submit(jobs, worker + FAILS, "--until-done")
        job.wait_marks("ready", 1)
        stopped = [one for one in cluster.scan() if one.name == "slurmctld" and signal_process(one, signal.SIGSTOP)]
        assert stopped
        (job.directory / "go").touch()
        assert until(lambda: "ends with code 1" in output(job), WAIT_S)
        assert not until(lambda: "requeued" in output(job), 4.0)  # longer than one question takes
        for one in stopped:
            signal_process(one, signal.SIGCONT)
        assert until(lambda: cluster.job(job.job_id)["Restarts"] == "1", WAIT_S), output(job)


def test_an_excluded_node_is_excluded_from_the_next_link(jobs):
    worker = EXCLUDES_N2.replace("    signal.pause()\n", "    signal.pause()\nsys.exit(7)\n")
    job, _ = nvrx_submit(jobs, worker, "--nodes", "3", "--spares", "1", "--chain", "2", "--max-restarts", "1")
    first, second = chain(job)
    jobs.cluster.run("scontrol", "hold", str(second))
    assert ends(jobs, [first]) == [("FAILED", 1)], output(job)
    assert jobs.cluster.job(second)["ExcNodeList"] == "n2", output(job)
    jobs.cluster.run("scancel", str(second))


@pytest.mark.matrix
def test_a_script_of_the_documents_requeues_itself_when_it_is_warned(jobs):
    """Of docs/how-to/requeue-and-chain.md, for two nodes."""
    page = (Path(__file__).parents[2] / "docs/how-to/requeue-and-chain.md").read_text()
    scripts = re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (text,) = (script for script in scripts if "scontrol requeue" in script)
    assert "--nodes=5 " in text and "\ntrap" in text and "train.py" in text
    text = text.replace("--nodes=5 ", "--nodes=2 ").replace("train.py", "worker.py")
    job = jobs.new(STOPS_EARLY)
    job.job_id = jobs.cluster.submit(text, *jobs.environment(job), f"--chdir={job.directory}")
    job.wait_marks("up", 1)
    jobs.cluster.run("scancel", "--signal=USR1", str(job.job_id))
    goes_on(jobs, job, 138)
