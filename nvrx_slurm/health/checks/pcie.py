"""PCI Express links of GPUs and NICs that run below what both their ends can (sysfs-bus-pci)."""

from __future__ import annotations

import os
from typing import NamedTuple

from nvrx_slurm.health.check import QUICK, Expected, NodeView, Setting, Verdict, check, judged
from nvrx_slurm.system import nics, pci
from nvrx_slurm.system.hardware import Absent

_DEVICES = "/sys/bus/pci/devices"
_MAX_WIDTH = 32  # a device that does not answer reads as 63 or 255
_FULL_SPEED = Setting("pcie_gpu_speed", "bool", False, "whether a GPU's link must have full speed even when it is idle")


class Link(NamedTuple):
    """One device's link; widths in lanes, speeds in GT/s, None = the device does not tell."""

    device: str  # "GPU 0000:1b:00.0" or "NIC mlx5_0 (0000:18:00.0)"
    width: int | None
    max_width: int | None
    speed: float | None
    max_speed: float | None


def gather(node: NodeView, expected: Expected) -> list[Link]:
    """GPUs of NVIDIA by their class, NICs by /sys/class/infiniband."""
    node.doing(f"reading {_DEVICES}")
    sysfs = node.path("/sys")
    devices = {f"GPU {address}": node.path(f"{_DEVICES}/{address}") for address in pci.gpus(sysfs)}
    for nic in nics.names(sysfs):
        device = os.path.realpath(node.path(f"/sys/class/infiniband/{nic}/device"))
        if pci.text(f"{device}/max_link_width"):  # software RDMA (rxe, siw) has no device
            devices[f"NIC {nic} ({os.path.basename(device)})"] = device
    if not devices:
        raise Absent("no GPU and no RDMA NIC is on PCI Express here")
    return [_link(name, device) for name, device in devices.items()]


def _link(name: str, device: str) -> Link:
    port = os.path.dirname(os.path.realpath(device))  # a slower slot is no fault of the device
    widths = [width for end in (device, port) if (width := _width(f"{end}/max_link_width"))]
    speeds = [speed for end in (device, port) if (speed := _speed(pci.text(f"{end}/max_link_speed")))]
    width, speed = _width(f"{device}/current_link_width"), _speed(pci.text(f"{device}/current_link_speed"))
    return Link(name, width, min(widths, default=None), speed, min(speeds, default=None))


def _width(file: str) -> int | None:
    found = pci.number(file)
    return found if found and found <= _MAX_WIDTH else None


def _speed(text: str | None) -> float | None:
    """Of "16.0 GT/s PCIe"; None for "Unknown"."""
    number, _, unit = (text or "").partition(" ")
    return float(number) if unit.startswith("GT/s") and number.replace(".", "", 1).isdecimal() else None


@check(
    "pcie-links",
    gather,
    f"{_DEVICES}/*/current_link_* and max_link_* of GPUs and RDMA NICs and of the ports above them",
    group=QUICK,
    settings=(_FULL_SPEED,),
)
def pcie_links(links: list[Link], expected: Expected) -> tuple[Verdict, str]:
    """A link has fewer lanes, or a NIC's less speed, than both its ends can have."""
    wrong, silent = [], []
    for link in links:
        if link.width is None or link.max_width is None:
            silent.append(f"{link.device} does not tell the width of its link")
        elif link.width < link.max_width:
            wrong.append(f"{link.device} has {link.width} lanes instead of {link.max_width}")
        slow = link.speed is not None and link.max_speed is not None and link.speed < link.max_speed
        if slow and (expected["pcie_gpu_speed"] or link.device.startswith("NIC")):  # idle GPUs slow their links down
            wrong.append(f"{link.device} runs at {link.speed:g} instead of {link.max_speed:g} GT/s")
    return judged(wrong, f"{len(links)} links have all their lanes", silent)


CHECKS = (pcie_links,)
