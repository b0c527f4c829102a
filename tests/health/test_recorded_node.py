"""Every check on a DGX-like node that is healthy, and on one with a single fact broken."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded import Node

from nvrx_slurm.health import registry
from nvrx_slurm.health.check import CONTEXTS, Check, NodeView, Verdict
from nvrx_slurm.health.runner import examine

CHECKS = registry.built_in()
OF_THIS_FILE = ("storage", "space", "memory", "cpu", "processes", "services", "kernel_log", "pcie")


def found(node: Node, name: str, **expect: object) -> tuple[Verdict, str]:
    """What one check finds, in this process."""
    return examine(CHECKS[name], NodeView(str(node.root), {}), registry.defaults(CHECKS.values()) | expect)


@pytest.mark.parametrize("when", CONTEXTS)
def test_a_healthy_node_passes_everywhere(dgx: Node, when: str) -> None:
    code, report = dgx.program("--when", when)
    wrong = [f for f in report.findings if f.verdict not in (Verdict.PASS, Verdict.NOT_APPLICABLE)]
    assert (code, wrong, report.notes) == (0, [], [])
    assert {f.check for f in report.findings} == {c.name for c in CHECKS.values() if when in c.contexts}
    passed = {f.check for f in report.findings if f.verdict is Verdict.PASS}
    expected = {
        "lustre",
        "mounts",
        "disk-space",
        "shm-space",
        "memory-size",
        "memory-errors",
        "cpu-count",
        "pcie-links",
    }
    assert passed >= {name for name in expected if when in CHECKS[name].contexts} and passed


def _line(node: Node, path: str, old: str, new: str) -> None:
    text = (node / path).read_text()
    assert old in text
    node.write(path, text.replace(old, new))


def _xid(text: str) -> Callable[[Node], None]:
    def add(node: Node) -> None:
        with (node / "/dev/kmsg").open("a") as file:
            file.write(f"4,3000,8211000001,-;{text}\n")

    return add


def _directory(path: str) -> Callable[[Node], None]:
    def replace(node: Node) -> None:
        (node / path).unlink()
        (node / path).mkdir()

    return replace


def _process(pid: int, comm: str, state: str) -> Callable[[Node], None]:
    def add(node: Node) -> None:
        node.write(f"/proc/{pid}/stat", node.recorded.stat_line(pid, comm, state))
        node.write(f"/proc/{pid}/status", node.recorded.status(comm, 77))
        node.write(f"/proc/{pid}/comm", comm)

    return add


def _gone(path: str) -> Callable[[Node], None]:
    def remove(node: Node) -> None:
        place = node / path
        shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()

    return remove


def _edit(path: str, old: str, new: str) -> Callable[[Node], None]:
    return lambda node: _line(node, path, old, new)


def _set(path: str, text: str) -> Callable[[Node], None]:
    return lambda node: node.write(path, text)


def _zombies(node: Node) -> None:
    for pid in range(5000, 5003):
        _process(pid, "orphan", "Z")(node)


def _smt(control: str) -> Callable[[Node], None]:
    """Half of the CPUs are offline."""

    def switch(node: Node) -> None:
        node.write(f"{CPU}/smt/control", f"{control}\n")
        node.write(f"{CPU}/online", "0-111\n")

    return switch


def _odd_mounts(node: Node) -> None:
    """A target with what str.splitlines and str.split take for ends, one without a source, and no line at all."""
    target = "/mnt/odd\f\u2028name"
    for path in (target, "/mnt/sourceless"):
        (node / path).mkdir(parents=True)
    with (node / MOUNTS).open("a") as file:
        file.write(f"90 22 0:50 / {target} rw - tmpfs t\u2028mpfs rw\n")
        file.write("91 22 0:51 / /mnt/sourceless rw - tmpfs  rw\njunk\n")


def _services_gone(node: Node) -> None:
    shutil.rmtree(node / "/sys/fs/cgroup")
    shutil.rmtree(node / "/proc/1006")
    node.write("/proc/2/comm", "kthreadd\n")


def _in_a_container(node: Node) -> None:
    """With a PID and a cgroup namespace of its own."""
    shutil.rmtree(node / "/sys/fs/cgroup")
    shutil.rmtree(node / "/proc/1006")


F, U, N, P = Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_APPLICABLE, Verdict.PASS
GPU3, NIC5 = "/sys/bus/pci/devices/0000:61:00.0", "/sys/class/infiniband/mlx5_5/device"
MCS = "/sys/devices/system/edac/mc"
CPU = "/sys/devices/system/cpu"
CLOCK = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
MOUNTS = "/proc/self/mountinfo"
MCE = "MCE:          0          0"
LUSTRE = "/sys/fs/lustre/health_check"
ROOT: dict[str, object] = {"disk_paths": ("/",)}
SLURMD = "/sys/fs/cgroup/system.slice/slurmd.service/cgroup.events"

# check, what is broken, what is expected, verdict, part of the sentence
BROKEN: list[tuple[str, Callable[[Node], None], dict[str, object], Verdict, str]] = [
    ("lustre", _set(LUSTRE, "NOT HEALTHY\n"), {}, F, "'NOT HEALTHY' instead of healthy"),
    ("lustre", _set(LUSTRE, ""), {}, U, "is empty"),
    ("lustre", _set(LUSTRE, "\x00\xff"), {}, F, "instead of healthy"),
    ("lustre", _gone(LUSTRE), {}, N, "no Lustre client"),
    ("mounts", _gone("/lustre/fs0"), {}, F, "/lustre/fs0: No such file"),
    ("mounts", _gone("/mnt/data sets"), {}, F, "/mnt/data sets: No such file"),
    ("mounts", _edit(MOUNTS, "/home rw", "/hame rw"), {"mounts": ("/home",)}, F, "not mounted: /home"),
    ("mounts", _edit(MOUNTS, "nfs4 nfs01:/export/home rw", "nfs4 n:/ ro"), {"writable_mounts": ("/home",)}, F, "/home"),
    ("mounts", _set(MOUNTS, "22 1 8:2 / / rw - ext4 /dev/sda1 rw\n"), {}, N, "no Lustre or NFS is mounted"),
    ("mounts", _set(MOUNTS, "garbage\n"), {}, U, "/proc/self/mountinfo holds no line that is"),
    ("mounts", _odd_mounts, {}, P, "/lustre/fs0"),
    ("mounts", _odd_mounts, {"mounts": ("/mnt/odd\f\u2028name", "/mnt/sourceless")}, P, "can be reached"),
    ("mounts", _odd_mounts, {"mounts": ("/mnt/none",)}, F, "not mounted: /mnt/none"),
    ("mounts", _gone(MOUNTS), {}, U, "No such file"),
    (
        "disk-space",
        _edit("/.statvfs", "/tmp 4096 468843606 350000000", "/tmp 4096 468843606 9000"),
        {},
        F,
        "/tmp has 0.0",
    ),
    (
        "disk-space",
        _edit("/.statvfs", "/var 4096 468843606 350000000 119144448 115000000", "/var 4 9 9 9000 1"),
        {},
        F,
        "inodes",
    ),
    ("disk-space", _edit("/.statvfs", "/tmp 4096", "/tmp x"), {}, U, "instead of five or six numbers"),
    ("disk-space", _edit("/.statvfs", "/tmp 4096", "/tmp ²"), {}, U, "/.statvfs holds '/tmp ²"),
    ("disk-space", _set("/.statvfs", f"/ 131072 9000 0 600 0 {os.ST_RDONLY}\n"), ROOT, P, "/ is read-only"),  # squashfs
    ("disk-space", _set("/.statvfs", "/ 131072 9000 0 600 0 4096\n"), ROOT, F, "/ has 0.0% free"),
    ("disk-space", lambda node: None, {"disk_paths": ("/nvme9",)}, N, "/nvme9"),
    (
        "shm-space",
        _edit("/.statvfs", "/dev/shm 4096 264191287 264000000", "/dev/shm 4096 264191287 1000"),
        {},
        F,
        "0.0 GB free",
    ),
    ("shm-space", _set("/.statvfs", "/dev/shm 4096 16384 16384 8 8\n"), {}, P, "0.1 of 0.1 GB free"),  # as in docker
    ("shm-space", _set("/.statvfs", "/dev/shm 4096 16384 16384 8 8\n"), {"shm_free_gb": 1.0}, F, "at least 1 are"),
    ("shm-space", lambda node: None, {"shm_size_gb": 2000.0}, F, "1082.1 GB instead of 2000 GB"),
    (
        "memory-size",
        _edit("/proc/meminfo", "2113530296", "1981434653"),
        {"memory_gb": 2142},
        F,
        "2029 GB of memory instead",
    ),
    ("memory-size", lambda node: None, {"memory_free_gb": 2100}, F, "2058 GB of memory available"),
    ("memory-size", _set("/proc/meminfo", "\n"), {}, U, "no MemTotal"),
    ("memory-errors", _set(f"{MCS}/mc2/ue_count", "3\n"), {}, F, "3 on mc2"),
    ("memory-errors", _set(f"{MCS}/mc2/ue_count", "many"), {}, U, "mc2/ue_count holds 'many'"),
    ("memory-errors", _set(f"{MCS}/mc0/ue_count", ""), {}, U, "instead of a count"),
    ("memory-errors", _set(f"{MCS}/mc2/ue_count", "-1\n"), {}, U, "mc2/ue_count holds '-1' instead of a count"),
    ("memory-errors", _set(f"{MCS}/mc2/ue_count", "7" * 32), {}, U, "mc2/ue_count holds '777"),
    ("memory-errors", _set(f"{MCS}/mc2/ue_count", "²\n"), {}, U, "mc2/ue_count holds '²' instead of a count"),
    ("memory-errors", _edit("/proc/interrupts", MCE, f"MCE: {'7' * 32}"), {}, U, "/proc/interrupts holds '777"),
    ("memory-errors", _edit("/proc/interrupts", MCE, "MCE: 0 ²"), {}, P, "no uncorrected error"),
    ("memory-size", _edit("/proc/meminfo", "2113530296", "²"), {}, U, "/proc/meminfo has no MemTotal"),
    ("memory-size", _edit("/proc/meminfo", "2113530296", "7" * 400), {}, U, "/proc/meminfo has no MemTotal"),
    ("memory-errors", _edit("/proc/interrupts", MCE, "MCE: 1 1"), {}, F, "2 machine check"),
    ("cpu-count", _set(f"{CPU}/online", "0-63,65-223"), {"cpus": 224}, F, "223 CPUs are online instead of 224"),
    ("cpu-count", _set(f"{CPU}/online", "0-63,65-223"), {}, U, "223 of 224 CPUs are online; say in the site file"),
    ("cpu-count", _smt("off"), {}, P, "112 of 224 CPUs are online, as SMT is switched off"),
    ("cpu-count", _smt("forceoff"), {}, P, "as SMT is switched off"),
    ("cpu-count", _smt("off"), {"cpus": 112}, P, "112 CPUs are online"),
    ("cpu-count", _smt("off"), {"cpus": 224}, F, "112 CPUs are online instead of 224"),
    ("cpu-count", _smt("on"), {}, U, "112 of 224 CPUs are online; say"),
    ("cpu-count", lambda node: None, {"cpus": 256}, F, "224 CPUs are online instead of 256"),
    ("cpu-count", _set(f"{CPU}/online", "0-x"), {}, U, f"{CPU}/online holds '0-x', which is no list of CPUs"),
    ("cpu-count", _set(f"{CPU}/present", "0-²"), {}, U, f"{CPU}/present holds '0-²', which is no list"),
    ("cpu-count", _set(f"{CPU}/online", "0-" + "9" * 5000), {}, U, f"{CPU}/online holds '0-99"),
    ("clock-source", _set(CLOCK, "hpet\n"), {}, F, "hpet though there is tsc"),
    ("clock-source", _set(CLOCK, "junk\n"), {}, U, "current_clocksource holds 'junk', which is not available"),
    ("clock-source", _set(CLOCK, "junk\n"), {"clock_source": "tsc"}, U, "which is not available"),
    ("clock-source", _directory(CLOCK), {}, U, "current_clocksource"),
    ("clock-source", lambda node: None, {"clock_source": "hpet"}, F, "tsc instead of hpet"),
    ("clock-source", _gone("/sys/devices/system/clocksource"), {}, N, "does not tell"),
    ("stuck-processes", _process(4711, "python) R (x", "D"), {"stuck_s": 0.01}, F, "python) R (x (4711)"),
    ("stuck-processes", _zombies, {"zombies_max": 2}, F, "3 zombies: orphan"),
    ("stuck-processes", _zombies, {"zombies_max": 3}, P, "3 zombies"),
    ("stuck-processes", _set("/proc/9/stat", "9 (x"), {}, U, "/proc/9/stat holds '9 (x'"),
    ("stuck-processes", _set("/proc/9/stat", "² (x) R" + " 1" * 25), {}, U, "/proc/9/stat holds '² (x)"),
    ("services", _set(SLURMD, "populated 0\n"), {"services": ("slurmd.service", "munge")}, F, "not running: slurmd"),
    (
        "services",
        _gone("/sys/fs/cgroup/system.slice/munge.service"),
        {"services": ("munge", "slurmd")},
        F,
        "not running: munge",
    ),
    ("services", _services_gone, {"services": ("slurmd", "munge")}, F, "not running: slurmd"),
    ("services", _in_a_container, {"services": ("slurmd", "munge")}, U, "processes cannot be seen from here, among"),
    ("services", _gone("/sys/fs/cgroup"), {"services": ("slurmd", "munge")}, P, "running: slurmd, munge"),
    ("time-sync", _gone("/proc/1002"), {}, F, "synchronized by nobody"),
    (
        "kernel-log",
        _xid("NVRM: Xid (PCI:0000:52:00): 79, pid=1, GPU has fallen off the bus."),
        {},
        F,
        "XID 79 on 0000:52:00",
    ),
    ("kernel-log", _xid("NVRM: Xid (PCI:0000:52:00): 45, pid=1"), {}, P, "1 x XID 45"),
    ("kernel-log", _xid("NVRM: Xid (PCI:0000:52:00): 48, DBE"), {"xid_ignore": (48,)}, P, "nothing that needs repair"),
    ("kernel-log", _xid("NVRM: Xid (PCI:0000:52:00): 94, Contained"), {"xid_fail": (94,)}, F, "needs a GPU reset"),
    (
        "kernel-log",
        _xid("nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 32 LTSSM Fault"),
        {},
        F,
        "SXID 20034",
    ),
    ("kernel-log", _set("/dev/kmsg", "\xff\xfe;;;\n,,,;\n6,x,0;Xid (PCI:0000:52:00): 79\n"), {}, P, "no XID or SXID"),
    ("kernel-log", _gone("/dev/kmsg"), {}, N, "there is no /dev/kmsg"),
    ("pcie-links", _set(f"{GPU3}/current_link_width", "8\n"), {}, F, "GPU 0000:61:00.0 has 8 lanes instead of 16"),
    ("pcie-links", _set(f"{NIC5}/current_link_speed", "16.0 GT/s PCIe\n"), {}, F, "runs at 16 instead of 32 GT/s"),
    ("pcie-links", _set(f"{GPU3}/current_link_speed", "2.5 GT/s PCIe\n"), {}, P, "16 links"),
    ("pcie-links", _set(f"{GPU3}/current_link_speed", "2.5 GT/s"), {"pcie_gpu_speed": True}, F, "2.5 instead of 32"),
    ("pcie-links", _set(f"{GPU3}/current_link_width", "255\n"), {}, U, "GPU 0000:61:00.0 does not tell"),
    ("pcie-links", _set(f"{GPU3}/../max_link_width", "8\n"), {}, P, "16 links"),  # the slot has no more
    ("storage-paths", lambda node: None, {"storage_paths": ("/home/alice", "/nowhere")}, F, "/nowhere: No such file"),
    (
        "storage-paths",
        _set("/raid/blob", "x"),
        {"storage_paths": ("/raid/blob", "/raid")},
        P,
        "/raid/blob, /raid can be",
    ),
]


@pytest.mark.parametrize(("name", "break_it", "expect", "verdict", "text"), BROKEN)
def test_one_broken_fact_is_found(
    dgx: Node, name: str, break_it: Callable[[Node], None], expect: dict[str, object], verdict: Verdict, text: str
) -> None:
    break_it(dgx)
    said = found(dgx, name, **expect)
    assert said[0] is verdict, said
    assert text in said[1]


@pytest.mark.parametrize("less_mb", [1, 100])
def test_a_node_with_a_little_less_shm_than_the_one_it_was_learned_on_is_well(dgx: Node, less_mb: int) -> None:
    check = CHECKS["shm-space"]
    assert check.learn is not None
    learned: dict[str, object] = {}
    for mb, verdict in ((0, Verdict.PASS), (less_mb, Verdict.PASS), (50_000, Verdict.FAIL)):
        dgx.write("/.statvfs", f"/dev/shm 4096 {264184571 - mb * 256} 264000000 264184571 264184000\n")
        learned = learned or check.learn(check.gather(NodeView(str(dgx.root), {}), {}))
        assert found(dgx, "shm-space", **learned)[0] is verdict


def test_what_is_mounted_on_demand_is_not_learned(dgx: Node) -> None:
    learn = CHECKS["mounts"].learn
    assert learn is not None
    with (dgx / MOUNTS).open("a") as file:
        file.write("95 22 0:60 / /auto rw - autofs /etc/auto.home rw,indirect\n")
        file.write("96 95 0:61 / /auto/alice rw - nfs4 nfs01:/alice rw\n97 22 0:62 / /automatic rw - nfs4 n:/a rw\n")
        file.write("98 22 0:63 / /direct rw - autofs systemd-1 rw,direct\n99 98 0:64 / /direct rw - nfs n:/d rw\n")
    expected = registry.defaults(CHECKS.values())
    learned = learn(CHECKS["mounts"].gather(NodeView(str(dgx.root), {}), expected))
    assert learned["mounts"] == ("/lustre/fs0", "/home", "/mnt/data sets", "/automatic")
    assert "/auto/alice" not in learned["writable_mounts"]


@pytest.mark.parametrize("family", OF_THIS_FILE)
def test_every_check_is_broken_somewhere_above(family: str) -> None:
    names = {check.name for check in CHECKS.values() if check.gather.__module__.endswith(f".{family}")}
    assert names, family
    assert names <= {name for name, *_, verdict, _ in BROKEN if verdict is Verdict.FAIL}


def test_what_cannot_be_read_is_unknown(dgx: Node) -> None:
    (dgx / LUSTRE).unlink()
    (dgx / LUSTRE).mkdir()
    assert found(dgx, "lustre") == (Verdict.UNKNOWN, f"{LUSTRE}: Is a directory")


@pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.name)
def test_no_check_raises_on_a_node_without_anything(tmp_path: Path, check: Check) -> None:
    """An empty tree: everything is missing; each check still says something."""
    verdict, text = examine(check, NodeView(str(tmp_path), {}), registry.defaults(CHECKS.values()))
    assert isinstance(verdict, Verdict) and text
    assert "Error" not in text
    assert verdict is not Verdict.PASS or check.name in ("disk-space", "stuck-processes")


@pytest.mark.parametrize("junk", [b"", b"\0" * 3000, b"\xff\xfe\xfd", b"-1", b"9" * 400, b"NaN"])
def test_junk_in_every_file_is_never_an_exception(dgx: Node, junk: bytes) -> None:
    for directory, _, names in os.walk(dgx.root):
        for name in names:
            file = Path(directory, name)
            if not file.is_symlink():
                file.write_bytes(junk)
    for check in CHECKS.values():
        verdict, text = found(dgx, check.name)
        assert isinstance(verdict, Verdict) and text
        assert text.isprintable() and "Error:" not in text, (check.name, text)
