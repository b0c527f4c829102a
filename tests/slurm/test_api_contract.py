"""The same questions and changes to each backend and version of Slurm: the same answers and errors."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import minicluster
import pytest
import slurm_builds
from minicluster import MiniCluster
from minicluster_init import signal_process
from waits import WAIT_S

from nvrx_slurm.slurm import api
from nvrx_slurm.slurm.api import completion
from nvrx_slurm.slurm.api.cli import Slurm
from nvrx_slurm.slurm.api.facts import NoAnswer, NotKnown, SlurmError

pytestmark = pytest.mark.slurm


NOBODY = 65534
REPO = Path(__file__).resolve().parents[2]
ANOTHER_USER = """
import sys
from nvrx_slurm.slurm import api
from nvrx_slurm.slurm.api import completion
from nvrx_slurm.slurm.api.facts import SlurmError
slurm, job = api.connect()[0], int(sys.argv[1])
print(slurm.name)
for ask in (
    lambda: slurm.update_node("n1", "State=DRAIN", "Reason=mine"), lambda: slurm.update_node("n1", "State=UNDRAIN"),
    lambda: slurm.update_node("n1", "Reason=mine"),
    lambda: slurm.requeue(job), lambda: slurm.update_job(job, "ExcNodeList=n1"), lambda: slurm.cancel(job),
    lambda: slurm.update_job(job, "Comment=mine"),
    lambda: slurm.complete(job, 0),
):
    try:
        print(ask())
    except SlurmError as error:
        print(type(error).__name__)
        print(error, file=sys.stderr)
