"""GPUs: each fact of a healthy node broken alone, and every function of NVML that fails or hangs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import standin
from gpu_harness import Examiner, GpuNode, examiners
from hypothesis import given
from hypothesis import strategies as st
from recorded import Node

from nvrx_slurm.health import registry
from nvrx_slurm.health.check import Verdict
from nvrx_slurm.health.checks.gpu import Counts, judge_count
from nvrx_slurm.system import gpu_facts
from nvrx_slurm.system.hardware import Absent

CHECKS = registry.built_in()
OF_NVML = [name for name, check in CHECKS.items() if check.reads.startswith("NVML")]
F, U, N, P = Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_APPLICABLE, Verdict.PASS


@pytest.fixture(scope="module")
def examiner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examiner]:
    yield from examiners(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def node(dgx: Node, examiner: Examiner) -> GpuNode:
    return GpuNode(dgx, examiner)


def test_a_healthy_node_passes_all(node: GpuNode) -> None:
    assert len(OF_NVML) >= 12
    code, report = node.program()
    wrong = [f for f in report.findings if f.verdict not in (P, N)]
    passed = {f.check for f in report.findings if f.verdict is P}
    assert (code, wrong, report.notes) == (0, [], [])
    assert passed >= {*OF_NVML, "nic-ports", "nic-errors", "gpu-nics"}


def gone(path: str) -> Callable[[GpuNode], object]:
    return lambda node: (node.node / path).unlink()


def put(path: str, text: str) -> Callable[[GpuNode], object]:
    return lambda node: node.node.write(path, text)


def nothing(node: GpuNode) -> None:
    """The files stay as they are."""


def container(bound: bool) -> Callable[[GpuNode], object]:
    """Only the first GPU has a directory of the driver; the others are bound to it or not."""

    def build(node: GpuNode) -> None:
        first = node.node.recorded.GPUS[0]
        node.node.write(f"/proc/driver/nvidia/gpus/{first}/information", "Device Minor: \t 0\n")
        node.node.write("/dev/nvidia0", "")
        (node.node / "/sys/bus/pci/drivers/nvidia").mkdir(parents=True)
        for address in node.node.recorded.GPUS if bound else [first]:
            (node.node / f"/sys/bus/pci/devices/{address}/driver").symlink_to(node.node / "/sys/bus/pci/drivers/nvidia")

    return build


PCI3 = "/sys/bus/pci/devices/0000:61:00.0"
VERSION = "/proc/driver/nvidia/version"
INFO3 = "/proc/driver/nvidia/gpus/0000:61:00.0/information"

# check, NVML's facts, what else is broken, what is expected, verdict, part of the sentence
BROKEN: list[tuple[str, list[str], Callable[[GpuNode], object], dict[str, object], Verdict, str]] = [
    ("gpu-count", ["count 7"], nothing, {}, F, "NVML shows 7 GPUs instead of 8"),
    ("gpu-count", ["missing.3 1"], nothing, {}, F, "NVML shows 7 GPUs instead of 8"),
    ("gpu-count", ["missing.3 1"], put(INFO3, "Device Minor: \t 3\n"), {}, P, "7 GPUs"),  # as in a container
    ("gpu-count", ["count 1"], container(bound=True), {}, P, "1 GPUs"),  # one of 8, as the container toolkit gives it
    ("gpu-count", ["count 1"], container(bound=False), {}, F, "NVML shows 1 GPUs instead of 8"),  # lost by the driver
    ("gpu-count", ["count 0"], container(bound=True), {}, F, "NVML shows 0 GPUs instead of 1"),
    ("gpu-count", [], gone(PCI3), {}, P, "8 GPUs"),  # as in a virtual machine that shows no bus
    ("gpu-count", [], gone(PCI3), {"gpus": 8}, P, "8 GPUs"),
    ("gpu-count", [], nothing, {"gpus": 4}, F, "NVML shows 8 GPUs instead of 4"),
    ("gpu-count", ["nvmlInit 9"], nothing, {}, F, "8 GPUs cannot be used: no NVML here (Driver Not Loaded)"),
    ("gpu-count", ["nvmlInit 12"], nothing, {}, N, "no NVML here"),
    ("gpu-count", ["nvmlInit 12"], nothing, {"gpus": 8}, F, "8 GPUs cannot be used"),
    ("gpu-count", ["nvmlDeviceGetCount 999"], nothing, {}, F, "8 GPUs cannot be used: NVML: Unknown Error"),
    ("gpu-recovery", ["action.3 1"], nothing, {}, F, "GPU 3 (GPU-3000) needs GPU_RESET"),
    ("gpu-recovery", ["action 2"], nothing, {}, F, "needs NODE_REBOOT, GPU 1 (GPU-1000) needs NODE_REBOOT"),
    ("gpu-recovery", ["action.0 77"], nothing, {}, F, "needs UNKNOWN(77)"),
    ("gpu-recovery", ["nvmlDeviceGetHandleByIndex.5 15"], nothing, {}, F, "GPU 5: GPU is lost"),
    ("gpu-recovery", ["nvmlDeviceGetHandleByIndex.5 28"], nothing, {}, F, "GPU 5: "),  # not found
    ("gpu-recovery", ["nvmlDeviceGetHandleByIndex.5 16"], nothing, {}, F, "GPU 5: "),  # to be reset
    ("gpu-recovery", ["nvmlDeviceGetHandleByIndex.5 999"], nothing, {}, F, "GPU 5: Unknown Error"),
    ("gpu-recovery", ["nvmlDeviceGetFieldValues.5 1"], nothing, {}, U, "GPU 5: Uninitialized"),
    ("gpu-recovery", ["nvmlDeviceGetFieldValues.5 7"], nothing, {}, U, "GPU 5: Insufficient Size"),
    ("gpu-recovery", ["nvmlDeviceGetFieldValues.5 20"], nothing, {}, U, "GPU 5: Insufficient Memory"),
    ("gpu-recovery", ["nvmlInit 20"], nothing, {}, U, "NVML cannot be opened: Insufficient Memory"),
    ("gpu-count", ["nvmlDeviceGetCount 20"], nothing, {}, U, "NVML: Insufficient Memory"),
    ("gpu-count", ["nvmlDeviceGetCount 15"], nothing, {}, F, "cannot be used: NVML: GPU is lost"),
    ("gpu-recovery", ["result230 3"], nothing, {}, N, "no GPU of this process tells its recovery action"),
    ("gpu-recovery", ["nvmlInit 9"], nothing, {}, N, "no NVML here"),
    ("gpu-ecc", ["ecc.3.1 1"], nothing, {}, F, "GPU 3 (GPU-3000) has 1 uncorrected ECC errors"),
    ("gpu-ecc", ["ecc.3.1 1"], nothing, {"gpu_ecc_uncorrected_max": 1}, P, "no ECC errors to speak of"),
    ("gpu-ecc", ["ecc.2.0 50000001"], nothing, {}, F, "GPU 2 (GPU-2000) has 50000001 corrected"),
    ("gpu-ecc", ["nvmlDeviceGetTotalEccErrors.2 3"], nothing, {}, P, "7 GPUs"),  # ECC is off there
    ("gpu-row-remap", ["remap_pending.1 1", "remapped 2"], nothing, {}, F, "GPU 1 (GPU-1000) has a row to remap"),
    ("gpu-row-remap", ["remap_failed.1 1"], nothing, {}, F, "could not remap a row"),
    ("gpu-row-remap", ["remapped.1 512"], nothing, {}, P, "no row to remap (512 are)"),
    ("gpu-retired-pages", ["retired.4.0 6", "retired.4.1 5"], nothing, {}, F, "GPU 4 (GPU-4000) has retired 11 pages"),
    ("gpu-retired-pages", ["retired_pending.4 1"], nothing, {}, F, "pages to retire"),
    ("gpu-retired-pages", ["nvmlDeviceGetRetiredPages 3"], nothing, {}, N, "tells its retired pages"),
    ("gpu-throttle", ["reasons.6 0x48"], nothing, {}, F, "GPU 6 (GPU-6000) is slowed down (hw-slowdown, hw-thermal)"),
    ("gpu-throttle", ["reasons.6 0x80", "nvmlDeviceGetCurrentClocksEventReasons 13"], nothing, {}, F, "power-brake)"),
    ("gpu-throttle", ["reasons.6 0x25"], nothing, {}, P, "run at the clocks they want"),
    ("gpu-throttle", ["reasons 0x20"], nothing, {"gpu_throttle_reasons": ["sw-thermal"]}, F, "(sw-thermal)"),
    ("gpu-temperature", ["temperature.7 87"], nothing, {}, F, "GPU 7 (GPU-7000) is at 87 C, where it slows down"),
    ("gpu-temperature", ["temperature.7 86"], nothing, {}, P, "at most at 86 C"),
    ("gpu-temperature", ["temperature.7 70"], nothing, {"gpu_temperature_max": 65}, F, "is at 70 C, more than 65"),
    ("gpu-temperature", ["temperature 99", "nvmlDeviceGetTemperatureThreshold 3"], nothing, {}, P, "99 C"),
    ("gpu-driver", ["driver 570.124.06"], nothing, {}, F, "kernel module is 570.86.15, the library 570.124.06"),
    ("gpu-driver", ["nvmlInit 18"], nothing, {}, F, "library and kernel module (570.86.15) do not fit"),
    ("gpu-driver", [], nothing, {"gpu_driver": "580.1"}, F, "the driver is 570.86.15 instead of 580.1"),
    ("gpu-driver", [], put(VERSION, "\x00junk"), {}, P, "the driver is 570.86.15"),
    ("gpu-driver", [], gone(VERSION), {"gpu_driver": "570.86.15"}, P, "the driver is 570.86.15"),
    ("gpu-persistence", ["persistence.2 0"], nothing, {}, F, "GPU 2 (GPU-2000) has persistence mode off"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "facts", "break_it", "expect", "verdict", "text"), BROKEN)
def test_one_broken_fact_is_found(
    node: GpuNode,
    check: str,
    facts: list[str],
    break_it: Callable[[GpuNode], object],
    expect: dict[str, object],
    verdict: Verdict,
    text: str,
) -> None:
    node.say(*facts)
    break_it(node)
    said = node.found(check, **expect)
    assert said[0] is verdict, said
    assert text in said[1]
    told = {fact.split()[0].partition(".")[0] for fact in facts if fact.startswith("nvml")}
    assert told <= set(node.stand_in.met())


def test_every_check_of_gpus_is_broken_above() -> None:
    ours = {name for name, check in CHECKS.items() if check.judge.__module__ == "nvrx_slurm.health.checks.gpu"}
    assert len(ours) == 9
    assert ours == {name for name, *_, verdict, _ in BROKEN if verdict is F}


def test_a_job_must_see_what_it_was_given(node: GpuNode) -> None:
    """In a job the node's other GPUs are not its matter; in a prolog the job's variables are not about the node."""
    node.say("count 2")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_ON_NODE": "2"}
    assert node.found("gpu-count", job, gpus=8) == (P, "2 GPUs")
    assert node.found("gpu-count", job | {"SLURM_GPUS_ON_NODE": "3"})[0] is F
    assert node.found("gpu-count", job | {"SLURM_GPUS_ON_NODE": "junk"})[0] is F
    assert (
        node.found("gpu-count", job | {"SLURM_SCRIPT_CONTEXT": "prolog_slurmd"})[1] == "NVML shows 2 GPUs instead of 8"
    )


@pytest.mark.parametrize("devices", ["MIG-1,MIG-2", "MIG-GPU-8/1/0, MIG-GPU-8/2/0"])
def test_parts_of_gpus_are_not_counted(node: GpuNode, devices: str) -> None:
    """Slurm gave two instances of one GPU."""
    node.say("count 1")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_ON_NODE": "2"}
    assert node.found("gpu-count", job)[0] is F
    said = (N, "MIG instances, not whole GPUs, are assigned")
    assert node.found("gpu-count", job | {"CUDA_VISIBLE_DEVICES": devices}) == said
    prolog = {"SLURM_SCRIPT_CONTEXT": "prolog_slurmd", "CUDA_VISIBLE_DEVICES": devices}
    assert node.found("gpu-count", job | prolog) == (F, "NVML shows 1 GPUs instead of 8")


def test_a_job_looks_at_its_own_gpus(node: GpuNode) -> None:
    """Numbers of CUDA_VISIBLE_DEVICES are among the GPUs that the cgroup leaves; Slurm's scripts look at all."""
    node.say("action.5 1")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    assert node.found("gpu-recovery", job | {"CUDA_VISIBLE_DEVICES": "0,1"})[0] is P
    assert node.found("gpu-recovery", job | {"CUDA_VISIBLE_DEVICES": "5"})[0] is F
    assert (
        node.found("gpu-recovery", job | {"CUDA_VISIBLE_DEVICES": "0", "SLURM_SCRIPT_CONTEXT": "prolog_slurmd"})[0] is F
    )
    node.say("action.5 1", "missing.0 1", "missing.1 1")
    assert "GPU 5 (GPU-5000)" in node.found("gpu-recovery", job | {"CUDA_VISIBLE_DEVICES": "3"})[1]
    assert node.found("gpu-recovery", job | {"CUDA_VISIBLE_DEVICES": "5"})[0] is P
    assert node.found("gpu-recovery", job | {"CUDA_VISIBLE_DEVICES": "6"}) == (
        F,
        "CUDA_VISIBLE_DEVICES names GPU 6, but NVML shows 6 GPUs",
    )


