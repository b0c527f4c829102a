"""Answers of Slurm's tools, as several versions print them, cut off, and with texts that users choose."""

import math

import pytest

from nvrx_slurm.slurm.api import text
from nvrx_slurm.slurm.api.facts import NoAnswer, NotAllowed, NotKnown, SlurmError

pytestmark = pytest.mark.fast


NODES = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUTot=16 CPULoad=0.13 AvailableFeatures=(null) "
    "NodeAddr=127.0.0.1 NodeHostName=localhost Port=12369 Version=22.05.8 OS=Linux 6.1 #1 SMP Debian = 1 "
    "RealMemory=1 State=IDLE ThreadsPerCore=1 Reason=test [root@2026-11-21T08:29:45]\n"
    "NodeName=gpu-7 Arch=aarch64 NodeAddr=10.0.0.7 NodeHostName=gpu-7 Version=24.11.5 "
    "State=IDLE+DRAIN+NOT_RESPONDING ThreadsPerCore=1 Partitions=a,b BootTime=Unknown Comment=(null) "
    "Reason=NHC: State=broken disk [root@2026-11-21T08:29:45]\n"
    "NodeName=n3 State=DOWN*+DRAIN+NEW_IN_2030 Shiny=1\nnonsense\n"
)
JOB = (
    "JobId=7 ArrayJobId=5 ArrayTaskId=2 JobName={name} UserId=ann(1000) GroupId=ann(1000) MCS_label=N/A Priority=1 "
    "Nice=0 Account=(null) QOS=(null) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=3 BatchFlag=1 "
    "Reboot=0 ExitCode=0:0 RunTime=00:01:00 TimeLimit=1-00:00:00 TimeMin=N/A Partition=main ReqNodeList=(null) "
    "ExcNodeList=n[3-4] NodeList=n[1-2] BatchHost=n1 NumNodes=2 Command=/x SubmitLine=sbatch x WorkDir=/ "
    "Comment={comment} StdErr= StdOut=/dev/null\n"
)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("1-02:03:04", 93784.0), ("02:03:04", 7384.0), ("3:04", 184.0), ("UNLIMITED", math.inf),
        ("Partition_Limit", None),
    ],
)  # fmt: skip
def test_durations(said, seconds):
    assert text.seconds(said) == seconds


def test_nodes_of_several_versions():
    found = text.nodes(NODES)
    new = {"NEW_IN_"}  # of a state that is not known
    drained = {"DRAIN", "NOT_RESPONDING"}
    assert {name: one.states for name, one in found.items()} == {
        "n1": {"IDLE"}, "gpu-7": {"IDLE", *drained}, "n3": {"DOWN", *new, *drained},
    }  # fmt: skip
    assert (found["n1"].address, found["n1"].port) == ("127.0.0.1", 12369)
    assert (found["gpu-7"].reason, found["gpu-7"].reason_by) == ("NHC: State=broken disk", "root")
    with pytest.raises(SlurmError, match="n9.*State"):
        text.nodes("NodeName=n9 Arch=x86_64\n")


def test_a_job():
    job = text.job(JOB.format(name="train", comment="x"), 7)
    assert (job.job_id, job.state, job.reason, job.restarts, job.requeue) == (7, "RUNNING", "", 3, True)
    assert (job.nodes, job.excluded, job.batch_host) == (("n1", "n2"), ("n3", "n4"), "n1")
    assert (job.time_left_s, job.exit_code) == (86340.0, 0)
    assert job.inherited == ("SLURM_HET_", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK")
    plain = JOB.replace("ArrayJobId=5 ", "HetJobId=7 TresPerTask=gres:gpu:1 ").replace("Restarts=3", "Restarts=0")
    assert text.job(plain, 7).inherited == ("SLURM_ARRAY_", "SLURM_RESTART_COUNT")
    only_cpus = plain.replace("gres:gpu:1", "cpu=8")
    assert text.job(only_cpus, 7).inherited == ("SLURM_ARRAY_", "SLURM_RESTART_COUNT", "SLURM_GPUS_PER_TASK")
    ended = JOB.replace("RUNNING", "FAILED").replace("ExitCode=0:0", "ExitCode=0:9")
    assert (text.job(ended, 7).exit_code, text.job(ended, 7).time_left_s) == (137, None)


@pytest.mark.parametrize(
    "said",
    [
        'it\'s "a", b=c', "two\nlines", "Jöb\x07\x1b[2J", "JobId=9 x", "a\nRestarts=9 JobState=FAILED BatchHost=n9",
    ],
)  # fmt: skip
def test_texts_of_users(said):
    job = text.job(JOB.format(name=said, comment=said), 7)
    assert (job.job_id, job.state, job.batch_host, job.restarts) == (7, "RUNNING", "n1", 3)


@pytest.mark.parametrize("cut", [0, 5, 20, 300, len(JOB) - 9])
def test_a_cut_off_answer_is_one_sentence(cut):
    for parse in (text.nodes, text.steps, text.config):
        parse(JOB[:cut])
    with pytest.raises(SlurmError, match="JobState|JobId|ExitCode|TimeLimit") as raised:
        text.job(JOB[: min(cut, JOB.index(" JobState"))] + "\x1b[2J", 7)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 400


def test_other_jobs_are_left_out():
    both = JOB + JOB.replace("JobId=7", "JobId=8").replace("JobState=RUNNING", "JobState=FAILED")
    assert (text.job(both, 7).state, text.job(both, 8).state) == ("RUNNING", "FAILED")


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("slurm_load_jobs error: Invalid job id specified", NotKnown),
        ("Node zz not found", NotKnown),
        ("slurm_update error: Invalid user id", NotAllowed),
        ("slurm_update error: Access/permission denied", NotAllowed),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", NoAnswer),
        ("slurm_load_jobs error: Socket timed out on send/recv operation", NoAnswer),
        ("Job is no longer pending execution for job 1", SlurmError),
        ("", SlurmError),
        ("\x1b[2J\0 odd", SlurmError),
    ],
)
def test_errors_by_what_slurm_says(said, kind):
    error = text.error("scontrol", said)
    assert type(error) is kind and str(error).isprintable()
