"""GPUs still in use: which processes are left over, in prologs, epilogs and for a person."""

import pytest
from recorded import CHECKS, F, N, P, U

from nvrx_slurm.health.check import NodeView
from nvrx_slurm.health.checks import gpu_processes as module
from nvrx_slurm.health.checks.gpu_processes import GpuUse
from nvrx_slurm.health.runner import examine

pytestmark = pytest.mark.process


CGROUP = "0::/system.slice/slurmstepd.scope/job_{}/step_0/user/task_0\n"
PROLOG = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3", "SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}
EPILOG = PROLOG | {"SLURM_SCRIPT_CONTEXT": "epilog_slurmd"}
HOOK = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "2,3"}  # what our hook.sh hands on


@pytest.fixture
def node(gpus):
    """With process 4711 of job 7 and 4712 of no job."""
    for pid, cgroup in ((4711, CGROUP.format(7)), (4712, "0::/user.slice/user-1000.slice/session-3.scope\n")):
        gpus.node.write(f"/proc/{pid}/comm", "python\n")
        gpus.node.write(f"/proc/{pid}/cgroup", cgroup)
    return gpus


def found(node, env=None, **expect):
    """The verdict and its sentence by one look."""
    return node.found("gpu-processes", env, gpu_settle_s=0, **expect)


@pytest.mark.parametrize(
    "process, env, blamed",
    [
        ("processes.3 4712:70000", {}, True),
        ("processes.3 4711:70000", PROLOG, False),
        ("processes.3 4711:70000", HOOK | {"SLURM_JOB_ID": "8"}, True),
        ("processes.5 4711:70000", PROLOG | {"SLURM_JOB_ID": "8"}, False),  # on GPUs of another job
        ("processes.3 4711:70000", EPILOG, True),  # its job is over
        ("processes.3 4711:70000", HOOK | {"SLURM_JOB_EXIT_CODE": "0"}, True),
        ("processes.3 4711:70000", {"SLURM_JOB_ID": "8", "SLURM_JOB_GPUS": ""}, False),  # a job without GPUs
    ],
)
def test_whose_processes_are_left_over(node, process, env, blamed):
    node.say(process)
    verdict, text = found(node, env)
    pid = process.split()[1].partition(":")[0]
    assert (verdict, text) == (
        (F, f"left over: python ({pid}) on GPU 3 (GPU-3000)")
        if blamed
        else (P, f"no process is left over on {2 if env.get('SLURM_JOB_GPUS') else 8} GPUs")
    )


def test_slurm_means_device_files(node):
    """NVML's GPU 5 is /dev/nvidia3."""
    node.say("minor.5 3", "minor.3 5", "processes.5 4712:70000")
    said = found(node, PROLOG)
    assert said == (F, "left over: python (4712) on GPU 5 (GPU-5000)")
    strange = PROLOG | {"SLURM_JOB_GPUS": "3,9"}
    assert found(node, strange) == (
        U,
        "NVML shows no GPU with the device file /dev/nvidia9",
    )
    for code in (3, 15, 999):
        node.say(f"nvmlDeviceGetMinorNumber {code}")
        assert found(node, PROLOG)[0] in (U, N)
    assert node.stand_in.met().count("nvmlDeviceGetMinorNumber") >= 3


def test_services_may_be_there(node):
    node.say("processes 4712:5")
    assert found(node)[0] is F
    assert found(node, gpu_processes=["python"])[0] is P
    node.node.write("/proc/4712/comm", "nv-hostengine\n")
    assert found(node)[0] is P


def test_memory_without_a_process_is_left_over(node):
    node.say("used.3 70000")
    assert found(node) == (
        F,
        "in use without a process: GPU 3 (GPU-3000) holds 70000 MiB",
    )
    assert found(node, gpu_memory_used_mb=80000)[0] is P
    node.say("used.3 70000", "processes.3 4711:70000")
    assert found(node)[0] is P
    node.say("used 400", "reserved 5000")  # the driver's own does not count
    assert found(node)[0] is P
    node.say("used 600")
    assert found(node)[0] is F


def test_memory_that_a_new_driver_does_not_tell_is_unknown(node):
    """The old function counts the driver's own memory, too: 604 MiB of an idle H100."""
    node.say("used 4", "reserved 600", "nvmlDeviceGetMemoryInfo_v2.3 15")
    verdict, text = found(node)
    assert verdict is U and "GPU 3" in text and node.stand_in.met(), text
    node.say("reserved 600", "nvmlDeviceGetMemoryInfo_v2 15", "processes.3 4712:70000")
    assert found(node)[0] is F, "hidden by what is unknown"


def test_gpus_without_memory_of_their_own_are_judged_by_processes(node):
    node.say("nvmlDeviceGetMemoryInfo_v2 3")
    assert found(node) == (P, "no process is left over on 8 GPUs")
    node.say("nvmlDeviceGetMemoryInfo_v2 3", "processes.3 4712:70000")
    assert found(node)[0] is F


def test_what_ends_in_the_meantime_is_not_blamed(dgx, monkeypatch):
    """A second look, one second later, finds it gone."""
    uses = iter([GpuUse({"GPU 0": 9000.0}, {}), GpuUse({"GPU 0": 3.0}, {})])
    waited = []
    monkeypatch.setattr(module, "gpu_use", lambda node, expected: next(uses))
    monkeypatch.setattr(module.time, "sleep", waited.append)
    expected = {"gpu_memory_used_mb": 512.0, "gpu_processes": (), "gpu_settle_s": 1000.0}
    assert examine(CHECKS["gpu-processes"], NodeView(str(dgx.root)), expected)[0] is P
    assert waited == [1.0]
