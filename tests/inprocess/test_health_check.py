"""Missing hardware never fails, failing hardware does: recorded sysfs trees and a double of NVML."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dgx
import pytest
from ranks_harness import WITHOUT_TORCH

from nvrx_slurm.inprocess import exception
from nvrx_slurm.inprocess.plugins import health_check
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.state import FrozenState, State

STATE = State(rank=0, world_size=2).freeze()

# For each line of stdin: make the check in the first world, call it in each; prints the errors and the log lines.
CHILD = (
    WITHOUT_TORCH
    + """
import json, logging, os, sys
from pathlib import Path
from nvrx_slurm.inprocess.plugins import health_check
from nvrx_slurm.inprocess.state import State
from nvrx_slurm.system import gpus

lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
logging.getLogger("nvrx_slurm.inprocess").addHandler(handler)
logging.getLogger("nvrx_slurm.inprocess").setLevel(logging.DEBUG)
file = Path(os.environ["NVML_STANDIN"])
for request in sys.stdin:
    name, arguments, worlds, visible, timeout_s = json.loads(request)
    if timeout_s:
        gpus.recovery_actions.__defaults__ = (None, timeout_s, gpus.quiet)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    health_check._reported.clear()
    lines.clear()
    file.write_text(worlds[0])
    check = getattr(health_check, name)(**arguments)
    said = []
    for world in worlds:
        file.write_text(world)
        try:
            state = State(0, 1).freeze()
            assert check(state) is state
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    print(json.dumps([said, lines]), flush=True)
"""
)


@pytest.fixture(scope="module")
def worlds(nvml_standin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Make a check in the first of these worlds and call it in each: (error or "" for each, log lines)."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(nvml_standin), "NVML_STANDIN": str(tmp_path_factory.mktemp("w") / "w")}
    children: list[subprocess.Popen[str]] = []

    def close() -> None:
        with children.pop() as child:
            child.kill()

    def run(name: str, *texts: str, visible: str | None = None, timeout_s: float = 0, **arguments: Any) -> Any:
        if not children:
            argv, pipe = [sys.executable, "-c", CHILD], subprocess.PIPE
            children.append(subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=env, bufsize=1))
        print(json.dumps([name, arguments, texts, visible, timeout_s]), file=children[0].stdin)
        said, lines = json.loads(children[0].stdout.readline())  # type: ignore[union-attr]
        if timeout_s:
            close()  # its driver hangs for ever
        return [text.removeprefix("HealthCheckError: ") for text in said], lines

    yield run
    if children:
        close()


# --- GPUs -----------------------------------------------------------------------------------------------------------

GPU, NVL = "ChainedGPUHealthCheck", "ChainedNVLHealthCheck"
UNUSED = "links 0\nlink.0.0 0\nlink.0.1 0"
GPU_FAULTS = [
    ("", ""),
    ("action.1 1", "GPU check: GPU 1 (GPU-1000) needs recovery action GPU_RESET"),
    ("action.0 2\naction.1 4", "NODE_REBOOT; GPU 1 (GPU-1000) needs recovery action DRAIN_AND_RESET"),
    ("result230 999", "GPU 0: Unknown Error"),
    ("count 1", "GPU check: GPU 1 (GPU-1000) is gone"),
    ("nvmlInit 9", "was there before, now no NVML"),
    ("", ""),
]
LINK_FAULTS = [
    ("", ""),
    ("link.1.0 0", "NVLink check: GPU 1 (GPU-1000) has NVLink 0 down"),
    ("link.0.0 0\nlink.0.1 0", "GPU 0 (GPU-0000) has NVLink 0, 1 down"),
    ("", ""),
]
FROM_THE_START = [("link.0.1 0", "GPU 0 (GPU-0000) has NVLink 1 down")]  # beside one that is up
NO_BRIDGE = [(UNUSED, ""), (UNUSED, "")]


@pytest.mark.parametrize(
    ("name", "rows"), [(GPU, GPU_FAULTS), (NVL, LINK_FAULTS), (NVL, FROM_THE_START), (NVL, NO_BRIDGE)]
)
def test_gpus_and_links_that_fail(worlds, name: str, rows: list[tuple[str, str]]) -> None:
    said, lines = worlds(name, *(world for world, _ in rows))
    assert [bool(text) for text in said] == [bool(token) for _, token in rows]
    assert all(token in text for text, (_, token) in zip(said, rows, strict=True)) and lines == []


@pytest.mark.parametrize(
    ("name", "world", "why"),
    [
        (GPU, "nvmlInit 9", "no NVML"),
        (GPU, "count 0", "sees 0 GPUs"),
        (GPU, "nvmlDeviceGetFieldValues 2", "recovery action"),
        (NVL, "links 0", "its NVLink"),
    ],
)
def test_missing_hardware_is_not_applicable_and_said_once_at_debug(worlds, name: str, world: str, why: str) -> None:
    said, (line,) = worlds(name, world, world, world)
    assert said == ["", "", ""]
    assert line.startswith("DEBUG ") and "not applicable" in line and why in line


def test_one_index_means_cudas_number(worlds) -> None:
    """action.3 is GPU 3's: shown by number, by UUID, alone; not to the others."""
    for visible, index, sick in (
        (None, 3, True),
        ("3,2", 0, True),
        ("GPU-2,GPU-3", 1, True),
        ("0,-1,3", None, False),
        ("MIG-3000", 0, False),
    ):
        said, _ = worlds(GPU, "count 4", "count 4\naction.3 1", visible=visible, device_index=index)
        assert ("GPU 3 (GPU-3000) needs" in said[1]) is sick and bool(said[1]) is sick, (visible, index)


