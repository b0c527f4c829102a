"""PCI Express links of GPUs and NICs: as wide and as fast as both their ends can (sysfs-bus-pci)."""

from __future__ import annotations

import os
from typing import NamedTuple

from nvrx_slurm.health.check import QUICK, Check, Expected, NodeView, Setting, Verdict, listed
from nvrx_slurm.system import nics, pci
from nvrx_slurm.system.hardware import Absent

_DEVICES = "/sys/bus/pci/devices"
_MAX_WIDTH = 32  # a device that does not answer reads as 63 or 255


class Link(NamedTuple):
    """One device's link; widths in lanes, speeds in GT/s, None = the device does not tell."""

    device: str  # "GPU 0000:1b:00.0" or "NIC mlx5_0 (0000:18:00.0)"
    gpu: bool
    width: int | None
    max_width: int | None
    speed: float | None
    max_speed: float | None


def gather(node: NodeView, expected: Expected) -> list[Link]:
    """GPUs of NVIDIA by their class, NICs by /sys/class/infiniband."""
    node.doing(f"reading {_DEVICES}")
    sysfs = node.path("/sys")
    found = [_link(node, f"{_DEVICES}/{address}", f"GPU {address}", True) for address in pci.gpus(sysfs)]
    for nic in nics.names(sysfs):
        device = f"/sys/class/infiniband/{nic}/device"
        address = os.path.basename(os.path.realpath(node.path(device)))
        if _word(node, f"{device}/max_link_width"):  # software RDMA (rxe, siw) has no device
            found.append(_link(node, device, f"NIC {nic} ({address})", False))
    if not found:
        raise Absent("no GPU and no RDMA NIC is on PCI Express here")
    return found


def _link(node: NodeView, device: str, name: str, gpu: bool) -> Link:
    # What the device could do in a better slot is no fault of it: the port above limits.
    port = os.path.dirname(os.path.realpath(node.path(device))).removeprefix(node.path("/").rstrip("/"))
    ends = (device, port)
    widths = [width for end in ends if (width := _width(_word(node, f"{end}/max_link_width")))]
    speeds = [speed for end in ends if (speed := _speed(_word(node, f"{end}/max_link_speed")))]
    return Link(
        device=name,
        gpu=gpu,
        width=_width(_word(node, f"{device}/current_link_width")),
        max_width=min(widths, default=None),
        speed=_speed(_word(node, f"{device}/current_link_speed")),
        max_speed=min(speeds, default=None),
    )


def _word(node: NodeView, path: str) -> str:
    try:
        return node.text(path, 4096).strip()
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _width(word: str) -> int | None:
    return int(word) if word.isdecimal() and 0 < int(word) <= _MAX_WIDTH else None


def _speed(word: str) -> float | None:
    """Of "16.0 GT/s PCIe"; None for "Unknown"."""
    number, _, unit = word.partition(" ")
    good = unit.startswith("GT/s") and number.replace(".", "", 1).isdecimal()
    return float(number) if good else None


def judge(links: list[Link], expected: Expected) -> tuple[Verdict, str]:
    """Fewer lanes than possible fail, less speed too: a GPU's only if `pcie_gpu_speed`, as idle ones slow down."""
    worse, mute = [], []
    for link in links:
        if link.width is None or link.max_width is None:
            mute.append(link.device)
        elif link.width < link.max_width:
            worse.append(f"{link.device} has {link.width} lanes instead of {link.max_width}")
        slow = link.speed is not None and link.max_speed is not None and link.speed < link.max_speed
        if slow and (expected["pcie_gpu_speed"] or not link.gpu):
            worse.append(f"{link.device} runs at {link.speed:g} instead of {link.max_speed:g} GT/s")
    if worse:
        return Verdict.FAIL, listed(worse)
    if mute:
        return Verdict.UNKNOWN, f"{listed(mute)} does not tell the width of its link"
    return Verdict.PASS, f"{len(links)} links have all their lanes"


CHECKS = (
    Check(
        name="pcie-links",
        lane=QUICK,
        reads=f"{_DEVICES}/*/current_link_* and max_link_* of GPUs and RDMA NICs and of the ports above them",
        fails="A link has fewer lanes, or a NIC's less speed, than both its ends can have.",
        gather=gather,
        judge=judge,
        settings=(
            Setting("pcie_gpu_speed", "bool", False, "whether a GPU's link must have full speed even when it is idle"),
        ),
    ),
)
