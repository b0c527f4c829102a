"""Missing hardware never fails, failing hardware does: recorded sysfs trees and a double of NVML."""

import datetime
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import dgx
import pytest
from ranks_harness import WITHOUT_TORCH

from nvrx_slurm.inprocess import exception
from nvrx_slurm.inprocess.plugins import health_check
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.state import State
from nvrx_slurm.system.hardware import Absent, HardwareError

pytestmark = pytest.mark.process


STATE = State(rank=0, world_size=2).freeze()


@pytest.fixture
def told(monkeypatch):
    """What the driver tells when it is asked next: the last one again and again."""
    facts = []

    def read(env, index):
        one = facts.pop(0) if len(facts) > 1 else facts[0]
        if isinstance(one, Exception):
            raise one
        return one

    for name in ("recovery_actions", "nvlinks"):
        monkeypatch.setattr(health_check.gpus, name, read)
    return facts


UP, HALF, DOWN = {0: True, 1: True}, {0: True, 1: False}, {0: False, 1: False}
GPU_ROWS = [
    ({"GPU 0": "NONE", "GPU 1": "NONE"}, ""),
    ({"GPU 0": "NONE", "GPU 1": "GPU_RESET"}, "GPU check: GPU 1 needs recovery action GPU_RESET"),
    ({"GPU 0": "NODE_REBOOT", "GPU 1": "DRAIN_AND_RESET"}, "NODE_REBOOT; GPU 1 needs recovery action DRAIN_AND_RESET"),
    ({"GPU 0": "NONE"}, "GPU check: GPU 1 is gone"),
    (Absent("no NVML"), "was there before, now no NVML"),
    (HardwareError("cannot be opened"), "GPU check: cannot be opened"),
    ({"GPU 0": "NONE", "GPU 1": "NONE"}, ""),
]
LINK_ROWS = [
    ({"GPU 0": UP, "GPU 1": UP}, ""),
    ({"GPU 0": UP, "GPU 1": HALF}, "NVLink check: GPU 1 has NVLink 1 down"),
    ({"GPU 0": DOWN, "GPU 1": UP}, "GPU 0 has NVLink 0, 1 down"),
    ({"GPU 0": UP, "GPU 1": {0: True}}, "GPU 1 has NVLink 1 down"),
]
FROM_THE_START = [({"GPU 0": HALF}, "GPU 0 has NVLink 1 down")]  # beside one that is up
NO_BRIDGE = [({"GPU 0": DOWN}, "")] * 2


@pytest.mark.parametrize(
    "kind, rows",
    [
        (health_check.ChainedGPUHealthCheck, GPU_ROWS),
        (health_check.ChainedNVLHealthCheck, LINK_ROWS),
        (health_check.ChainedNVLHealthCheck, FROM_THE_START),
        (health_check.ChainedNVLHealthCheck, NO_BRIDGE),
    ],
)
def test_gpus_and_links_that_fail(told, kind, rows):
    told += [rows[0][0], *(facts for facts, _ in rows)]
    check = kind()
    for _, token in rows:
        why = unfit(check)
        assert token in why and bool(why) is bool(token), (token, why)


@pytest.mark.parametrize("first", [Absent("no GPU of this process tells it"), HardwareError("it hangs")])
def test_a_first_reading_that_fails_is_said_once(told, caplog, first):
    """Hardware that is not there is no news; a failure is. Both are compared with the first reading that succeeds."""
    caplog.set_level(logging.DEBUG, "nvrx_slurm.inprocess")
    told += [first, *[first] * isinstance(first, Absent), {"GPU 0": "NONE"}, {}]
    check = health_check.ChainedGPUHealthCheck()
    (line,) = caplog.records
    assert str(first) in line.getMessage() and (line.levelno == logging.DEBUG) is isinstance(first, Absent)
    while len(told) > 1:
        assert unfit(check) == ""
    assert "GPU 0 is gone" in unfit(check) and len(caplog.records) == 1


BY_INDEX = """
import json, os, sys
from nvrx_slurm.inprocess.plugins.health_check import ChainedGPUHealthCheck
from nvrx_slurm.inprocess.state import State
for visible, index in json.loads(sys.argv[1]):
    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    try:
        ChainedGPUHealthCheck(index)(State(0, 1).freeze())
        print("fit")
    except Exception as error:
        print(error)
"""


def test_one_index_means_cudas_number(nvml_standin, tmp_path):
    """GPU 3 is sick: shown by number, by UUID, alone; not to the others."""
    (tmp_path / "world").write_text("count 4\naction.3 1")
    cases = {("3,2", 0): True, ("3,2", 1): False, ("3", 3): True, ("GPU-2,GPU-3", 1): True, ("0,-1,3", None): False}
    env = {**os.environ, "LD_LIBRARY_PATH": str(nvml_standin), "NVML_STANDIN": str(tmp_path / "world")}
    argv = [sys.executable, "-c", WITHOUT_TORCH + BY_INDEX, json.dumps(list(cases))]
    said = subprocess.check_output(argv, env=env, text=True, timeout=60).splitlines()
    assert ["GPU 3 (GPU-3000) needs" in line for line in said] == list(cases.values())
    assert said.count("fit") == 2


