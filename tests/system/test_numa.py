"""NUMA binding by number and by each worker's GPU: on recorded nodes, and of real workers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import standin

from nvrx_slurm.errors import UsageError
from nvrx_slurm.system import gpus, numa
from nvrx_slurm.system.hardware import Absent, HardwareError

pytestmark = pytest.mark.process


ALL = numa.Allowed(frozenset(range(64)), None)
GPUS = {f"GPU {i} (GPU-{i})": f"0000:{0x10 + i:02x}:00.0" for i in range(4)}
NEEDS_NUMACTL = pytest.mark.skipif(shutil.which("numactl") is None, reason="numactl is not installed")


def put(root, file, text):
    (root / file).parent.mkdir(parents=True, exist_ok=True)
    (root / file).write_text(text)


@pytest.fixture
def run(tmp_path):
    """nvrx-run with two workers that show their binding; with flags and variables."""

    def done(*flags, **env):
        script = tmp_path / "show.py"
        script.write_text(
            "import os, subprocess; print('rank', os.environ['RANK'], os.sched_getaffinity(0))\n"
            "subprocess.run(['numactl', '--show'])\n"
        )
        argv = [sys.executable, "-m", "nvrx_slurm.cli.run", "--standalone", "--nproc-per-node=2", *flags, str(script)]
        return subprocess.run(argv, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, timeout=60)

    return done


def test_ranks_go_to_node_i_divided_by_gpus_per_numa(tmp_path):
    online = tmp_path / "online"
    online.write_text("0-1\n")
    made = numa.prefixes(8, 4, strict=True, online=online)
    assert made[:4] == (("numactl", "--cpunodebind=0", "--membind=0"),) * 4
    assert made[4:] == (("numactl", "--cpunodebind=1", "--membind=1"),) * 4
    assert numa.prefixes(6, 4, strict=False, online=online)[5] == ("numactl", "--cpunodebind=1", "--localalloc")
    online.write_text("0,2-3\n")
    with pytest.raises(UsageError, match=r"puts local rank 3 on NUMA node 1, but this machine has nodes 0,2,3"):
        numa.prefixes(4, 2, strict=True, online=online)
    online.write_text("zero\n")
    assert len(numa.prefixes(4, 2, strict=True, online=online)) == 4


@NEEDS_NUMACTL
def test_real_workers_are_bound(run):
    done = run(NVRX_GPUS_PER_NUMA="2")
    assert done.returncode == 0 and done.stdout.count("policy: bind") == 2, done.stderr
    relaxed = run("--ft-numa-bind-strict=false", NVRX_GPUS_PER_NUMA="2")
    assert relaxed.returncode == 0 and "policy: bind" not in relaxed.stdout, relaxed.stderr


def test_numactl_that_fails_is_one_sentence_before_anything_starts(run, tmp_path):
    put(tmp_path, "bin/numactl", "#!/bin/sh\necho 'set_mempolicy: Operation not permitted' >&2; exit 1\n")
    (tmp_path / "bin/numactl").chmod(0o755)
    done = run("--max-restarts=3", NVRX_GPUS_PER_NUMA="2", PATH=f"{tmp_path}/bin:{os.environ['PATH']}")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "numactl --cpunodebind=0 --membind=0 fails on this node (set_mempolicy: Operation" in done.stderr
    assert not (tmp_path / "nvrx_logs").exists()


@pytest.fixture
def sysfs(tmp_path, monkeypatch):
    """4 GPUs: two on each of two NUMA nodes with 8 CPUs and 8 threads of them."""
    for index, address in enumerate(GPUS.values()):
        put(tmp_path, f"bus/pci/devices/{address}/numa_node", f"{index // 2}\n")
    for node in range(2):
        cpus = f"{node * 8}-{node * 8 + 7},{32 + node * 8}-{39 + node * 8}\n"
        put(tmp_path, f"devices/system/node/node{node}/cpulist", cpus)
    monkeypatch.setattr(gpus, "pci_addresses", lambda env: GPUS)
    return tmp_path


def test_each_worker_goes_to_the_node_of_its_gpu(sysfs):
    places = numa.by_gpu(4, {}, True, sysfs, ALL)
    assert [place.prefix for place in places] == [
        *[("numactl", "--cpunodebind=0", "--membind=0")] * 2,
        *[("numactl", "--cpunodebind=1", "--membind=1")] * 2,
    ]
    assert places[3].text == "NUMA node 1 of GPU 0000:13:00.0, all of its CPUs"
    assert numa.by_gpu(1, {}, False, sysfs, ALL)[0].prefix == ("numactl", "--cpunodebind=0", "--localalloc")


def test_slurms_cpus_and_memory_are_all_that_is_used(sysfs):
    ours = numa.Allowed(frozenset({0, 1, 2, 5, 34, 99}), frozenset({0}))
    places = numa.by_gpu(4, {}, True, sysfs, ours)
    assert places[0] == (("numactl", "--physcpubind=0,1,2,5,34", "--membind=0"), places[0].text)
    assert places[0].text.endswith("5 of 16 of its CPUs")
    assert places[2] == ((), "not bound: none of the CPUs of NUMA node 1 (GPU 0000:12:00.0) is allowed")
    elsewhere = numa.Allowed(ALL.cpus, frozenset({1}))
    assert numa.by_gpu(1, {}, True, sysfs, elsewhere)[0].prefix == ("numactl", "--cpunodebind=0", "--localalloc")


@pytest.mark.parametrize("word", ["-1\n", "zero"])
def test_a_gpu_without_a_numa_node_is_not_bound(sysfs, word):
    put(sysfs, "bus/pci/devices/0000:11:00.0/numa_node", word)
    places = numa.by_gpu(2, {}, True, sysfs, ALL)
    assert places[1] == ((), "not bound: the NUMA node of GPU 0000:11:00.0 is not known")
    assert places[0].prefix


@pytest.mark.parametrize("error", [Absent("no NVML here"), HardwareError("NVML did not answer within 10 s")])
def test_without_gpus_or_with_a_sick_driver_nobody_is_bound(monkeypatch, error):
    def fail(env):
        raise error

    monkeypatch.setattr(gpus, "pci_addresses", fail)
    assert numa.by_gpu(2, {}, True, Path("/nowhere"), ALL) == (((), f"not bound: {error}"),) * 2


@pytest.fixture
def node(tmp_path, run):
    """`run` on a recorded node with one GPU on NUMA node 0, which has a CPU of ours, and one on node 1."""
    stand_in = standin.StandIn(standin.built(tmp_path), tmp_path / "nvml")
    for number, cpulist in enumerate((f"{min(os.sched_getaffinity(0))},900", "901-902")):
        put(tmp_path, f"root/sys/bus/pci/devices/0000:0{number}:00.0/numa_node", f"{number}\n")
        put(tmp_path, f"root/sys/devices/system/node/node{number}/cpulist", f"{cpulist}\n")
    flags = ("--numa-bind=auto", "--sysroot", str(tmp_path / "root"))
    return lambda *more, **env: run(*flags, *more, **stand_in.env | env)


def test_dry_run_shows_where_and_why_not(node):
    done = node("--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"local rank 0: numactl --physcpubind={min(os.sched_getaffinity(0))} --" in done.stdout
    assert "(NUMA node 0 of GPU 0000:00:00.0, 1 of 2 of its CPUs)" in done.stdout
    assert "local rank 1: -  (not bound: none of the CPUs of NUMA node 1 (GPU 0000:01:00.0) is allowed)" in done.stdout
    hidden = node("--dry-run", CUDA_VISIBLE_DEVICES="1")
    assert "local rank 0: -  (not bound: none of the CPUs of NUMA node 1" in hidden.stdout
    assert "local rank 1: -  (not bound: there are 1 GPUs for 2 workers)" in hidden.stdout


@NEEDS_NUMACTL
def test_real_workers_run_where_dry_run_said(node):
    done = node()
    assert done.returncode == 0, done.stderr
    everywhere = os.sched_getaffinity(0)
    assert f"rank 0 {{{min(everywhere)}}}" in done.stdout
    assert f"rank 1 {everywhere}" in done.stdout
    assert "--numa-bind auto: local ranks 1 are not bound" in done.stderr


@pytest.mark.parametrize(
    "name, value, said",
    [("NVRX_GPUS_PER_NUMA", "1", "exclude each other"), ("PATH", "/nowhere", "needs the numactl command")],
)
def test_what_cannot_be_is_one_sentence(node, name, value, said):
    done = node(**{name: value})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and said in done.stderr