def test_a_driver_that_does_not_answer_is_a_failure_within_its_bound(worlds) -> None:
    said, lines = worlds(GPU, "", "nvmlInit hang", timeout_s=0.2)
    assert said[0] == "" and "within 0.2 s" in said[1] and lines == []


@pytest.mark.parametrize("mode", ["unbound", "absent"])
def test_without_nvml_library_or_binding_nothing_fails(tmp_path: Path, mode: str) -> None:
    """As on a CPU node; also where nvidia-ml-py is not installed."""
    code = """
import logging
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(message)s")
if sys.argv[1] == "unbound":
    sys.modules["pynvml"] = None
else:
    import pynvml
    pynvml.CDLL = lambda name: (_ for _ in ()).throw(OSError(name))
from nvrx_slurm.inprocess import health_check as h
from nvrx_slurm.inprocess.state import State
state = State(0, 1).freeze()
for index in (None, 0):
    for kind in (h.ChainedGPUHealthCheck, h.ChainedNVLHealthCheck, h.ChainedNicHealthCheck):
        assert kind(device_index=index)(state) is state
assert h.CudaHealthCheck()(state) is state
assert "torch" not in sys.modules
"""
    argv = [sys.executable, "-c", WITHOUT_TORCH + code, mode]
    env = {**os.environ, "LOCAL_RANK": "0", "NVRX_SYSROOT": str(tmp_path)}
    out = subprocess.check_output(argv, env=env, text=True, timeout=60)
    assert len([line for line in out.splitlines() if "not applicable" in line]) == 4, out


# --- NICs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """Eight GPUs and eight NICs, whose links are up and never went down."""
    dgx.build(tmp_path / "node")
    return tmp_path / "node"


def port(node: Path, nic: str, state: str, link_downed: int = 0) -> None:
    for file, text in (("state", state), ("counters/link_downed", link_downed)):
        dgx.write(node, f"/sys/class/infiniband/{nic}/ports/1/{file}", f"{text}\n")


def unfit(check: Any) -> str:
    """Why it fails, "" if it passes."""
    try:
        assert check(STATE) is STATE
    except exception.HealthCheckError as error:
        return str(error)
    return ""


def test_a_port_that_went_down_fails_also_if_it_is_back(node: Path, monkeypatch) -> None:
    monkeypatch.setenv("NVRX_SYSROOT", str(node))
    check = health_check.ChainedNicHealthCheck()
    assert unfit(check) == ""
    port(node, "mlx5_1", "1: DOWN", 1)
    for _ in range(2):
        assert "NIC port mlx5_1/1 was ACTIVE and is DOWN" in unfit(check)
    port(node, "mlx5_1", "4: ACTIVE", 2)
    assert "mlx5_1/1 went down 2 times" in unfit(check)
    assert unfit(check) == ""  # told once
    port(node, "mlx5_1", "4: ACTIVE", 0)  # the counters were reset
    assert unfit(check) == ""
    shutil.rmtree(node / "sys/class")
    assert "was there before" in unfit(check)


