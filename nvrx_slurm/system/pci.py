"""Where devices are on the PCI tree, from sysfs, and what its files hold.

A device's way is the tuple of what is passed from the top (host bridge, root port, switches) down to the device itself.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from pathlib import Path

_DEVICES = "bus/pci/devices"
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA, 3D controller
_MAX_DIGITS = 20  # of a 64-bit count
_MAX_CPUS = 1 << 16

Way = tuple[str, ...]
# a directory or file; pathlib takes long to load, and prologs do without it
Place: TypeAlias = "str | Path"


def gpus(root: Place) -> list[str]:
    """Addresses of NVIDIA's GPUs below `root` (/sys), in the order of the bus, which is NVML's."""
    return [
        address
        for address in listed(f"{root}/{_DEVICES}")
        if text(f"{root}/{_DEVICES}/{address}/vendor") == _NVIDIA
        and (text(f"{root}/{_DEVICES}/{address}/class") or "").startswith(_GPU_CLASSES)
    ]


def way(root: Place, device: Place) -> Way:
    """The way to a device's directory or to a link to it; () if it is not there."""
    top, place = f"{os.path.realpath(f'{root}/devices')}/", os.path.realpath(device)
    return (
        tuple(place[len(top) :].split("/"))
        if place.startswith(top) and os.path.exists(place)
        else ()
    )


def numa_node(root: Place, address: str) -> int | None:
    """The NUMA node of the device at `address`; None where the firmware does not tell (the kernel says -1)."""
    return number(f"{root}/{_DEVICES}/{address}/numa_node")


def listed(directory: Place) -> list[str]:
    """Sorted names in a directory; [] if it cannot be listed."""
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def number(file: Place) -> int | None:
    """The count in a file of sysfs; None if there is none, or something else than at most 20 digits."""
    word = text(file) or ""
    return int(word) if word.isdecimal() and len(word) <= _MAX_DIGITS else None


def ranges(listed: str) -> frozenset[int] | None:
    """The numbers in the kernel's list of CPUs or nodes, as "0-1,4"; None for anything else."""
    try:
        ends = [[int(end) for end in part.split("-")] for part in listed.strip().split(",")]
    except ValueError:
        return None
    if any(not 0 <= end[0] <= end[-1] < _MAX_CPUS for end in ends):
        return None
    return frozenset(number for end in ends for number in range(end[0], end[-1] + 1))


def text(file: Place) -> str | None:
    """What is in a file of sysfs, without the end of the line; None if it cannot be read."""
    try:
        with open(file, "rb") as opened:
            return opened.read(4096).decode().strip()
    except (OSError, UnicodeDecodeError):
        return None