# --- NVML that fails ------------------------------------------------------------------------------------------------

FUNCTIONS = sorted(set(re.findall(r'(?:BEGIN|outcome)\("(nvml\w+)"', standin.SOURCE.read_text())))
for elsewhere in ("nvmlDeviceGetPciInfo", "nvmlDeviceGetMinorNumber"):  # test_numa_auto.py, test_gpu_processes.py
    FUNCTIONS.remove(elsewhere)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_function_that_fails_is_a_sentence(node: GpuNode, function: str) -> None:
    """Not supported, not found, lost, unknown, a number from the future: never a traceback, never a wrong pass."""
    assert len(FUNCTIONS) == 21
    for code in (3, 13, 15, 999, 4242):
        node.say(f"{function} {code}", "reserved 0", *ALSO.get(function, ()))
        said = {name: node.found(name) for name in OF_NVML}
        for name, (verdict, text) in said.items():
            assert "Traceback" not in text and "NVMLError" not in text, (name, text)
            assert verdict is not F or name in ("gpu-count", "gpu-recovery"), (name, text)
        grave = code > 13 and function in NEEDED
        assert any(verdict in (F, U) for verdict, _ in said.values()) is grave or code <= 13, (code, said)
    assert function in node.stand_in.met()


ALSO = {  # of older drivers
    "nvmlDeviceGetMemoryInfo": ("nvmlDeviceGetMemoryInfo_v2 13",),
    "nvmlDeviceGetCurrentClocksThrottleReasons": ("nvmlDeviceGetCurrentClocksEventReasons 13",),
}
NEEDED = set(FUNCTIONS) - {"nvmlShutdown"}


