"""--numa-bind auto: the NUMA node of each worker's GPU, on the CPUs that are ours; on a recorded node and for real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import standin

from nvrx_slurm.system import gpus, numa
from nvrx_slurm.system.hardware import Absent, HardwareError

ALL = numa.Allowed(frozenset(range(64)), None)
GPUS = {f"GPU {i} (GPU-{i})": f"0000:{0x10 + i:02x}:00.0" for i in range(4)}


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """4 GPUs: two on each of two NUMA nodes with 8 CPUs and 8 threads of them."""
    for index, address in enumerate(GPUS.values()):
        device = tmp_path / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{index // 2}\n")
    for node in range(2):
        directory = tmp_path / f"devices/system/node/node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{node * 8}-{node * 8 + 7},{32 + node * 8}-{39 + node * 8}\n")
    monkeypatch.setattr(gpus, "pci_addresses", lambda env: GPUS)
    return tmp_path


def test_each_worker_goes_to_the_node_of_its_gpu(sysfs: Path) -> None:
    places = numa.by_gpu(4, {}, True, sysfs, ALL)
    assert [place.prefix for place in places] == [
        *[("numactl", "--cpunodebind=0", "--membind=0")] * 2,
        *[("numactl", "--cpunodebind=1", "--membind=1")] * 2,
    ]
    assert places[3].text == "NUMA node 1 of GPU 0000:13:00.0, all of its CPUs"
    assert numa.by_gpu(1, {}, False, sysfs, ALL)[0].prefix == ("numactl", "--cpunodebind=0", "--localalloc")


def test_slurms_cpus_and_memory_are_all_that_is_used(sysfs: Path) -> None:
    ours = numa.Allowed(frozenset({0, 1, 2, 5, 34, 99}), frozenset({0}))
    places = numa.by_gpu(4, {}, True, sysfs, ours)
    assert places[0] == (("numactl", "--physcpubind=0,1,2,5,34", "--membind=0"), places[0].text)
    assert places[0].text.endswith("5 of 16 of its CPUs")
    assert places[2] == ((), "not bound: none of the CPUs of NUMA node 1 (GPU 0000:12:00.0) is allowed")
    elsewhere = numa.Allowed(ALL.cpus, frozenset({1}))
    assert numa.by_gpu(1, {}, True, sysfs, elsewhere)[0].prefix == ("numactl", "--cpunodebind=0", "--localalloc")


@pytest.mark.parametrize("word", ["-1\n", "", "zero", "\xff", None])
def test_a_gpu_without_a_numa_node_is_not_bound(sysfs: Path, word: str | None) -> None:
    file = sysfs / "bus/pci/devices/0000:11:00.0/numa_node"
    file.unlink()
    if word is not None:
        file.write_text(word)
    places = numa.by_gpu(2, {}, True, sysfs, ALL)
    assert places[1] == ((), "not bound: the NUMA node of GPU 0000:11:00.0 is not known")
    assert places[0].prefix


@pytest.mark.parametrize("error", [Absent("no NVML here"), HardwareError("NVML did not answer within 10 s")])
def test_without_gpus_or_with_a_sick_driver_nobody_is_bound(monkeypatch, error: Exception) -> None:
    def fail(env):
        raise error

    monkeypatch.setattr(gpus, "pci_addresses", fail)
    assert numa.by_gpu(2, {}, True, Path("/nowhere"), ALL) == (((), f"not bound: {error}"),) * 2


@pytest.fixture
def node(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """A recorded node below tmp_path/root with one GPU on NUMA node 0 and one on node 1: (its root, environment)."""
    stand_in = standin.StandIn(standin.built(tmp_path), tmp_path / "nvml")
    root = tmp_path / "root"
    for bus, numa_node, cpulist in ((0, 0, f"{min(os.sched_getaffinity(0))},900"), (1, 1, "901-902")):
        for file, text in (
            (f"bus/pci/devices/0000:0{bus}:00.0/numa_node", str(numa_node)),
            (f"devices/system/node/node{numa_node}/cpulist", cpulist),
        ):
            (root / "sys" / file).parent.mkdir(parents=True, exist_ok=True)
            (root / "sys" / file).write_text(f"{text}\n")
    return root, {**os.environ, **stand_in.env}


def run(node: tuple[Path, dict[str, str]], *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    root, environ = node
    script = root / "show.py"
    script.write_text("import os; print('rank', os.environ['RANK'], os.sched_getaffinity(0))\n")
    argv = [sys.executable, "-m", "nvrx_slurm.cli.run", "--standalone", "--nproc-per-node=2", "--numa-bind=auto"]
    argv += ["--sysroot", str(root), *flags, str(script)]
    return subprocess.run(argv, cwd=root, env=environ | env, capture_output=True, text=True, timeout=60, check=False)


def test_dry_run_shows_where_and_why_not(node: tuple[Path, dict[str, str]]) -> None:
    done = run(node, "--dry-run")
    assert done.returncode == 0, done.stderr
    cpu = min(os.sched_getaffinity(0))
    assert f"local rank 0: numactl --physcpubind={cpu} --" in done.stdout
    assert "(NUMA node 0 of GPU 0000:00:00.0, 1 of 2 of its CPUs)" in done.stdout
    assert "local rank 1: -  (not bound: none of the CPUs of NUMA node 1 (GPU 0000:01:00.0) is allowed)" in done.stdout
    hidden = run(node, "--dry-run", CUDA_VISIBLE_DEVICES="1")
    assert "local rank 0: -  (not bound: none of the CPUs of NUMA node 1" in hidden.stdout
    assert "local rank 1: -  (not bound: there are 1 GPUs for 2 workers)" in hidden.stdout


@pytest.mark.skipif(shutil.which("numactl") is None, reason="numactl is not installed")
def test_real_workers_run_where_dry_run_said(node: tuple[Path, dict[str, str]]) -> None:
    done = run(node)
    assert done.returncode == 0, done.stderr
    everywhere = os.sched_getaffinity(0)
    assert f"rank 0 {{{min(everywhere)}}}" in done.stdout
    assert f"rank 1 {everywhere}" in done.stdout
    assert "--numa-bind auto: local ranks 1 are not bound" in done.stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("NVRX_GPUS_PER_NUMA", "1", "exclude each other"), ("PATH", "/nowhere", "needs the numactl command")],
)
def test_what_cannot_be_is_one_sentence(node: tuple[Path, dict[str, str]], name: str, value: str, said: str) -> None:
    done = run(node, **{name: value})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and said in done.stderr
