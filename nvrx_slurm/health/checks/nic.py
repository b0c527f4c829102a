"""InfiniBand and RoCE ports with their error counters, and PCI Express links of NICs and GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from nvrx_slurm.health import kept
from nvrx_slurm.health.check import (
    QUICK,
    Expected,
    Judgement,
    NodeView,
    SiteKey,
    check,
    judged,
    system_check,
)
from nvrx_slurm.system import nics, pci
from nvrx_slurm.system.hardware import Absent
from nvrx_slurm.system.nics import ACTIVE, Port

_PORTS = "nic-ports"
_ERRORS = "nic-errors"
_LINK_DOWNED = "link_downed"
# A port whose link is up waits in these states for the subnet manager, which may just be starting.
_COMING = ("INIT", "ARMED")
_LINK_UP = "LinkUp"
_SETTLE_S, _APART_S, _MARGIN_S = 3.0, 0.2, 0.5
_PATHS = (
    SiteKey("link_state_path", "text", None, "where a NIC's state is instead, with {nic} in it"),
    SiteKey(
        "link_downed_path", "text", None, "where a NIC's link_downed is instead, with {nic} in it"
    ),
)


def ports(node: NodeView, expected: Expected) -> dict[str, Port]:
    """All ports by "mlx5_0/1". Files that the site names replace the usual ones.

    Raises Absent without any, HardwareError or ValueError for one that cannot be read.
    """
    found = nics.ports(node.path("/sys"), say=node.doing)
    for name, port in found.items():
        if template := expected["link_state_path"]:
            file = _named(template, port)
            port = port._replace(state=nics.state(node.text(file, 4096).strip(), file))
        if template := expected["link_downed_path"]:
            port = port._replace(link_downed=node.number(_named(template, port)))
        found[name] = port
    return found


def _named(template: str, port: Port) -> str:
    return template.replace("{nic}", port.nic).replace("{dev_name}", port.nic)


def active(found: Mapping[str, Port]) -> dict[str, float]:
    """Rate in Gb/s (0 = not told) of each port that is ACTIVE."""
    return {name: port.rate_gbps or 0.0 for name, port in found.items() if port.state == ACTIVE}


def earlier(node: NodeView, found: Mapping[str, Port]) -> dict[str, float]:
    """Rates of the ports that were ACTIVE before this run, which is kept for the next one; {} if none can be kept."""
    try:
        before: dict[str, float] = kept.recall(node, _PORTS).get("rates", {})
        rates = before | {
            name: max(rate, before.get(name, 0.0)) for name, rate in active(found).items()
        }
        if rates != before:
            kept.remember(node, _PORTS, {"rates": rates})
        return before
    except (Absent, OSError):  # without rates from before, nic_ports alone says which ports count
        return {}


def _lacking(found: Mapping[str, Port], wanted: list[str]) -> dict[str, Port | None]:
    """The wanted ports that are not ACTIVE; None: not there."""
    return {name: found.get(name) for name in wanted if name not in active(found)}


def learn_ports(node: NodeView, expected: Expected) -> dict[str, Any]:
    """The ports that are ACTIVE, and the rate of the slowest."""
    rates = active(ports(node, expected))
    slowest = {"nic_rate_gbps": min(rates.values())} if rates and all(rates.values()) else {}
    return {"nic_ports": tuple(rates), **slowest}


@check(
    _PORTS,
    "/sys/class/infiniband/*/ports/*: state, phys_state, rate; how they were since boot",
    group=QUICK,
    settings=(
        SiteKey("nic_ports", "names", (), "ports that must be ACTIVE, for example mlx5_0/1"),
        SiteKey("nic_rate_gbps", "number", None, "Gb/s that each active port must have"),
        *_PATHS,
    ),
    learn=learn_ports,
    budget_s=4.0,
)
def nic_ports(node: NodeView, expected: Expected) -> Judgement:
    """A port is not ACTIVE, or is slower than it was. The ports of nic_ports are looked at; without it, those that
    were ACTIVE since boot. A port that waits for the subnet manager gets 3 s."""
    until_s = min(time.monotonic() + _SETTLE_S, node.deadline_s - _MARGIN_S)
    found = ports(node, expected)
    before = earlier(node, found)
    wanted = list(expected["nic_ports"] or before)  # not ports without a cable
    while (lacking := _lacking(found, wanted)) and time.monotonic() + _APART_S < until_s:
        if not all(
            port and port.state in _COMING and port.phys_state == _LINK_UP
            for port in lacking.values()
        ):
            break
        node.doing("waiting for the subnet manager")
        time.sleep(_APART_S)
        found = ports(node, expected)
    wrong = []
    for name, port in lacking.items():
        physical = f", {port.phys_state}" if port and port.phys_state else ""
        wrong.append(f"{name} is {port.state}{physical}" if port else f"{name} is not there")
    for name, rate in active(found).items():
        least = max(expected["nic_rate_gbps"] or 0.0, before.get(name, 0.0))
        if 0.0 < rate < least:
            wrong.append(f"{name} runs at {rate:g} instead of {least:g} Gb/s")
    return judged(wrong, f"{len(active(found))} of {len(found)} ports are active")


@system_check(
    _ERRORS,
    "/sys/class/infiniband/*/ports/*/counters: link_downed and errors, compared with earlier runs",
    settings=(
        SiteKey(
            "nic_link_downed_max", "count", 0, "how often a link may go down within nic_window_s"
        ),
        SiteKey(
            "nic_errors_max",
            "count",
            1000,
            "errors of a kind that a port may count within nic_window_s",
        ),
        SiteKey("nic_window_s", "seconds", 3600.0, "how long errors of a port count, in seconds"),
        *_PATHS,
    ),
)
def nic_errors(node: NodeView, expected: Expected) -> Judgement:
    """A link went down, or a port counted too many errors, within nic_window_s."""
    now: dict[str, int] = {}
    for name, port in ports(node, expected).items():
        counts = {_LINK_DOWNED: port.link_downed, **port.errors}
        now |= {f"{name} {kind}": count for kind, count in counts.items() if count is not None}
    if not now:
        raise Absent("no port keeps error counters")
    risen = kept.rises(node, _ERRORS, now, expected["nic_window_s"])
    wrong = []
    for counter, count in risen.items():
        name, _, kind = counter.partition(" ")
        if kind == _LINK_DOWNED and count > expected["nic_link_downed_max"]:
            wrong.append(f"the link of {name} went down {count} times")
        elif kind != _LINK_DOWNED and count > expected["nic_errors_max"]:
            wrong.append(f"{name} counted {count} x {kind}")
    return judged(wrong, f"{sum(risen.values())} errors lately")


# --- PCI Express ------------------------------------------------------------------------------------------------------

_DEVICES = "/sys/bus/pci/devices"
_MAX_WIDTH = 32  # a device that does not answer reads as 63 or 255


def pci_devices(node: NodeView) -> dict[str, str]:
    """Directories by name ("GPU 0000:1b:00.0"): GPUs of NVIDIA by their class, NICs by /sys/class/infiniband."""
    node.doing(f"reading {_DEVICES}")
    sysfs = node.path("/sys")
    devices = {f"GPU {address}": node.path(f"{_DEVICES}/{address}") for address in pci.gpus(sysfs)}
    for nic in nics.names(sysfs):
        device = os.path.realpath(node.path(f"/sys/class/infiniband/{nic}/device"))
        if pci.text(f"{device}/max_link_width"):  # software RDMA (rxe, siw) has no device
            devices[f"NIC {nic} ({os.path.basename(device)})"] = device
    return devices


def _lanes(directory: str, which: str) -> float | None:
    found = pci.number(f"{directory}/{which}_link_width")
    return found if found and found <= _MAX_WIDTH else None


def _gt_per_s(directory: str, which: str) -> float | None:
    """The number in "16.0 GT/s PCIe"; None for "Unknown"."""
    number, _, unit = (pci.text(f"{directory}/{which}_link_speed") or "").partition(" ")
    return (
        float(number)
        if unit.startswith("GT/s") and number.replace(".", "", 1).isdecimal()
        else None
    )


@check(
    "pcie-links",
    f"{_DEVICES}/*/current_link_* and max_link_* of GPUs and RDMA NICs and of the ports above them",
    group=QUICK,
    settings=(
        SiteKey(
            "pcie_gpu_speed",
            "bool",
            False,
            "whether a GPU's link must have full speed even when it is idle",
        ),
    ),
)
def pcie_links(node: NodeView, expected: Expected) -> Judgement:
    """A link has fewer lanes, or a NIC's less speed, than both its ends can have."""
    wrong = []
    unknown = []
    devices = pci_devices(node)
    if not devices:
        raise Absent("no GPU and no RDMA NIC is on PCI Express here")
    for name, device in devices.items():
        port = os.path.dirname(os.path.realpath(device))  # a slower slot is no fault of the device
        for read, unit in ((_lanes, "lanes"), (_gt_per_s, "GT/s")):
            ends = [most for end in (device, port) if (most := read(end, "max"))]
            now, most = read(device, "current"), min(ends, default=None)
            idle = read is _gt_per_s and name.startswith("GPU") and not expected["pcie_gpu_speed"]
            if now is None or most is None:
                unknown += [f"{name} does not tell the width of its link"] if read is _lanes else []
            elif now < most and not idle:  # idle GPUs slow their links down
                wrong.append(f"{name} has {now:g} instead of {most:g} {unit}")
    return judged(wrong, f"{len(devices)} links have all their lanes", unknown)


CHECKS = (nic_ports, nic_errors, pcie_links)