@pytest.mark.parametrize(
    ("fact", "check", "text"),
    [
        ("nvmlInit hang", "gpu-ecc", "opening NVML"),
        ("nvmlDeviceGetCount hang", "gpu-count", "asking NVML for the number of GPUs"),
        ("nvmlDeviceGetHandleByIndex.3 hang", "gpu-recovery", "NVML"),
        ("nvmlDeviceGetTemperature.5 hang", "gpu-temperature", "asking NVML for the temperature of GPU 5"),
        ("nvmlDeviceGetNvLinkState.2.7 hang", "nvlink", "asking NVML for the NVLink of GPU 2"),
        ("nvmlDeviceGetComputeRunningProcesses hang", "gpu-processes", "asking NVML for the processes of GPU 0"),
    ],
)
def test_a_function_that_hangs_is_unknown_and_named(node: GpuNode, fact: str, check: str, text: str) -> None:
    node.say(fact)
    code, report = node.program("--only", check, "--deadline", "2")
    (finding,) = report.findings
    assert (code, finding.verdict) == (3, U)
    assert finding.text.startswith("timed out after") and finding.text.endswith(text), finding.text
    assert fact.split()[0].partition(".")[0] in node.stand_in.met()
    assert report.notes == []  # no child was left


def test_nvml_is_opened_once_for_all_checks_and_needs_no_closing(node: GpuNode) -> None:
    node.say("nvmlInit 0", "nvmlShutdown hang")  # a told outcome is written down, also that it went well
    code, report = node.program(*(word for name in OF_NVML for word in ("--only", name)))
    assert (code, {finding.verdict for finding in report.findings}) == (0, {P})
    assert node.stand_in.met() == ["nvmlInit"]


