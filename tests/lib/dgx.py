#!/usr/bin/env python3
"""The files of a DGX-like node: 8 GPUs and 8 InfiniBand NICs behind 8 PCI switches, 2 NUMA nodes, Lustre and NFS.

    python tests/lib/dgx.py DIR          # writes the tree; then: nvrx health run --sysroot DIR

Shaped after a DGX H100 (Linux 5.15); text files and links only. Tests break it one fact at a time.
"""

import os
import sys
from pathlib import Path

# By NUMA node, in order: (root port, GPU, NIC), buses of domain 0000.
SWITCHES = (
    ("15", "1b", "18"),
    ("37", "43", "40"),
    ("48", "52", "4f"),
    ("59", "61", "5e"),
    ("97", "9d", "9a"),
    ("b7", "c3", "c0"),
    ("c7", "d1", "ce"),
    ("d7", "df", "dc"),
)
GPUS = [f"0000:{gpu}:00.0" for _, gpu, _ in SWITCHES]
NICS = [f"mlx5_{index}" for index in range(len(SWITCHES))]
CPUS, MEMORY_KIB = 224, 2_113_530_296

_MOUNTINFO = """\
22 1 8:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw,errors=remount-ro
24 22 0:5 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw
25 22 0:22 / /sys rw,nosuid,nodev,noexec,relatime shared:2 - sysfs sysfs rw
30 22 0:26 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw
33 22 8:3 / /tmp rw,nosuid,nodev,relatime shared:7 - ext4 /dev/nvme0n1p3 rw
34 22 8:4 / /var rw,relatime shared:8 - ext4 /dev/nvme0n1p4 rw
41 22 9:1 / /raid rw,relatime shared:30 - xfs /dev/md1 rw,attr2
77 22 0:61 / /lustre/fs0 rw,relatime shared:41 - lustre 10.1.0.2@o2ib:10.1.0.3@o2ib:/fs0 rw,flock,lazystatfs
78 22 0:62 / /home rw,relatime shared:42 - nfs4 nfs01:/export/home rw,vers=4.2,hard,proto=tcp
79 22 0:63 / /mnt/data\\040sets ro,relatime shared:43 - nfs nfs02:/datasets ro,vers=3,hard
"""
_MEMINFO = f"""\
MemTotal:       {MEMORY_KIB} kB
MemFree:        1960000000 kB
MemAvailable:   2010000000 kB
Buffers:          480000 kB
SwapTotal:             0 kB
HugePages_Total:       0
"""
_INTERRUPTS = """\
            CPU0       CPU1
  NMI:       1012        998   Non-maskable interrupts
  MCE:          0          0   Machine check exceptions
  MCP:        800        800   Machine check polls
"""
_KMSG = """\
6,1,0,-;Linux version 5.15.0-1042-nvidia (buildd@lcy02) (gcc 11.4.0) #42-Ubuntu SMP
6,1423,13711201,-;nvidia-nvlink: Nvlink Core is being initialized, major device number 511
4,2210,60500112,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.86.15
4,2911,7211000001,-;NVRM: Xid (PCI:0000:1b:00): 31, pid=41211, name=python, Ch 00000008, MMU Fault
"""
_LOADED = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"


def build(root):
    """Write the tree below `root`, which is made."""
    for path, text in _system().items():
        write(root, path, text)
    for directory in ("lustre/fs0/projects", "home/alice", "mnt/data sets/c4", "raid", "tmp", "var", "dev/shm", "run"):
        (root / directory).mkdir(parents=True, exist_ok=True)
    for index in range(len(SWITCHES)):
        _switch(root, index)
    return root


def write(root, path, text):
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def _system():
    half, cpu = CPUS // 2, "/sys/devices/system/cpu"
    files = {
        "/dev/kmsg": _KMSG,
        "/proc/driver/nvidia/version": _LOADED,
        "/proc/interrupts": _INTERRUPTS,
        "/proc/meminfo": _MEMINFO,
        "/proc/self/mountinfo": _MOUNTINFO,
        "/proc/sys/kernel/random/boot_id": "6c1c8d2e-7d55-4a53-9a10-3f1ea9c5a001\n",
        "/sys/fs/lustre/health_check": "healthy\n",
        f"{cpu}/online": f"0-{CPUS - 1}\n",
    }
    for numa in range(2):
        node = f"/sys/devices/system/node/node{numa}"
        files[f"{node}/cpulist"] = f"{numa * half}-{(numa + 1) * half - 1}\n"
        files[f"{node}/meminfo"] = f"Node {numa} MemTotal:       {MEMORY_KIB // 2} kB\n"
    for controller in range(4):
        for counter in ("ue_count", "ce_count"):
            files[f"/sys/devices/system/edac/mc/mc{controller}/{counter}"] = "0\n"
    return files


def _switch(root, index):
    """A root port, a switch below it, a GPU and a NIC below that."""
    port, gpu, nic = SWITCHES[index]
    numa = index * 2 // len(SWITCHES)
    top = f"/sys/devices/pci0000:{port}/0000:{port}:01.0"
    upstream = f"{top}/0000:{int(port, 16) + 1:02x}:00.0"
    above_gpu, above_nic = (f"{upstream}/0000:{int(port, 16) + 2:02x}:{slot:02x}.0" for slot in (0, 1))
    for bridge in (top, upstream, above_gpu, above_nic):
        _device(root, bridge, "0x1000", "0x060400", numa, 32.0)
    # The link of an idle H100 stays at full speed; other GPUs slow theirs down.
    _device(root, f"{above_gpu}/0000:{gpu}:00.0", "0x10de", "0x030200", numa, 32.0)
    device = f"{above_nic}/0000:{nic}:00.0"
    _device(root, device, "0x15b3", "0x020700", numa, 32.0)
    name = NICS[index]
    port_files = {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": "400 Gb/sec (4X NDR)",
        "link_layer": "InfiniBand",
        "lid": f"0x{index + 16:x}",
        "counters/link_downed": "0",
        "counters/link_error_recovery": "0",
        "counters/symbol_error": "0",
        "counters/port_rcv_errors": "0",
        "counters/port_xmit_discards": "0",
    }
    infiniband = f"{device}/infiniband/{name}"
    write(root, f"{infiniband}/fw_ver", "28.39.2048\n")
    write(root, f"{infiniband}/node_guid", f"94:6d:ae:03:00:00:00:{index:02x}\n".replace(":", ""))
    for file, text in port_files.items():
        write(root, f"{infiniband}/ports/1/{file}", f"{text}\n")
    _link(root, f"{infiniband}/device", device)
    _link(root, f"/sys/class/infiniband/{name}", infiniband)


def _device(root, path, vendor, kind, numa, gts):
    files = {
        "vendor": vendor,
        "class": kind,
        "numa_node": str(numa),
        "current_link_width": "16",
        "max_link_width": "16",
        "current_link_speed": f"{gts} GT/s PCIe",
        "max_link_speed": f"{gts} GT/s PCIe",
    }
    for name, text in files.items():
        write(root, f"{path}/{name}", f"{text}\n")
    _link(root, f"/sys/bus/pci/devices/{Path(path).name}", path)


def _link(root, path, target):
    """A relative link, as sysfs has them, so that the tree can be moved."""
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(os.path.relpath(root / target.lstrip("/"), place.parent))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/lib/dgx.py DIR")
    print(build(Path(sys.argv[1])))