def test_ports_never_in_use_counters_never_kept_and_lost_nics(node: Path) -> None:
    nics = node / "sys/class/infiniband"
    port(node, "mlx5_0", "1: DOWN", 5)
    (nics / "mlx5_1/ports/1/counters/link_downed").unlink()
    check = health_check.ChainedNicHealthCheck(sysfs_root=node / "sys")
    port(node, "mlx5_0", "2: INIT", 9)
    port(node, "mlx5_1", "4: ACTIVE", 9)
    assert unfit(check) == ""
    port(node, "mlx5_1", "1: DOWN")
    assert unfit(check).endswith("mlx5_1/1 was ACTIVE and is DOWN")
    (nics / "mlx5_0/ports/1/state").unlink()
    assert "NIC mlx5_0 port 1" in unfit(check)
    (nics / "mlx5_0").unlink()
    assert "mlx5_0/1 is gone" in unfit(check)


def test_a_gpu_has_its_nearest_nics(node: Path, monkeypatch) -> None:
    """tests/health/test_nic.py has all degrees of nearness."""
    asked = iter([{"GPU 6": dgx.GPUS[6]}])  # once: a lost GPU has no address
    monkeypatch.setattr(health_check.gpus, "pci_addresses", lambda env, index: next(asked))
    check = health_check.ChainedNicHealthCheck(device_index=6, sysfs_root=node / "sys")
    port(node, "mlx5_1", "1: DOWN")
    assert unfit(check) == ""
    port(node, "mlx5_6", "1: DOWN")
    assert "mlx5_6/1 was ACTIVE" in unfit(check)


def test_a_gpus_place_comes_from_nvml(node: Path, worlds) -> None:
    world, root = f"bus.0 {0x1B}\nbus.1 {0x77}", str(node / "sys")
    nic = "ChainedNicHealthCheck"
    assert worlds(nic, world, "nvmlInit 15", device_index=0, sysfs_root=root) == (["", ""], [])
    said, (line,) = worlds(nic, world, device_index=1, sysfs_root=root)
    assert said == [""] and "0000:77:00.0" in line


# --- CUDA, faults and own checks --------------------------------------------------------------------------------------


def fake_cuda(monkeypatch, *deeds: Callable[[], object]) -> list[int]:
    """torch.cuda with a GPU whose n-th synchronize does `deeds[n]`. Returns the devices that are waited for."""
    devices: list[int] = []

    def synchronize(device: int) -> None:
        devices.append(device)
        deeds[len(devices) - 1]()

    cuda = SimpleNamespace(synchronize=synchronize, is_initialized=lambda: True, current_device=lambda: 3)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return devices


def nothing() -> None: ...


def refuse() -> None:
    raise RuntimeError("device-side assert triggered")


def test_the_gpu_is_waited_for_twice(monkeypatch) -> None:
    devices = fake_cuda(monkeypatch, nothing, nothing)
    assert health_check.CudaHealthCheck()(STATE) is STATE
    assert devices == [3, 3]


@pytest.mark.parametrize(
    ("deeds", "kind", "why"),
    [
        ([refuse], exception.HealthCheckError, "device-side assert"),
        ([nothing, refuse], exception.HealthCheckError, "device-side assert"),
        ([nothing, threading.Event().wait], exception.TimeoutError, r"within 0\.05 s"),
    ],
)
def test_a_corrupted_context_fails_and_a_gpu_that_does_not_finish(monkeypatch, deeds, kind, why) -> None:
    fake_cuda(monkeypatch, *deeds)
    with pytest.raises(kind, match=why) as raised:
        health_check.CudaHealthCheck(datetime.timedelta(seconds=60 if refuse in deeds else 0.05))(STATE)
    assert refuse not in deeds or isinstance(raised.value.__cause__, RuntimeError)


def failed(error: Exception | None) -> FrozenState:
    return State(rank=0, world_size=1, fn_exception=error).freeze()


def test_only_ones_own_faults_count() -> None:
    check = health_check.FaultCounter(max_rank_faults=2)
    for error in (None, ValueError(), None, ValueError(), None):
        assert check(failed(error)).fn_exception is error
    with pytest.raises(exception.FaultCounterExceeded, match="3 times, max_rank_faults=2"):
        check(failed(ValueError()))
    without_limit = health_check.FaultCounter()
    for _ in range(100):
        without_limit(failed(ValueError()))
    both = Compose(health_check.FaultCounter(0), health_check.CudaHealthCheck())
    assert isinstance(both, health_check.HealthCheck) and both(failed(None)).rank == 0
    with pytest.raises(exception.FaultCounterExceeded):
        both(failed(ValueError()))