def test_a_check_of_nvml_that_hangs_hides_no_other(node: GpuNode) -> None:
    node.say("nvmlDeviceGetTemperature.5 hang")
    code, report = node.program(*(word for name in OF_NVML for word in ("--only", name)), "--deadline", "3")
    assert [f.check for f in report.findings if f.verdict is not P] == ["gpu-temperature"], report.findings
    assert (code, report.notes) == (3, [])
    assert "nvmlDeviceGetTemperature" in node.stand_in.met()


def test_without_nvml_nothing_applies(dgx: Node) -> None:
    code, report = dgx.program("--when", "preflight", *(word for name in OF_NVML for word in ("--only", name)))
    if any(finding.verdict is P for finding in report.findings):
        pytest.skip("there is an NVML on this machine")
    assert (code, {finding.verdict for finding in report.findings}) == (0, {N})


@pytest.mark.parametrize("there", [True, False])
def test_nvidia_ml_py_is_loaded_once_and_only_where_nvml_is(examiner: Examiner, tmp_path: Path, there: bool) -> None:
    code = "import sys, nvrx_slurm.health.checks.gpu; print('pynvml' in sys.modules)"
    env = {**os.environ, "LD_LIBRARY_PATH": examiner.stand_in.env["LD_LIBRARY_PATH"] if there else str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    if not there and done.stdout.strip() == "True":
        pytest.skip("there is an NVML on this machine")
    assert done.stdout.strip() == str(there)


# --- pure -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1))
def test_a_fabrics_health_mask_never_raises(mask: int) -> None:
    assert set(gpu_facts.degraded(mask)) <= set(gpu_facts._FABRIC_HEALTH)


@pytest.mark.parametrize(
    ("counts", "wanted", "said"),
    [
        (Counts(2, None, None), None, (P, "2 GPUs")),  # somebody who cannot tell how many there should be
        (Counts(2, None, None), 4, (F, "NVML shows 2 GPUs instead of 4")),
        (Counts(2, 8, 2), 8, (P, "2 GPUs")),
        (Counts(4, 8, 2), None, (P, "4 GPUs")),  # a job without a cgroup sees more than it was given
        (Counts(None, None, None, "lost"), None, (F, "the GPUs cannot be used: lost")),
        (Counts(None, 8, 2, "lost"), None, (F, "2 GPUs cannot be used: lost")),
    ],
)
def test_the_number_of_gpus(counts: Counts, wanted: int | None, said: tuple[Verdict, str]) -> None:
    assert judge_count(counts, {"gpus": wanted}) == said


def test_no_gpu_at_all_does_not_apply() -> None:
    with pytest.raises(Absent, match="there is no GPU"):
        judge_count(Counts(0, 0, None), {"gpus": None})
    assert judge_count(Counts(0, 0, None), {"gpus": 1})[0] is F


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 1000))
def test_ecc_fails_above_its_limits_only(corrected: int, uncorrected: int, most: int) -> None:
    expected = {"gpu_ecc_corrected_max": most, "gpu_ecc_uncorrected_max": most}
    verdict, _ = CHECKS["gpu-ecc"].judge({"GPU 0": gpu_facts.Ecc(corrected, uncorrected)}, expected)
    assert verdict is (F if max(corrected, uncorrected) > most else P)
