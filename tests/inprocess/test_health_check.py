"""Hardware that is not there never fails, hardware that is there does: on sysfs trees and an NVML of our own."""

from __future__ import annotations

import datetime
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
from plugin_harness import WITHOUT_TORCH

from nvrx_slurm.inprocess import exception
from nvrx_slurm.inprocess.plugins import health_check
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.state import FrozenState, State

STATE = State(rank=0, world_size=2).freeze()

# Makes the check in the first world, calls it in each; writes what happened, and what was logged, as JSON.
CHILD = (
    WITHOUT_TORCH
    + """
import json, logging, os, sys
from pathlib import Path
from nvrx_slurm.inprocess.plugins import health_check
from nvrx_slurm.inprocess.state import State
from nvrx_slurm.system import gpus

name, arguments, worlds, timeout_s = json.loads(sys.argv[1])
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")
logging.getLogger("nvrx_slurm.inprocess").addHandler(handler)
logging.getLogger("nvrx_slurm.inprocess").setLevel(logging.INFO)
if timeout_s:
    gpus.recovery_actions.__defaults__ = (None, timeout_s, gpus.quiet)
file = Path(os.environ["NVML_STANDIN"])
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
print(json.dumps([said, lines]))
"""
)


@pytest.fixture
def worlds(nvml_standin: Path, tmp_path: Path):
    """Make a check in the first of these worlds and call it in each: (what it raised, or "", each time; log lines)."""

    def run(name: str, *texts: str, env: dict[str, str] | None = None, timeout_s: float = 0, **arguments):
        inherited = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
        done = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps([name, arguments, texts, timeout_s])],
            env={
                **inherited,
                "LD_LIBRARY_PATH": str(nvml_standin),
                "NVML_STANDIN": str(tmp_path / "world"),
                **(env or {}),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return tuple(json.loads(done.stdout))

    return run


# --- GPUs -----------------------------------------------------------------------------------------------------------


def test_a_gpu_that_needs_a_recovery_action_fails(worlds) -> None:
    said, lines = worlds("ChainedGPUHealthCheck", "", "action.1 1", "action.0 2\naction.1 4", "action.1 99", "")
    assert said == [
        "",
        "HealthCheckError: GPU check: GPU 1 (GPU-1000) needs recovery action GPU_RESET",
        "HealthCheckError: GPU check: GPU 0 (GPU-0000) needs recovery action NODE_REBOOT; "
        "GPU 1 (GPU-1000) needs recovery action DRAIN_AND_RESET",
        "HealthCheckError: GPU check: GPU 1 (GPU-1000) needs recovery action UNKNOWN(99)",
        "",
    ]
    assert lines == []


def test_a_gpu_that_is_lost_or_gone_or_silent_fails_with_a_sentence(worlds) -> None:
    said, _ = worlds(
        "ChainedGPUHealthCheck",
        "",
        "nvmlDeviceGetHandleByIndex.1 15",
        "result230 999",
        "count 1",
        "nvmlInit 9",
        "nvmlInit 999",
        "nvmlDeviceGetCount 999",
    )
    assert said == [
        "",
        "HealthCheckError: GPU check: GPU 1: GPU is lost",
        "HealthCheckError: GPU check: GPU 0: Unknown Error",
        "HealthCheckError: GPU check: GPU 1 (GPU-1000) is gone",
        "HealthCheckError: GPU check: was there before, now no NVML here (Driver Not Loaded)",
        "HealthCheckError: GPU check: NVML cannot be opened: Unknown Error",
        "HealthCheckError: GPU check: NVML: Unknown Error",
    ]


def test_a_driver_that_does_not_answer_is_a_failure_within_its_bound(worlds) -> None:
    said, lines = worlds("ChainedGPUHealthCheck", "", "nvmlInit hang", timeout_s=0.3)
    assert said == ["", "HealthCheckError: GPU check: NVML did not answer within 0.3 s"]
    assert lines == []


@pytest.mark.parametrize(
    ("world", "why"),
    [
        ("nvmlInit 9", "no NVML here (Driver Not Loaded)"),
        ("nvmlInit 18", "no NVML here (RM has detected an NVML/RM version mismatch.)"),
        ("count 0", "this process sees 0 GPUs"),
        ("result230 3", "no GPU of this process tells its recovery action"),
        ("nvmlDeviceGetFieldValues 2", "no GPU of this process tells its recovery action"),
    ],
)
def test_what_never_was_there_is_not_applicable_and_said_once(worlds, world: str, why: str) -> None:
    said, lines = worlds("ChainedGPUHealthCheck", world, world, world)
    assert said == ["", "", ""]
    assert len(lines) == 1 and lines[0].startswith("INFO GPU check: not applicable: ")
    if "nvmlInit" not in world:
        assert lines[0].endswith(why)


def test_one_index_means_cudas_number(worlds) -> None:
    """action.3 is GPU 3's: seen by number, by UUID, as the only one shown; not by the others."""
    sick = "count 4\naction.3 1"
    blamed = "HealthCheckError: GPU check: GPU 3 (GPU-3000) needs recovery action GPU_RESET"
    for visible, index, expected in (
        (None, 3, blamed),
        (None, 2, ""),
        (None, 7, ""),
        ("3,2", 0, blamed),
        ("3,2", 1, ""),
        ("3", 3, blamed),
        ("GPU-2,GPU-3", 1, blamed),
        ("0,-1,3", None, ""),
        ("0,1,2", None, ""),
        ("MIG-3000", 0, ""),
    ):
        env = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        said, _ = worlds("ChainedGPUHealthCheck", "count 4", sick, env=env, device_index=index)
        assert said[1] == expected, (visible, index)


def test_nvlinks_that_went_down_fail(worlds) -> None:
    said, lines = worlds(
        "ChainedNVLHealthCheck",
        "",
        "link.1.0 0",
        "link.0.0 0\nlink.0.1 0",
        "link.1.1 -1",
        "nvmlDeviceGetNvLinkState 15",
        "",
    )
    assert said == [
        "",
        "HealthCheckError: NVLink check: GPU 1 (GPU-1000) has NVLink 0 down",
        "HealthCheckError: NVLink check: GPU 0 (GPU-0000) has NVLink 0, 1 down",
        "HealthCheckError: NVLink check: GPU 1 (GPU-1000) has NVLink 1 down",
        "HealthCheckError: NVLink check: GPU 0: GPU is lost",
        "",
    ]
    assert lines == []


def test_a_link_down_from_the_start_fails_beside_one_that_is_up(worlds) -> None:
    said, _ = worlds("ChainedNVLHealthCheck", "link.0.1 0")
    assert said == ["HealthCheckError: NVLink check: GPU 0 (GPU-0000) has NVLink 1 down"]


def test_gpus_without_nvlink_or_without_a_bridge_are_not_at_fault(worlds) -> None:
    unused = "links 0\nlink.0.0 0\nlink.0.1 0"
    assert worlds("ChainedNVLHealthCheck", unused, unused) == (["", ""], [])
    said, lines = worlds("ChainedNVLHealthCheck", "links 0", "links 0")
    assert said == ["", ""]
    assert lines == ["INFO NVLink check: not applicable: no GPU of this process tells its NVLink"]


def test_without_nvml_library_or_binding_nothing_fails(tmp_path: Path) -> None:
    """As on a CPU node; also where nvidia-ml-py is not installed. LOCAL_RANK changes nothing."""
    code = (
        "import logging\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')\n"
        "if sys.argv[1] == 'unbound': sys.modules['pynvml'] = None\n"
        "else:\n"
        "    import pynvml\n"
        "    pynvml.CDLL = lambda name: (_ for _ in ()).throw(OSError(name))\n"
        "from nvrx_slurm.inprocess import health_check as h\n"
        "from nvrx_slurm.inprocess.state import State\n"
        "state = State(0, 1).freeze()\n"
        "for index in (None, 0):\n"
        "    for kind in (h.ChainedGPUHealthCheck, h.ChainedNVLHealthCheck, h.ChainedNicHealthCheck):\n"
        "        check = kind(device_index=index)\n"
        "        assert check(state) is state and check(state) is state\n"
        "assert h.CudaHealthCheck()(state) is state\n"
        "assert 'torch' not in sys.modules\n"
    )
    for mode in ("unbound", "absent"):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_TORCH + code, mode],
            env={**os.environ, "LOCAL_RANK": "0", "NVRX_SYSROOT": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert len(lines) == 4 and all("not applicable" in line for line in lines), lines


# --- NICs -----------------------------------------------------------------------------------------------------------


class Sysfs:
    """A sysfs with PCI devices and InfiniBand ports, as the kernel lays it out."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def device(self, way: str, numa_node: int = -1) -> Path:
        """Directory of the PCI device at that way, as in "pci0000:00/0000:00:01.0"; has its link in bus/pci."""
        directory = self.root / "devices" / way
        directory.mkdir(parents=True)
        (directory / "numa_node").write_text(f"{numa_node}\n")
        link = self.root / "bus/pci/devices" / directory.name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(directory)
        return directory

    def nic(self, name: str, way: str, numa_node: int = -1) -> None:
        """A NIC with one active port there."""
        directory = self.device(way, numa_node) / "infiniband" / name
        (directory / "ports/1/counters").mkdir(parents=True)
        (directory / "device").symlink_to("../..")
        link = self.root / "class/infiniband" / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(directory)
        self.port(name, "4: ACTIVE", 5)

    def port(self, name: str, state: str, link_downed: int | None) -> None:
        port = self.root / "class/infiniband" / name / "ports/1"
        (port / "state").write_text(f"{state}\n")
        counter = port / "counters/link_downed"
        counter.unlink(missing_ok=True)
        if link_downed is not None:
            counter.write_text(f"{link_downed}\n")


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "sys")


def test_a_port_that_went_down_fails_also_if_it_is_back(sysfs: Sysfs, monkeypatch) -> None:
    sysfs.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:01:00.0")
    sysfs.nic("mlx5_1", "pci0000:80/0000:80:01.0/0000:81:00.0")
    monkeypatch.setenv("NVRX_SYSROOT", str(sysfs.root.parent))
    check = health_check.ChainedNicHealthCheck()
    assert check(STATE) is STATE
    sysfs.port("mlx5_1", "1: DOWN", 6)
    for _ in range(2):
        with pytest.raises(exception.HealthCheckError, match="NIC port mlx5_1/1 was ACTIVE and is DOWN"):
            check(STATE)
    sysfs.port("mlx5_1", "4: ACTIVE", 7)
    with pytest.raises(exception.HealthCheckError, match="the link of NIC port mlx5_1/1 went down 2 times"):
        check(STATE)
    assert check(STATE) is STATE  # told once
    sysfs.port("mlx5_1", "4: ACTIVE", 0)  # somebody reset the counters
    assert check(STATE) is STATE
    shutil.rmtree(sysfs.root / "class")
    with pytest.raises(exception.HealthCheckError, match="was there before, now no InfiniBand"):
        check(STATE)


def test_ports_never_in_use_and_counters_never_kept_do_not_fail(sysfs: Sysfs) -> None:
    sysfs.nic("mlx5_0", "pci0000:00/0000:00:01.0")
    sysfs.nic("mlx5_1", "pci0000:00/0000:00:02.0")
    sysfs.port("mlx5_0", "1: DOWN", 5)
    sysfs.port("mlx5_1", "4: ACTIVE", None)
    check = health_check.ChainedNicHealthCheck(sysfs_root=sysfs.root)
    sysfs.port("mlx5_0", "2: INIT", 9)
    assert check(STATE) is STATE
    sysfs.port("mlx5_1", "1: DOWN", None)
    with pytest.raises(exception.HealthCheckError, match="mlx5_1/1 was ACTIVE and is DOWN$"):
        check(STATE)


def test_a_nic_that_is_gone_or_unreadable_fails(sysfs: Sysfs) -> None:
    sysfs.nic("mlx5_0", "pci0000:00/0000:00:01.0")
    sysfs.nic("mlx5_1", "pci0000:00/0000:00:02.0")
    check = health_check.ChainedNicHealthCheck(sysfs_root=sysfs.root)
    state = sysfs.root / "class/infiniband/mlx5_0/ports/1/state"
    state.unlink()
    with pytest.raises(exception.HealthCheckError, match="NIC mlx5_0 port 1: its state cannot be read"):
        check(STATE)
    (sysfs.root / "class/infiniband/mlx5_0").unlink()
    with pytest.raises(exception.HealthCheckError, match="mlx5_0/1 is gone"):
        check(STATE)


NEARNESS = (
    ("0000:05:00.0", {"mlx5_0"}),  # the same switch
    ("0000:08:00.0", {"mlx5_0", "mlx5_1"}),  # the same host bridge
    ("0000:91:00.0", {"mlx5_2"}),  # the same NUMA node, as on GB200
    ("0000:95:00.0", None),  # nothing
    ("0000:77:00.0", None),  # no such device
)


@pytest.mark.parametrize(("address", "near"), NEARNESS)
def test_a_gpu_has_its_nearest_nics(sysfs: Sysfs, monkeypatch, address: str, near: set[str] | None) -> None:
    sysfs.device("pci0000:00/0000:00:01.0/0000:05:00.0", 0)
    sysfs.device("pci0000:00/0000:00:03.0/0000:08:00.0", 0)
    sysfs.device("pci0000:90/0000:91:00.0", 1)
    sysfs.device("pci0000:94/0000:95:00.0", -1)
    sysfs.nic("mlx5_0", "pci0000:00/0000:00:01.0/0000:06:00.0", 0)
    sysfs.nic("mlx5_1", "pci0000:00/0000:00:02.0/0000:07:00.0", 0)
    sysfs.nic("mlx5_2", "pci0000:a0/0000:a1:00.0", 1)
    sysfs.nic("mlx5_3", "pci0000:b0/0000:b1:00.0", -1)
    asked = iter([{"GPU 6": address}] if near else repeat({"GPU 6": address}))  # once: a lost GPU has no address
    monkeypatch.setattr(health_check.gpus, "pci_addresses", lambda env, index: next(asked))
    check = health_check.ChainedNicHealthCheck(device_index=6, sysfs_root=sysfs.root)
    blamed = set()
    for name in ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"):
        sysfs.port(name, "1: DOWN", 6)
        try:
            check(STATE)
        except exception.HealthCheckError as error:
            assert f"{name}/1 was ACTIVE" in str(error)
            blamed.add(name)
        sysfs.port(name, "4: ACTIVE", 5)
    assert blamed == (near or set())


def test_a_gpus_place_comes_from_nvml(sysfs: Sysfs, worlds) -> None:
    sysfs.device("pci0000:00/0000:05:00.0")
    sysfs.nic("mlx5_0", "pci0000:00/0000:06:00.0")
    world = f"bus.0 {0x05}\nbus.1 {0x77}"
    arguments = {"sysfs_root": str(sysfs.root)}
    assert worlds("ChainedNicHealthCheck", world, "nvmlInit 15", device_index=0, **arguments) == (["", ""], [])
    said, lines = worlds("ChainedNicHealthCheck", world, device_index=1, **arguments)
    assert said == [""]
    assert lines == [f"INFO NIC check: not applicable: no PCI device 0000:77:00.0 below {sysfs.root}"]


# --- CUDA and faults ------------------------------------------------------------------------------------------------


class FakeCuda(SimpleNamespace):
    """torch.cuda with a GPU whose n-th synchronize does `deeds[n]`."""

    def __init__(self, *deeds) -> None:
        super().__init__(deeds=list(deeds), devices=[])

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 3

    def synchronize(self, device: int) -> None:
        self.devices.append(device)
        self.deeds.pop(0)()


def refuse() -> None:
    raise RuntimeError("device-side assert triggered")


def test_the_gpu_is_waited_for_twice(monkeypatch) -> None:
    cuda = FakeCuda(lambda: None, lambda: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert health_check.CudaHealthCheck()(STATE) is STATE
    assert cuda.devices == [3, 3]


@pytest.mark.parametrize("deeds", [[refuse], [lambda: None, refuse]])
def test_a_corrupted_context_fails(monkeypatch, deeds) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=FakeCuda(*deeds)))
    with pytest.raises(exception.HealthCheckError, match="CUDA: device-side assert triggered") as raised:
        health_check.CudaHealthCheck()(STATE)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_gpu_that_does_not_finish_is_a_timeout(monkeypatch) -> None:
    over = threading.Event()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=FakeCuda(lambda: None, over.wait)))
    with pytest.raises(exception.TimeoutError, match=r"within 0\.05 s"):
        health_check.CudaHealthCheck(datetime.timedelta(seconds=0.05))(STATE)
    over.set()
    with pytest.raises(ValueError, match="longer than 0 s"):
        health_check.CudaHealthCheck(datetime.timedelta(0))


def test_a_torch_without_cuda_is_not_applicable(monkeypatch, caplog) -> None:
    monkeypatch.setattr(health_check, "_said", set())
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)))
    with caplog.at_level(logging.INFO, "nvrx_slurm.inprocess"):
        for _ in range(3):
            assert health_check.CudaHealthCheck()(STATE) is STATE
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA check: not applicable: this process does not use CUDA"
    ]


def failed(error: Exception | None) -> FrozenState:
    return State(rank=0, world_size=1, fn_exception=error).freeze()


def test_only_ones_own_faults_count() -> None:
    check = health_check.FaultCounter(max_rank_faults=2)
    for error in (None, ValueError(), None, ValueError(), None):
        assert check(failed(error)).fn_exception is error
    with pytest.raises(exception.FaultCounterExceeded, match="failed 3 times, max_rank_faults=2"):
        check(failed(ValueError()))
    without_limit = health_check.FaultCounter()
    for _ in range(100):
        without_limit(failed(ValueError()))
    with pytest.raises(ValueError, match="at least 0, not -1"):
        health_check.FaultCounter(-1)


def test_checks_compose() -> None:
    both = Compose(health_check.FaultCounter(0), health_check.CudaHealthCheck())
    assert isinstance(both, health_check.HealthCheck)
    assert both(failed(None)).rank == 0
    with pytest.raises(exception.FaultCounterExceeded):
        both(failed(ValueError()))
