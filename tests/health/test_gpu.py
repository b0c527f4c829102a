"""GPUs: each fact of a healthy node broken alone, and every function of NVML that fails or hangs."""

import re
from itertools import product

import pytest
import standin
from recorded import CHECKS, F, N, P, U

pytestmark = pytest.mark.process


OF_NVML = [name for name, check in CHECKS.items() if check.reads.startswith("NVML")]


def test_a_healthy_node_passes_all_and_opens_nvml_once(nvml):
    nvml.say("nvmlInit 0", "nvmlShutdown hang")  # an outcome is recorded, also success; closing is not needed
    code, report = nvml.program()
    assert (code, [f for f in report.findings if f.verdict not in (P, N)], report.notes) == (0, [], [])
    passed = {f.check for f in report.findings if f.verdict is P}
    assert len(OF_NVML) >= 12 and passed >= {*OF_NVML, "nic-ports", "nic-errors"}
    assert set(nvml.stand_in.met()) == {"nvmlInit"}  # by more than one process only if one was slow


OLD_CLOCKS = "nvmlDeviceGetCurrentClocksEventReasons 13"

# check, NVML's facts, what is expected, verdict, part of the sentence
BROKEN = [
    ("gpu-count", ["count 7"], {}, F, "7 GPUs instead of 8"),
    ("gpu-count", ["nvmlInit 9"], {}, F, "Driver Not Loaded"),
    ("gpu-count", ["nvmlInit 12"], {"gpus": 8}, F, "8 GPUs cannot be used"),
    ("gpu-recovery", ["action.3 1"], {}, F, "GPU 3 (GPU-3000) needs GPU_RESET"),
    ("gpu-recovery", ["nvmlDeviceGetHandleByIndex.5 15"], {}, F, "GPU 5: GPU is lost"),
    ("gpu-ecc", ["ecc.3.1 1"], {}, F, "GPU 3 (GPU-3000) has 1 uncorrected ECC errors"),
    ("gpu-ecc", ["ecc.2.0 50000001"], {}, F, "GPU 2 (GPU-2000) has 50000001 corrected"),
    ("gpu-row-remap", ["remap_pending.1 1", "remapped 2"], {}, F, "GPU 1 (GPU-1000) has a row"),
    ("gpu-throttle", ["reasons.6 0x48"], {}, F, "GPU 6 (GPU-6000) is slowed down (hw-slowdown, hw-thermal)"),
    ("gpu-throttle", ["reasons.6 0x80", OLD_CLOCKS], {}, F, "power-brake)"),
    ("gpu-temperature", ["temperature.7 87"], {}, F, "GPU 7 (GPU-7000) is at 87 C"),
    ("gpu-driver", ["driver 570.124.06"], {}, F, "module is 570.86.15, the library 570.124.06"),
    ("gpu-driver", [], {"gpu_driver": "580.1"}, F, "570.86.15 instead of 580.1"),
    ("gpu-persistence", ["persistence.2 0"], {}, F, "GPU 2 (GPU-2000) has persistence"),
    ("nvlink", ["link.3.17 0"], {}, F, "GPU 3 (GPU-3000) has NVLink 17 down"),
    ("nvlink", ["link.3.17 -1"], {"nvlinks": 18}, F, "GPU 3 (GPU-3000) has 17 NVLinks"),
    ("nvlink-fabric", ["fabric_state.3 2"], {}, F, "GPU 3 (GPU-3000) is not registered"),
    ("nvlink-fabric", ["fabric_health.3 0x210"], {}, F, "(route unhealthy, incorrect configuration)"),
]


@pytest.mark.parametrize("check, facts, expect, verdict, text", BROKEN)
def test_one_broken_fact_is_found(nvml, check, facts, expect, verdict, text):
    nvml.say(*facts)
    said = nvml.found(check, **expect)
    assert said[0] is verdict and text in said[1], said
    told = {fact.split()[0].partition(".")[0] for fact in facts if fact.startswith("nvml")}
    assert told <= set(nvml.stand_in.met())


@pytest.mark.parametrize("where, verdict", [("kthreadd", F), ("sh", P)])
def test_a_container_has_gpus_of_its_own(gpus, where, verdict):
    """It sees the whole PCI bus."""
    gpus.node.write("/proc/2/comm", f"{where}\n")
    gpus.say("count 1")
    assert gpus.found("gpu-count")[0] is verdict


JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
PROLOG = {"SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}


@pytest.mark.parametrize(
    "check, facts, env, verdict, text",
    [
        ("gpu-count", ["count 2"], {"SLURM_GPUS_ON_NODE": "2"}, P, "2 GPUs"),  # the node's others do not count
        ("gpu-count", ["count 2"], {"SLURM_GPUS_ON_NODE": "3"}, F, "2 GPUs instead of 3"),
        # Slurm gave two instances of one GPU.
        ("gpu-count", ["count 1"], {"CUDA_VISIBLE_DEVICES": "MIG-GPU-8/1/0, MIG-GPU-8/2/0"}, N, "MIG"),
        # Numbers of CUDA_VISIBLE_DEVICES are among the GPUs that the cgroup leaves; Slurm's scripts look at all.
        ("gpu-recovery", ["action.5 1"], {"CUDA_VISIBLE_DEVICES": "0,1"}, P, "2 GPUs"),
        ("gpu-recovery", ["action.5 1"], {"CUDA_VISIBLE_DEVICES": "0", **PROLOG}, F, "GPU 5"),
        ("gpu-recovery", ["action.5 1", "missing.0 1", "missing.1 1"], {"CUDA_VISIBLE_DEVICES": "3"}, F, "(GPU-5000)"),
    ],
)
def test_a_job_looks_at_its_own_gpus(nvml, check, facts, env, verdict, text):
    nvml.say(*facts)
    said = nvml.found(check, JOB | env)
    assert said[0] is verdict and text in said[1], said


FUNCTIONS = sorted(set(re.findall(r'(?:BEGIN|outcome)\("(nvml\w+)"', standin.SOURCE.read_text())))
for elsewhere in ("nvmlDeviceGetPciInfo", "nvmlDeviceGetMinorNumber"):  # system/test_numa.py, test_gpu_processes.py
    FUNCTIONS.remove(elsewhere)
ALSO = {  # of older drivers
    "nvmlDeviceGetCurrentClocksThrottleReasons": ("nvmlDeviceGetCurrentClocksEventReasons 13",),
}
NEEDED = set(FUNCTIONS) - {"nvmlShutdown"}


@pytest.mark.parametrize("codes", [(15,), pytest.param((3, 4242), marks=pytest.mark.matrix)])
def test_each_function_that_fails_is_a_sentence(nvml, codes):
    """Not supported, lost, a number from the future: never a traceback, never a wrong pass."""
    assert len(FUNCTIONS) == 18
    for function, code in product(FUNCTIONS, codes):
        nvml.say(f"{function} {code}", "reserved 0", *ALSO.get(function, ()))
        said = {name: nvml.found(name) for name in OF_NVML}
        for name, (verdict, text) in said.items():
            assert "Traceback" not in text and "NVMLError" not in text, (name, text)
            assert verdict is not F or name in ("gpu-count", "gpu-recovery"), (name, text)
        grave = code > 13 and function in NEEDED
        assert any(verdict in (F, U) for verdict, _ in said.values()) is grave or code <= 13, (code, said)
        assert function in nvml.stand_in.met()


def test_a_function_that_hangs_is_unknown_and_named(nvml):
    nvml.say("nvmlDeviceGetTemperature.5 hang")
    code, report = nvml.program("--only", "gpu-temperature", "--deadline", "2")
    (finding,) = report.findings
    assert (code, finding.verdict, report.notes) == (3, U, [])
    assert finding.text.startswith("timed out") and finding.text.endswith("temperature of GPU 5"), finding.text


def test_nvlink_errors_count_from_the_first_run_on(gpus):
    """tests/health/test_nic.py has the window and counters that start anew."""
    gpus.say("field208 500")
    assert gpus.found("nvlink-errors") == (P, "0 errors lately")
    gpus.say("field208 500", "field208.3.5 1400", "field215.3.5 200", "field208.1.0 501")
    assert gpus.found("nvlink-errors") == (F, "GPU 3 NVLink 5 counted 1100 errors")
    both = "GPU 3 NVLink 5 counted 1100 errors, GPU 1 NVLink 0 counted 1 errors"
    assert gpus.found("nvlink-errors", nvlink_errors_max=0) == (F, both)


def test_nvlink_errors_of_older_gpus(gpus):
    """Ampere: replays and recoveries by fields of their own."""
    old = ["links 12", "result208 3", "result215 3"]
    gpus.say(*old, "field46 3", "field53 1")
    assert gpus.found("nvlink-errors") == (P, "0 errors lately")
    gpus.say(*old, "field46.2 9", "field53 1")
    assert gpus.found("nvlink-errors", nvlink_errors_max=5) == (F, "GPU 2 NVLink 0 counted 6 errors")
    gpus.say("result208 3", "result215 3")
    assert gpus.found("nvlink-errors")[0] is N


def test_what_gpus_have_is_learned(gpus):
    gpus.say("driver 570.86.15")
    assert gpus.learned("gpu-count") == {"gpus": 8} and gpus.learned("gpu-driver") == {"gpu_driver": "570.86.15"}
    assert gpus.learned("nvlink") == {"nvlinks": 18}
    gpus.say("link.3.17 0")
    assert gpus.learned("nvlink") == {}