def test_without_the_nvml_library_nothing_fails(tmp_path):
    """As on a CPU node."""
    code = """
import logging
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(message)s")
sys.modules["pynvml"] = None
from nvrx_slurm.inprocess import health_check as h
from nvrx_slurm.inprocess.state import State
state = State(0, 1).freeze()
for index in (None, 0):
    for kind in (h.ChainedGPUHealthCheck, h.ChainedNVLHealthCheck, h.ChainedNicHealthCheck):
        assert kind(device_index=index)(state) is state
assert h.CudaHealthCheck()(state) is state
assert "torch" not in sys.modules
"""
    env = {**os.environ, "LOCAL_RANK": "0", "NVRX_SYSROOT": str(tmp_path)}
    argv = [sys.executable, "-c", WITHOUT_TORCH + code]
    out = subprocess.check_output(argv, env=env, text=True, timeout=60)
    assert len({line.partition(":")[0] for line in out.splitlines() if "not applicable" in line}) == 4, out


@pytest.fixture
def node(tmp_path):
    """Eight GPUs and eight NICs, whose links are up and never went down."""
    dgx.build(tmp_path / "node")
    return tmp_path / "node"


def port(node, nic, state, link_downed=0):
    for file, text in (("state", state), ("counters/link_downed", link_downed)):
        dgx.write(node, f"/sys/class/infiniband/{nic}/ports/1/{file}", f"{text}\n")


def unfit(check):
    """Why it fails, "" if it passes."""
    try:
        assert check(STATE) is STATE
    except exception.HealthCheckError as error:
        return str(error)
    return ""


def test_a_port_that_went_down_fails_also_if_it_is_back(node, monkeypatch):
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


def test_ports_never_in_use_counters_never_kept_and_lost_nics(node, monkeypatch):
    nics = node / "sys/class/infiniband"
    port(node, "mlx5_0", "1: DOWN", 5)
    (nics / "mlx5_1/ports/1/counters/link_downed").unlink()
    monkeypatch.setenv("NVRX_SYSROOT", str(node))
    check = health_check.ChainedNicHealthCheck()
    port(node, "mlx5_0", "2: INIT", 9)
    port(node, "mlx5_1", "4: ACTIVE", 9)
    assert unfit(check) == ""
    port(node, "mlx5_1", "1: DOWN")
    assert unfit(check).endswith("mlx5_1/1 was ACTIVE and is DOWN")
    (nics / "mlx5_0/ports/1/state").unlink()
    assert "NIC mlx5_0 port 1" in unfit(check)
    (nics / "mlx5_0").unlink()
    assert "mlx5_0/1 is gone" in unfit(check)


def test_a_gpu_has_its_nearest_nics(node, monkeypatch):
    """tests/health/test_nic.py has all degrees of nearness."""
    asked = iter([{"GPU 6": dgx.GPUS[6]}])  # once: a lost GPU has no address
    monkeypatch.setattr(health_check.gpus, "pci_addresses", lambda env, index: next(asked))
    monkeypatch.setenv("NVRX_SYSROOT", str(node))
    check = health_check.ChainedNicHealthCheck(device_index=6)
    port(node, "mlx5_1", "1: DOWN")
    assert unfit(check) == ""
    port(node, "mlx5_6", "1: DOWN")
    assert "mlx5_6/1 was ACTIVE" in unfit(check)


def fake_cuda(monkeypatch, *deeds):
    """torch.cuda with a GPU whose n-th synchronize does `deeds[n]`. Returns the devices that are waited for."""
    devices = []

    def synchronize(device):
        devices.append(device)
        deeds[len(devices) - 1]()

    cuda = SimpleNamespace(synchronize=synchronize, is_initialized=lambda: True, current_device=lambda: 3)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return devices


def nothing(): ...


def refuse():
    raise RuntimeError("device-side assert triggered")


def test_the_gpu_is_waited_for_twice(monkeypatch):
    devices = fake_cuda(monkeypatch, nothing, nothing)
    assert health_check.CudaHealthCheck()(STATE) is STATE
    assert devices == [3, 3]


@pytest.mark.parametrize(
    "deeds, kind, why",
    [
        ([refuse], exception.HealthCheckError, "device-side assert"),
        ([nothing, refuse], exception.HealthCheckError, "device-side assert"),
        ([nothing, threading.Event().wait], exception.TimeoutError, r"within 0\.05 s"),
    ],
)
def test_a_corrupted_context_fails_and_a_gpu_that_does_not_finish(monkeypatch, deeds, kind, why):
    fake_cuda(monkeypatch, *deeds)
    with pytest.raises(kind, match=why) as raised:
        health_check.CudaHealthCheck(datetime.timedelta(seconds=60 if refuse in deeds else 0.05))(STATE)
    assert refuse not in deeds or isinstance(raised.value.__cause__, RuntimeError)


def failed(error):
    return State(rank=0, world_size=1, fn_exception=error).freeze()


def test_only_ones_own_faults_count():
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