slurm.close()
"""


@pytest.fixture(scope="module")
def cluster(slurm_version):
    """Three nodes of one version, for all tests here."""
    root = Path("/tmp", f"nvrx-api-{os.getpid()}-{slurm_version or 'debian'}")
    with MiniCluster(root, 3, kill_wait_s=5, die_with_owner=True, slurm=slurm_version) as running:
        yield running
    shutil.rmtree(root)


@pytest.fixture(params=["cli", "pyslurm"])
def slurm(request, slurm_version, monkeypatch):
    """A backend, as `connect` gives it."""
    if request.param == "pyslurm":
        wheel = slurm_builds.pyslurm(slurm_version)
        if wheel is None or f"-cp{sys.version_info.major}{sys.version_info.minor}-" not in wheel.name:
            pytest.skip(f"there is no pyslurm for Slurm {slurm_version or '22.05'} and this Python")
    cluster = request.getfixturevalue("cluster")  # not for tests that are skipped
    if request.param == "pyslurm":
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(wheels := cluster.root / "wheels")  # where other users find it, too
        monkeypatch.syspath_prepend(wheels)
        monkeypatch.setenv("PYTHONPATH", f"{wheels}:{os.environ.get('PYTHONPATH', '')}")
        monkeypatch.setenv("LD_LIBRARY_PATH", f"/opt/slurm-{slurm_version}/lib")
    for name, value in cluster.env().items():
        monkeypatch.setenv(name, value)
    command = completion.bootstrap.command
    later = slurm_builds.loader(slurm_version)
    monkeypatch.setattr(completion.bootstrap, "command", lambda *words: [*later, *command(*words)])
    found, _ = api.connect()
    assert found.name == request.param
    cluster.reset()
    yield found
    found.close()


def until(done, what):
    assert minicluster.until(done, WAIT_S), what


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(
        "#!/bin/sh\n#SBATCH --nodes=2 --time=10 --requeue --output=/dev/null\n"
        f"cd {tmp_path}; srun --job-name='a step' --output=/dev/null sh -c 'trap \"touch got\" USR1; "
        "touch ready.$SLURM_PROCID; while true; do sleep 0.1; done'\n"
    )
    return path


def test_a_job_from_submission_to_its_end(slurm, script, tmp_path):
    job_id = slurm.submit(script, ["--begin=now+1hour", '--job-name=it\'s "a" job', "--exclude=n3"])
    job = slurm.job(job_id)
    assert (job.state, job.reason) == ("PENDING", "BeginTime")
    assert (job.nodes, job.excluded, job.restarts, job.requeue, job.time_left_s) == ((), ("n3",), 0, True, None)

    slurm.update_job(job_id, "ExcNodeList=n1")
    slurm.update_job(job_id, "Comment=nvrx cycle 0, 0 restarts")
    assert "Comment=nvrx cycle 0, 0 restarts" in slurm.tools.run("scontrol", "show", "job", str(job_id))
    slurm.tools.run("scontrol", "update", f"JobId={job_id}", "StartTime=now", "TimeLimit=5", 'Comment=b = "c", d')
    until(lambda: slurm.job(job_id).state == "RUNNING", "it runs")
    job = slurm.job(job_id)
    assert (job.nodes, job.batch_host, job.excluded) == (("n2", "n3"), "n2", ("n1",))
    assert job.time_left_s is not None and 200 < job.time_left_s <= 300
    with pytest.raises(SlurmError):
        slurm.update_job(job_id, "ExcNodeList=n3")  # only while it waits

    until(lambda: len(slurm.steps(job_id)) == 2, "both steps run")
    steps = {step.step_id: step for step in slurm.steps(job_id)}
    assert set(steps) == {f"{job_id}.batch", f"{job_id}.0"}
    assert steps[f"{job_id}.0"].name == "a step"
    until(lambda: len(list(tmp_path.glob("ready.?"))) == 2, "both tasks wait for it")
    slurm.signal(f"{job_id}.0", signal.SIGUSR1)
    until((tmp_path / "got").exists, "the step got the signal")

    slurm.requeue(job_id)
    until(lambda: slurm.job(job_id).state == "PENDING", "it waits again")
    assert slurm.job(job_id).restarts == 1
    slurm.cancel(job_id)
    slurm.cancel(job_id)
    until(lambda: slurm.job(job_id).state == "CANCELLED", "it is cancelled")
    assert slurm.steps(job_id) == []


def test_exit_codes_and_the_end_without_a_batch_host(slurm, script):
    code, killed, lost = (script.with_name(name) for name in ("code", "killed", "lost"))
    for path, line in ((code, "exit 93"), (killed, "kill -9 $$"), (lost, "exec sleep 600")):
        path.write_text(f"#!/bin/sh\n#SBATCH --output=/dev/null\n{line}\n")
    jobs = [slurm.submit(path) for path in (code, killed, lost)]
    until(lambda: slurm.job(jobs[2]).state == "RUNNING", "it runs")
    slurm.complete(jobs[2], 7)
    until(lambda: all(slurm.job(one).state in ("FAILED", "COMPLETED") for one in jobs), "all end")
    assert [slurm.job(one).exit_code for one in jobs] == [93, 137, 7]


def test_nodes_and_the_configuration(slurm, slurm_version):
    config = slurm.config()
    assert config["KillWait"].startswith("5") and not config.get("Epilog")
    assert config["SLURM_VERSION"].startswith(slurm_version or "22.05")
    assert {name: one.states for name, one in slurm.nodes().items()} == dict.fromkeys(("n1", "n2", "n3"), {"IDLE"})
    assert slurm.nodes(["n1"])["n1"].address == "127.0.0.1" and slurm.nodes(["n1"])["n1"].port > 0
    slurm.update_node("n2", "State=DRAIN", 'Reason=a "broken", b=c disk')
    note = slurm.nodes(["n2", "n3"])["n2"]
    assert (note.states, note.reason, note.reason_by) == ({"IDLE", "DRAIN"}, 'a "broken", b=c disk', "root")
    slurm.update_node("n2", "Reason=another")
    assert slurm.nodes(["n2"])["n2"].reason == "another"
    slurm.update_node("n2", "State=UNDRAIN")
    until(lambda: slurm.nodes(["n2"])["n2"].states == {"IDLE"}, "it is in service")


def test_what_is_not_known(slurm):
    for ask in (
        lambda: slurm.job(99999), lambda: slurm.requeue(99999), lambda: slurm.update_job(99999, "ExcNodeList=n1"),
        lambda: slurm.update_job(99999, "Comment=x"),
        lambda: slurm.signal("99999.0", signal.SIGUSR1),
        lambda: slurm.nodes(["n1", "zz"]), lambda: slurm.nodes(["zz"]), lambda: slurm.update_node("zz", "Reason=x"),
        lambda: slurm.complete(99999, 0),
    ):  # fmt: skip
        with pytest.raises(NotKnown):
            ask()
    assert slurm.steps(99999) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act for another user")
def test_what_is_forbidden(slurm, slurm_version, script, cluster):
    cluster.root.chmod(0o711)
    job_id = slurm.submit(script, ["--hold"])
    python = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    env = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{REPO}:{sysconfig.get_path('purelib')}"}
    done = subprocess.run(
        [python, "-c", ANOTHER_USER, str(job_id)], env=env, user=NOBODY, group=NOBODY, extra_groups=(), cwd="/",
        timeout=60, check=False, capture_output=True, text=True,
    )  # fmt: skip
    if "nvrx_slurm" in done.stderr and "ModuleNotFoundError" in done.stderr:
        pytest.skip("the repository is where other users cannot read it")
    told = done.stdout.split()  # of later versions the last one is about the C library of this Python
    assert told[:8] == [slurm.name, *["NotAllowed"] * 7] and (slurm_version or told[8:] == ["NotAllowed"]), done.stderr
    job, nodes = slurm.job(job_id), slurm.nodes()
    assert (job.state, job.reason, job.excluded) == ("PENDING", "JobHeldUser", ())
    assert {one.states for one in nodes.values()} == {frozenset({"IDLE"})}
    slurm.cancel(job_id)


def test_both_backends_answer_the_same(slurm, script):
    if slurm.name == "cli":
        pytest.skip("compared where pyslurm is")
    other = Slurm()
    array = slurm.submit(script, ["--hold", "--job-name=a\nb, c='d'", "--array=1-3%2", "--comment= e=f"])
    running = slurm.submit(script)
    until(lambda: len(slurm.steps(running)) == 2, "it runs")

    def plain(one):
        return [
            [dataclasses.replace(one.job(job), time_left_s=None) for job in (array, running)],
            sorted(one.steps(running), key=str),
            one.nodes(),
            one.config(),
        ]

    assert plain(slurm) == plain(other)
    for job in (array, running):
        slurm.cancel(job)


def test_slurmctld_that_hangs_or_is_gone(slurm, cluster):
    """It costs bounded time, is asked seldom, and answers again when it is back."""
    slurm.tools.timeout_s = 0.5
    stopped = [one for one in cluster.scan() if one.name == "slurmctld" and signal_process(one, signal.SIGSTOP)]
    assert stopped
    try:
        for ask in (lambda: slurm.job(1), lambda: slurm.nodes(), lambda: slurm.config()):
            with pytest.raises(NoAnswer):
                ask()
    finally:
        for one in stopped:
            signal_process(one, signal.SIGCONT)
    until(lambda: _answers(slurm), "it answers again")


def _answers(slurm):
    try:
        return bool(slurm.nodes())
    except NoAnswer:
        return False
