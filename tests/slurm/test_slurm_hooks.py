"""The hooks under a real Slurm: what it makes of our reasons and exit codes, and with which environment it calls us."""

import json
import os
import subprocess
import sys

import pytest
from hooked_cluster import running
from waits import WAIT_S

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's hooks run as root")]


@pytest.fixture(scope="module")
def hooked(needs_slurm):
    with running() as cluster:
        yield cluster


@pytest.fixture
def cluster(hooked):
    hooked.mend()
    hooked.slurm.reset()
    yield hooked
    hooked.mend()


def in_service(note):
    return (note.states, note.reason) == ({"IDLE"}, "")


def drained_by_a_person(note, reason):
    return (note.states, note.reason) == ({"IDLE", "DRAIN"}, reason)


def test_the_doctor_finds_them_in_order(cluster):
    argv = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "doctor", "--json"]
    env = {**os.environ, **cluster.slurm.env()}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    lines = {line["name"]: line for line in json.loads(done.stdout)}
    assert done.returncode == 0, done.stdout
    assert lines["slurm"]["text"].startswith("Slurm 2")
    for name in ("prolog", "epilog", "healthcheck", "prolog-flags", "requeue", "python", "site-file", "munge"):
        assert lines[name]["status"] == "ok", lines[name]


OK = "#!/bin/sh\necho ran on $SLURMD_NODENAME\n"


def test_a_prolog_that_fails_drains_that_node_and_the_job_runs_elsewhere(cluster):
    cluster.assert_prolog_drains("n1")
    for other in ("n2", "n3"):
        assert in_service(cluster.note(other))


def test_only_our_drain_is_taken_back(cluster):
    """n1 is drained by us, n2 by a person, n3 by a person who wrote over our reason."""
    (cluster.root / "periodic").touch()
    before = len(cluster.log())
    for node in ("n1", "n3"):
        cluster.break_("disk", node)
    for node in ("n1", "n3"):
        cluster.wait_log(f"nvrx-periodic: {node}: drained: nvrx:disk:the disk is broken", before)
    cluster.slurm.run("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=a new fan on Monday")
    cluster.slurm.run("scontrol", "update", "NodeName=n3", "State=DRAIN", "Reason=nvrx:disk: a new one on Monday")
    cluster.slurm.run("scontrol", "update", "NodeName=n3", "Reason=a new disk on Monday")
    assert cluster.note("n1").reason == "nvrx:disk:the disk is broken"
    cluster.mend()
    cluster.wait_log("nvrx-periodic: n1: taken back: disk passes again", before)
    cluster.wait_rounds("n2", "n3")
    assert in_service(cluster.note("n1"))
    assert drained_by_a_person(cluster.note("n2"), "a new fan on Monday")
    assert drained_by_a_person(cluster.note("n3"), "a new disk on Monday")


def test_a_job_may_skip_what_the_site_allows(cluster):
    """The hooks get the job's comment without asking slurmctld."""
    cluster.break_("fan", "n1")
    job = cluster.slurm.submit(OK, "--nodes=1", "--nodelist=n1", "--comment=nvrx:skip=fan,disk")
    assert cluster.wait_log(f"nvrx-prolog: n1 job {job}: nvrx:skip=fan,disk").endswith(" skips fan")
    assert cluster.slurm.wait_job(job, WAIT_S).state == "COMPLETED"
    assert cluster.slurm.output(job) == "ran on n1\n"


def test_the_epilog_looks_after_a_failure_and_not_after_success(cluster):
    for code in (0, 3):
        job = cluster.slurm.submit(f"#!/bin/sh\n: >{cluster.facts}/fan-n1\nexit {code}\n", "--nodes=1")
        cluster.slurm.wait_job(job, WAIT_S)
        if code:
            cluster.wait_log(f"nvrx-epilog: n1 job {job}: drained: nvrx:fan:the fan is broken")
        else:
            cluster.wait_log(f"nvrx-epilog: n1 job {job}: pass: 1 checks")  # no GPU process is left over
        cluster.mend()
        assert ("DRAIN" in cluster.note("n1").states) == bool(code)
