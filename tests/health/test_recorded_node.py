"""Every check on a DGX-like node that is healthy, and on one with a single fact broken."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from recorded import CHECKS, EXPECTED, LUSTRE, F, N, P, U

from nvrx_slurm.config.layers import Config
from nvrx_slurm.health.check import CONTEXTS, NodeView, Verdict
from nvrx_slurm.health.checks import storage
from nvrx_slurm.health.runner import examine
from nvrx_slurm.node.preflight.head_start import preflight_spec

pytestmark = pytest.mark.process


GPU3, NIC5 = "/sys/bus/pci/devices/0000:61:00.0", "/sys/class/infiniband/mlx5_5/device"
MCS = "/sys/devices/system/edac/mc"
CPU = "/sys/devices/system/cpu"
MOUNTS = "/proc/self/mountinfo"
KMSG = "/dev/kmsg"
ONE_ROOT = "22 1 8:2 / / rw - ext4 /dev/sda1 rw\n"


def apply(node, change):
    """What is broken: by path the new text, (old, new) in it, or None: it is gone. Or a function of the node."""
    if callable(change):
        return change(node)
    for path, new in change.items():
        if new is None:
            node.remove(path)
        elif isinstance(new, tuple):
            node.edit(path, *new)
        else:
            node.write(path, new)
    return None


def xid(text):
    return lambda node: node.add(KMSG, f"4,3000,8211000001,-;{text}\n")


# check, what is broken, what is expected, verdict, part of the sentence
BROKEN = [
    ("lustre", {LUSTRE: "NOT HEALTHY\n"}, {}, F, "'NOT HEALTHY'"),
    ("lustre", {LUSTRE: None}, {}, N, "no Lustre client"),
    ("mounts", {MOUNTS: ("/home rw", "/hame rw")}, {"mounts": ("/home",)}, F, "not mounted: /home"),
    ("mounts", {MOUNTS: ("home rw,vers", "home ro,vers")}, {"writable_mounts": ("/home",)}, F, "read-only: /home"),
    ("mounts", {MOUNTS: ONE_ROOT}, {}, N, "no Lustre or NFS"),
    ("disk-space", {}, {}, N, "users can write"),  # all of this tree is on the file system of its /tmp
    ("disk-space", {"/tmp": None}, {"disk_free_percent": 100.0}, F, "/var has "),
    ("shm-space", {}, {"shm_size_gb": 1e9}, F, "GB instead of 1e+09 GB"),
    ("shm-space", {}, {"shm_free_gb": 1e9}, F, "GB free, at least 1e+09 are needed"),
    ("memory-size", {"/proc/meminfo": ("2113530296", "1981434653")}, {"memory_gb": 2142}, F, "2029 GB"),
    ("memory-errors", {f"{MCS}/mc2/ue_count": "3\n"}, {}, F, "3 on mc2"),
    ("memory-errors", {"/proc/interrupts": "MCE: 0 2 Machine check exceptions\n"}, {}, F, "2 on machine checks"),
    ("cpu-count", {f"{CPU}/online": "0-63,65-223"}, {"cpus": 224}, F, "223 CPUs are online instead of 224"),
    ("kernel-log", xid("NVRM: Xid (PCI:0000:52:00): 48, DBE"), {"xid_ignore": (48,)}, P, "1 x XID 48"),
    ("kernel-log", xid("NVRM: Xid (PCI:0000:52:00): 94, Contained"), {"xid_fail": (94,)}, F, "needs a GPU reset"),
    ("pcie-links", {f"{NIC5}/current_link_speed": "16.0 GT/s PCIe\n"}, {}, F, "has 16 instead of 32 GT/s"),
    ("pcie-links", {f"{GPU3}/current_link_width": "8\n"}, {}, F, "has 8 instead of 16 lanes"),
    ("pcie-links", {f"{GPU3}/current_link_speed": "2.5 GT/s"}, {"pcie_gpu_speed": True}, F, "has 2.5 instead"),
    ("pcie-links", {f"{GPU3}/../max_link_width": "8\n", f"{GPU3}/current_link_width": "8\n"}, {}, P, "16 links"),
    ("storage-paths", {}, {"storage_paths": ("/home/alice", "/nowhere")}, F, "/nowhere: No such file"),
    ("storage-paths", {"/raid/blob": "x"}, {"storage_paths": ("/raid/blob", "/raid")}, P, "/raid/blob, /raid"),
]  # fmt: skip


@pytest.mark.parametrize("name, change, expect, verdict, text", BROKEN)
def test_one_broken_fact_is_found(dgx, name, change, expect, verdict, text):
    apply(dgx, change)
    said = dgx.found(name, **expect)
    assert said[0] is verdict and text in said[1], said


@pytest.mark.parametrize("when", CONTEXTS)
def test_a_healthy_node_passes_everywhere(dgx, when):
    code, report = dgx.program("--when", when)
    wrong = [f for f in report.findings if f.verdict not in (P, N)]
    assert (code, wrong, report.notes) == (0, [], [])
    assert {f.check for f in report.findings} == {c.name for c in CHECKS.values() if when in c.contexts}
    passed = {f.check for f in report.findings if f.verdict is P}
    applies = {"lustre", "mounts", "shm-space", "memory-size", "memory-errors", "cpu-count", "pcie-links"}
    assert passed and passed >= {name for name in applies if when in CHECKS[name].contexts}


@pytest.mark.parametrize(
    "facts, lack",
    [
        ({}, ""),
        ({"f_bavail": 29}, "2.9% free, at least 3% are needed"),
        ({"f_favail": 5}, "0.5% of its inodes free, at least 1% are needed"),
        ({"f_favail": 0, "f_files": 0}, ""),  # not counted
        ({"f_bavail": 0, "f_flag": os.ST_RDONLY}, ""),  # squashfs
    ],
)
def test_what_a_disk_lacks(facts, lack):
    room = {"f_blocks": 1000, "f_bavail": 900, "f_files": 1000, "f_favail": 900, "f_flag": 0}
    assert storage.lacking(SimpleNamespace(**room | facts), EXPECTED) == lack


@pytest.mark.parametrize("strict", [False, True])
def test_storage_that_hangs_fails_only_if_asked_for(hung_home, strict):
    paths = ("--only=mounts", "--only=storage-paths", "--expect=storage_paths=/home,/lustre/fs0", "--deadline=1")
    code, report = hung_home.program(*paths, f"--expect=storage_hang_is_failure={strict}")
    assert code == (1 if strict else 3)
    for finding in report.findings:
        assert finding.verdict is (F if strict else U) and "/home did not answer" in finding.text, finding
    config = replace(Config(), ft=replace(Config().ft, storage_hang_is_failure=strict))
    assert ("--expect=storage_hang_is_failure=true" in preflight_spec(config).arguments) is strict


@pytest.mark.parametrize(
    ("hosts", "env", "verdict"),
    [
        ("127.0.0.1 localhost\n127.0.1.1 dgx1.site dgx1 # by Debian\n", {}, F),
        ("::1 dgx1\n", {}, F),
        ("10.0.0.7 dgx1\n127.0.1.1 dgx1\n", {}, P),  # the first one counts
        ("127.0.1.1 dgx10\n", {}, P),
        ("127.0.1.1 dgx1\n", {"GLOO_SOCKET_IFNAME": "ib0"}, N),
        ("127.0.1.1 dgx1\n", {"SLURM_JOB_NUM_NODES": "1"}, N),
        ("127.0.1.1 dgx1\n", {"SLURMD_NODENAME": "n3"}, N),
    ],
)
def test_a_name_that_other_nodes_cannot_use(dgx, hosts, env, verdict):
    dgx.write("/etc/hosts", hosts)
    dgx.write("/proc/sys/kernel/hostname", "dgx1\n")
    found, text = dgx.found("own-name", {"SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "dgx1"} | env)
    assert found is verdict and ("GLOO_SOCKET_IFNAME" in text) == (verdict is F or "GLOO_SOCKET_IFNAME" in env)


def test_what_a_good_node_has_is_learned(dgx):
    learned = dgx.learned("mounts")
    assert learned["mounts"] == ("/lustre/fs0", "/home", "/mnt/data sets")
    assert learned["writable_mounts"] == ("/lustre/fs0", "/home")
    for name in ("shm-space", "memory-size", "cpu-count"):
        assert dgx.found(name, **dgx.learned(name))[0] is P, name
    assert dgx.learned("memory-size") == {"memory_gb": 2142} and dgx.learned("cpu-count") == {"cpus": 224}


def test_mounts_on_demand_are_not_learned(dgx):
    dgx.add(MOUNTS, "95 22 0:60 / /auto rw - autofs /etc/auto.home rw,indirect\n")
    dgx.add(MOUNTS, "96 95 0:61 / /auto/alice rw - nfs4 n:/alice rw\n97 22 0:62 / /automatic rw - nfs4 n:/a rw\n")
    dgx.add(MOUNTS, "98 22 0:63 / /direct rw - autofs systemd-1 rw,direct\n99 98 0:64 / /direct rw - nfs n:/d rw\n")
    learned = dgx.learned("mounts")
    assert learned["mounts"] == ("/lustre/fs0", "/home", "/mnt/data sets", "/automatic")
    assert learned["writable_mounts"] == ("/lustre/fs0", "/home", "/automatic")


def test_no_check_raises_on_a_node_without_anything(tmp_path):
    for name, check in CHECKS.items():
        verdict, text = examine(check, NodeView(str(tmp_path), {}), EXPECTED)
        assert isinstance(verdict, Verdict) and text and "Error" not in text, name
        assert verdict is not P or name == "disk-space", name


@pytest.mark.parametrize("junk", [b"", b"\xff\xfe\xfd", b"9" * 400])
def test_junk_in_every_file_is_never_an_exception(dgx, junk):
    for directory, _, names in os.walk(dgx.root):
        for file in (Path(directory, name) for name in names):
            if not file.is_symlink():
                file.unlink()  # it is shared
                file.write_bytes(junk)
    for name in CHECKS:
        verdict, text = dgx.found(name)
        assert isinstance(verdict, Verdict) and text.isprintable() and "Error:" not in text, (name, text)
