"""InfiniBand and RoCE: ports, their error counters, and the NICs that are near each GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nvrx_slurm.health import kept
from nvrx_slurm.health.check import QUICK, Expected, NodeView, Setting, Verdict, check, judged, listed, system_check
from nvrx_slurm.system import nics, pci
from nvrx_slurm.system.hardware import Absent
from nvrx_slurm.system.nics import ACTIVE, Port

_PORTS, _ERRORS = "nic-ports", "nic-errors"
_LINK_DOWNED = "link_downed"
# A port whose link is up waits in these states for the subnet manager, which may just be starting.
_COMING = ("INIT", "ARMED")
_LINK_UP = "LinkUp"
_SETTLE_S, _APART_S, _MARGIN_S = 3.0, 0.2, 0.5
_BUDGET_S = 4.0
_NIC_PORTS = Setting("nic_ports", "names", (), "ports that must be ACTIVE, for example mlx5_0/1")
_PATHS = (
    Setting("link_state_path", "text", None, "where a NIC's state is instead, with {nic} in it"),
    Setting("link_downed_path", "text", None, "where a NIC's link_downed is instead, with {nic} in it"),
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


# --- ports ----------------------------------------------------------------------------------------------------------


class PortFacts(NamedTuple):
    """The ports now; `before`: rate in Gb/s (0 = not told) of each port that was ACTIVE at a look since boot."""

    ports: Mapping[str, Port]
    before: Mapping[str, float]


def earlier(node: NodeView, found: Mapping[str, Port]) -> dict[str, float]:
    """Rates of the ports that were ACTIVE before this look, which is kept for the next one; {} if none can be kept."""
    active = {name: port.rate_gbps or 0.0 for name, port in found.items() if port.state == ACTIVE}
    try:
        with kept.alone(node, _PORTS):
            before: dict[str, float] = kept.recall(node, _PORTS).get("rates", {})
            rates = before | {name: max(rate, before.get(name, 0.0)) for name, rate in active.items()}
            if rates != before:
                kept.remember(node, _PORTS, {"rates": rates})
            return before
    except (Absent, OSError):  # nic_ports alone decides then
        return {}


def gather_ports(node: NodeView, expected: Expected) -> PortFacts:
    """The ports now and before. Ports that only wait for the subnet manager are read again for `_SETTLE_S`."""
    until_s = min(time.monotonic() + _SETTLE_S, node.deadline_s - _MARGIN_S)
    found = ports(node, expected)
    before = earlier(node, found)
    while _are_coming(found, _wanted(before, expected)) and time.monotonic() + _APART_S < until_s:
        node.doing("waiting for the subnet manager")
        time.sleep(_APART_S)
        found = ports(node, expected)
    return PortFacts(found, before)


def _are_coming(found: Mapping[str, Port], wanted: Iterable[str]) -> bool:
    """Whether some wanted ports are not ACTIVE, and all of those only wait for the subnet manager."""
    lacking = [found.get(name) for name in wanted if _not_active(name, found.get(name))]
    return bool(lacking) and all(port and port.state in _COMING and port.phys_state == _LINK_UP for port in lacking)


def _wanted(before: Mapping[str, float], expected: Expected) -> tuple[str, ...]:
    """Ports that must be ACTIVE: those that the site names, else those that were; not ports without a cable."""
    return tuple(expected["nic_ports"] or before)


def _not_active(name: str, port: Port | None) -> str:
    if port is None:
        return f"{name} is not there"
    physical = f", {port.phys_state}" if port.phys_state else ""
    return "" if port.state == ACTIVE else f"{name} is {port.state}{physical}"


def learn_ports(facts: PortFacts) -> dict[str, Any]:
    """The ports that are ACTIVE, and the rate of the slowest."""
    active = {name: port for name, port in facts.ports.items() if port.state == ACTIVE}
    rates = [port.rate_gbps or 0.0 for port in active.values()]
    learned: dict[str, Any] = {"nic_ports": tuple(active)}
    return {**learned, "nic_rate_gbps": min(rates)} if rates and all(rates) else learned


@check(
    _PORTS,
    gather_ports,
    "/sys/class/infiniband/*/ports/*: state, phys_state, rate; how they were since boot",
    group=QUICK,
    settings=(_NIC_PORTS, Setting("nic_rate_gbps", "number", None, "Gb/s that each active port must have"), *_PATHS),
    learn=learn_ports,
    budget_s=_BUDGET_S,
)
def nic_ports(facts: PortFacts, expected: Expected) -> tuple[Verdict, str]:
    """A port of nic_ports (without it: that was ACTIVE since boot) is not ACTIVE (where it waits for the subnet
    manager: for 3 s), or is slower than it was."""
    wanted = _wanted(facts.before, expected)
    wrong = [said for name in wanted if (said := _not_active(name, facts.ports.get(name)))]
    active = {name: port for name, port in facts.ports.items() if port.state == ACTIVE}
    for name, port in active.items():
        least = max(expected["nic_rate_gbps"] or 0.0, facts.before.get(name, 0.0))
        if port.rate_gbps is not None and port.rate_gbps < least:
            wrong.append(f"{name} runs at {port.rate_gbps:g} instead of {least:g} Gb/s")
    return judged(wrong, f"{len(active)} of {len(facts.ports)} ports are active")


# --- errors ---------------------------------------------------------------------------------------------------------


def gather_errors(node: NodeView, expected: Expected) -> dict[str, int]:
    """How counters of all ports ("mlx5_0/1 link_downed") rose within the window."""
    now = {}
    for name, port in ports(node, expected).items():
        if port.link_downed is not None:
            now[f"{name} {_LINK_DOWNED}"] = port.link_downed
        now |= {f"{name} {counter}": count for counter, count in port.errors.items()}
    if not now:
        raise Absent("no port keeps error counters")
    return kept.rises(node, _ERRORS, now, expected["nic_window_s"])


@system_check(
    _ERRORS,
    gather_errors,
    "/sys/class/infiniband/*/ports/*/counters: link_downed and errors, compared with earlier looks",
    settings=(
        Setting("nic_link_downed_max", "count", 0, "how often a link may go down within nic_window_s"),
        Setting("nic_errors_max", "count", 1000, "errors of a kind that a port may count within nic_window_s"),
        Setting("nic_window_s", "seconds", 3600.0, "how long errors of a port count, in seconds"),
        *_PATHS,
    ),
)
def nic_errors(risen: Mapping[str, int], expected: Expected) -> tuple[Verdict, str]:
    """A link went down, or a port counted too many errors, within nic_window_s."""
    wrong = []
    for counter, count in risen.items():
        name, _, kind = counter.partition(" ")
        if kind == _LINK_DOWNED and count > expected["nic_link_downed_max"]:
            wrong.append(f"the link of {name} went down {count} times")
        elif kind != _LINK_DOWNED and count > expected["nic_errors_max"]:
            wrong.append(f"{name} counted {count} x {kind}")
    return judged(wrong, f"{sum(risen.values())} errors lately")


# --- NICs of GPUs ---------------------------------------------------------------------------------------------------


class NearFacts(NamedTuple):
    """NICs that are nearest to each GPU, by its PCI address; those of all that have an ACTIVE port; see PortFacts."""

    near: Mapping[str, tuple[str, ...]]
    active: frozenset[str]
    before: Mapping[str, float]


def gather_near(node: NodeView, expected: Expected) -> NearFacts:
    """By the PCI tree of sysfs, or of `pci_topo_file`."""
    root = node.path("/sys")
    addresses = pci.gpus(root)
    if not addresses:
        raise Absent("there is no GPU")
    found, before = gather_ports(node, expected)
    active = frozenset(port.nic for port in found.values() if port.state == ACTIVE)
    if not active:
        raise Absent("no NIC port is active")
    file = expected["pci_topo_file"]
    node.doing(f"reading {file}" if file else "reading the PCI tree")
    tree = pci.topology(node.path(file)) if file else None

    def near(address: str) -> tuple[str, ...]:
        try:
            return tuple(sorted(nics.nearest(root, address, tree)))
        except Absent:
            return ()

    return NearFacts({address: near(address) for address in addresses}, active, before)


@check(
    "gpu-nics",
    gather_near,
    "/sys/bus/pci/devices (or pci_topo_file): the way to each GPU and NIC; states of the NICs' ports",
    group=QUICK,
    settings=(
        Setting("gpu_nics", "names", (), "the NIC next to each GPU, as 0000:1b:00.0=mlx5_0"),
        _NIC_PORTS,
        Setting("pci_topo_file", "text", None, "XML with the PCI tree, as for NCCL_TOPO_FILE"),
        *_PATHS,
    ),
    learn=lambda facts: {"gpu_nics": tuple(f"{gpu}={nic}" for gpu, near in facts.near.items() for nic in near)},
    budget_s=_BUDGET_S,
)
def gpu_nics(facts: NearFacts, expected: Expected) -> tuple[Verdict, str]:
    """The NICs nearest to a GPU had an active port and have none, or are not the NIC of gpu_nics."""
    if not any(facts.near.values()):
        return Verdict.UNKNOWN, "no GPU has a NIC near it on the PCI tree; give pci_topo_file"
    wrong = []
    idle = {gpu: near for gpu, near in facts.near.items() if not facts.active & set(near)}
    wanted = {name.partition("/")[0] for name in _wanted(facts.before, expected)}
    for gpu, near in idle.items():
        if not near and expected["pci_topo_file"]:  # without the file a node may have fewer NICs than GPUs
            wrong.append(f"GPU {gpu} has no NIC near it")
        elif wanted & set(near):
            wrong.append(f"{listed(near)}, nearest to GPU {gpu}, has no active port")
    for gpu, _, nic in (pair.partition("=") for pair in expected["gpu_nics"]):
        if nic.strip() not in facts.near.get(gpu.strip().lower(), ()):
            wrong.append(f"GPU {gpu.strip().lower()} is not next to {nic.strip()}")
    return judged(wrong, f"{len(facts.near) - len(idle)} GPUs have an active NIC near them")


CHECKS = (nic_ports, nic_errors, gpu_nics)
