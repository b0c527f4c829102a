"""InfiniBand and RoCE: ports, their error counters, and the NICs that are near each GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from nvrx_slurm.health.check import QUICK, Check, Expected, NodeView, Setting, Verdict, listed
from nvrx_slurm.health.checks import counters
from nvrx_slurm.system import nics, pci
from nvrx_slurm.system.hardware import Absent, HardwareError
from nvrx_slurm.system.nics import ACTIVE, Port

_PORTS, _ERRORS = "nic-ports", "nic-errors"
_LINK_DOWNED = "link_downed"
_LINK_DOWNED_END = 255  # IBA PortCounters: 8 bits that do not wrap
# A port whose link is up waits in these states for the subnet manager, which may just be starting.
_COMING = ("INIT", "ARMED")
_LINK_UP = "LinkUp"
_SETTLE_S, _APART_S, _MARGIN_S = 3.0, 0.2, 0.5
_BUDGET_S = 4.0


def ports(node: NodeView, expected: Expected) -> dict[str, Port]:
    """All ports by "mlx5_0/1". Where the site says how their files are called, only those are believed.

    Raises Absent without any, ValueError for one that cannot be read.
    """
    try:
        return _ports(node, expected)
    except HardwareError as failure:
        raise ValueError(str(failure)) from None


def _ports(node: NodeView, expected: Expected) -> dict[str, Port]:
    found = nics.ports(node.path("/sys"), say=node.doing)
    for name, port in found.items():
        if expected["link_state_path"]:
            file = _named(expected["link_state_path"], port)
            port = port._replace(state=nics.state(node.text(file, 4096).strip(), file))
        if expected["link_downed_path"]:
            port = port._replace(link_downed=node.number(_named(expected["link_downed_path"], port)))
        found[name] = port
    return found


def _named(template: str, port: Port) -> str:
    return template.replace("{nic}", port.nic).replace("{dev_name}", port.nic)


# --- ports ----------------------------------------------------------------------------------------------------------


class Earlier(NamedTuple):
    """Rate in Gb/s (0 = not told) of each port that was ACTIVE at an earlier look since boot; `why` that cannot be
    known or kept, though there is a place for it."""

    rates: Mapping[str, float] = {}
    why: str = ""


def earlier(node: NodeView, found: Mapping[str, Port]) -> Earlier:
    """What was known before this look at the ports, which is kept for the next one; nothing where nothing can be."""
    active = {name: port.rate_gbps or 0.0 for name, port in found.items() if port.state == ACTIVE}
    before, why = dict[str, float](), ""
    try:
        with counters.alone(node, _PORTS):
            try:
                before = _rates(counters.recall(node, _PORTS))
            except ValueError as error:  # said this once, as it is replaced
                why = str(error)
            rates = before | {name: max(rate, before.get(name, 0.0)) for name, rate in active.items()}
            if why or rates != before:
                counters.remember(node, _PORTS, {"rates": rates})
    except Absent:
        return Earlier()
    except ValueError as error:
        why = str(error)
    except OSError as error:
        why = f"how ports were cannot be kept: {error.strerror or error}"
    return Earlier(before, why)


class PortFacts(NamedTuple):
    """`before`: see `Earlier`."""

    ports: Mapping[str, Port]
    before: Earlier


def gather_ports(node: NodeView, expected: Expected) -> PortFacts:
    """The ports now, and how they were. What only waits for the subnet manager is looked at again for `_SETTLE_S`."""
    until_s = min(time.monotonic() + _SETTLE_S, node.deadline_s - _MARGIN_S)
    found = ports(node, expected)
    before = earlier(node, found)
    while _are_coming(found, _wanted(before, expected)) and time.monotonic() + _APART_S < until_s:
        node.doing("waiting for the subnet manager")
        time.sleep(_APART_S)
        found = ports(node, expected)
    return PortFacts(found, before)


def _are_coming(found: Mapping[str, Port], wanted: Iterable[str]) -> bool:
    """Whether all that some wanted ports lack is the subnet manager's word."""
    lacking = [found.get(name) for name in wanted if _not_active(name, found.get(name))]
    return bool(lacking) and all(port and port.state in _COMING and port.phys_state == _LINK_UP for port in lacking)


def _rates(kept: Mapping[str, Any]) -> dict[str, float]:
    """Raises ValueError for what is damaged."""
    try:
        return {str(name): float(rate) for name, rate in kept.get("rates", {}).items()}
    except (TypeError, ValueError, AttributeError):
        raise ValueError("how ports were is ignored: it is damaged") from None


def judge_ports(facts: PortFacts, expected: Expected) -> tuple[Verdict, str]:
    """Fails for a port of `nic_ports`, or that was ACTIVE before, which is not; for one that got slower."""
    wanted = _wanted(facts.before, expected)
    wrong = [said for name in wanted if (said := _not_active(name, facts.ports.get(name)))]
    for name, port in facts.ports.items():
        least = max(expected["nic_rate_gbps"] or 0.0, facts.before.rates.get(name, 0.0))
        if port.state == ACTIVE and port.rate_gbps is not None and port.rate_gbps < least:
            wrong.append(f"{name} runs at {port.rate_gbps:g} instead of {least:g} Gb/s")
    if wrong:
        return Verdict.FAIL, listed(wrong)
    odd = [port.odd for port in facts.ports.values() if port.odd and port.state == ACTIVE]
    if odd or facts.before.why:
        return Verdict.UNKNOWN, facts.before.why or listed(odd)
    active = [name for name, port in facts.ports.items() if port.state == ACTIVE]
    return Verdict.PASS, f"{len(active)} of {len(facts.ports)} ports are active"


def _wanted(before: Earlier, expected: Expected) -> tuple[str, ...]:
    """Ports that must be ACTIVE: those that the site names, else those that were; not what was never cabled."""
    return tuple(expected["nic_ports"] or before.rates)


def _not_active(name: str, port: Port | None) -> str:
    if port is None:
        return f"{name} is not there"
    physical = f", {port.phys_state}" if port.phys_state else ""
    return "" if port.state == ACTIVE else f"{name} is {port.state}{physical}"


def learn_ports(facts: PortFacts) -> dict[str, Any]:
    """The ports that are ACTIVE, and the rate of the slowest."""
    active = {name: port for name, port in facts.ports.items() if port.state == ACTIVE}
    rates = [port.rate_gbps for port in active.values()]
    learned: dict[str, Any] = {"nic_ports": tuple(active)}
    return {**learned, "nic_rate_gbps": min(filter(None, rates))} if rates and all(rates) else learned


# --- errors ---------------------------------------------------------------------------------------------------------


class ErrorFacts(NamedTuple):
    """How counters ("mlx5_0/1 link_downed") rose within the window; ports whose link_downed can rise no more."""

    look: counters.Look
    full: tuple[str, ...]


def gather_errors(node: NodeView, expected: Expected) -> ErrorFacts:
    """All error counters of all ports."""
    found = ports(node, expected)
    now = {f"{name} {counter}": count for name, port in found.items() for counter, count in _counters(port)}
    if not now:
        raise Absent("no port keeps error counters")
    full = tuple(name for name, port in found.items() if port.link_downed == _LINK_DOWNED_END)
    return ErrorFacts(counters.look(node, _ERRORS, now, expected["nic_window_s"]), full)


def _counters(port: Port) -> Iterable[tuple[str, int]]:
    if port.link_downed is not None:
        yield _LINK_DOWNED, port.link_downed
    yield from port.errors.items()


def judge_errors(facts: ErrorFacts, expected: Expected) -> tuple[Verdict, str]:
    """Fails where a link went down more than `nic_link_downed_max` times, or counted more than `nic_errors_max`."""
    wrong = []
    for counter, count in facts.look.risen.items():
        name, _, kind = counter.partition(" ")
        if kind == _LINK_DOWNED and count > expected["nic_link_downed_max"]:
            wrong.append(f"the link of {name} went down {count} times")
        elif kind != _LINK_DOWNED and count > expected["nic_errors_max"]:
            wrong.append(f"{name} counted {count} x {kind}")
    if wrong:
        return Verdict.FAIL, listed(wrong)
    if facts.look.silent:
        return Verdict.UNKNOWN, f"{listed(facts.look.silent)} reads all ones: does the NIC answer?"
    if facts.full:
        return Verdict.UNKNOWN, f"link_downed of {listed(facts.full)} is at its end; reset it with perfquery -R"
    return Verdict.PASS, f"nothing to speak of lately{facts.look.note}"


# --- NICs of GPUs ---------------------------------------------------------------------------------------------------


class NearFacts(NamedTuple):
    """NICs that are nearest to each GPU, by its PCI address; those of all that have an ACTIVE port; see `Earlier`."""

    near: Mapping[str, tuple[str, ...]]
    active: frozenset[str]
    before: Earlier


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
    ways = nics.ways(root, tree)
    near = {address: _near(root, address, tree, ways) for address in addresses}
    return NearFacts(near, active, before)


def _near(root: str, address: str, tree: Mapping[str, pci.Way] | None, ways: Mapping[str, pci.Way]) -> tuple[str, ...]:
    try:
        return tuple(sorted(nics.nearest(root, address, tree, ways)))
    except Absent:
        return ()


def judge_near(facts: NearFacts, expected: Expected) -> tuple[Verdict, str]:
    """Fails for a GPU whose nearest NICs all lost their active ports, or are not those of `gpu_nics`."""
    if not any(facts.near.values()):
        return Verdict.UNKNOWN, "no GPU has a NIC near it on the PCI tree; give pci_topo_file"
    wrong = []
    idle = {gpu: near for gpu, near in facts.near.items() if not facts.active & set(near)}
    wanted = {name.partition("/")[0] for name in _wanted(facts.before, expected)}
    for gpu, near in idle.items():
        if not near and expected["pci_topo_file"]:  # which says where they are; a node may have fewer NICs than GPUs
            wrong.append(f"GPU {gpu} has no NIC near it")
        elif wanted & set(near):
            wrong.append(f"{listed(near)}, nearest to GPU {gpu}, has no active port")
    has = set(_pairs(facts))
    wrong += [
        f"GPU {gpu} is not next to {nic}" for gpu, nic in map(_pair, expected["gpu_nics"]) if (gpu, nic) not in has
    ]
    if wrong:
        return Verdict.FAIL, listed(wrong)
    if idle and facts.before.why:
        return Verdict.UNKNOWN, facts.before.why
    return Verdict.PASS, f"{len(facts.near) - len(idle)} GPUs have an active NIC near them"


def _pairs(facts: NearFacts) -> list[tuple[str, str]]:
    return [(gpu, nic) for gpu, near in facts.near.items() for nic in near]


def _pair(text: str) -> tuple[str, str]:
    gpu, _, nic = text.partition("=")
    return gpu.strip().lower(), nic.strip()


_NIC_PORTS = Setting("nic_ports", "names", (), "ports that must be ACTIVE, for example mlx5_0/1")
_PATHS = (
    Setting("link_state_path", "text", None, "where a NIC's state is instead, with {nic} in it"),
    Setting("link_downed_path", "text", None, "where a NIC's link_downed is instead, with {nic} in it"),
)

CHECKS = (
    Check(
        name=_PORTS,
        lane=QUICK,
        reads="/sys/class/infiniband/*/ports/*: state, phys_state, rate; how they were since boot",
        fails="A port of nic_ports (without it: that was ACTIVE since boot) is not ACTIVE (where it"
        " waits for the subnet manager: for 3 s), or is slower than it was.",
        gather=gather_ports,
        judge=judge_ports,
        settings=(
            _NIC_PORTS,
            Setting("nic_rate_gbps", "number", None, "Gb/s that each active port must have"),
            *_PATHS,
        ),
        learn=learn_ports,
        budget_s=_BUDGET_S,
    ),
    Check(
        name=_ERRORS,
        lane=QUICK,
        reads="/sys/class/infiniband/*/ports/*/counters: link_downed and errors, compared with earlier looks",
        fails="A link went down, or a port counted too many errors, within nic_window_s.",
        gather=gather_errors,
        judge=judge_errors,
        contexts=("prolog", "epilog", "periodic", "manual"),
        settings=(
            Setting("nic_link_downed_max", "count", 0, "how often a link may go down within nic_window_s"),
            Setting("nic_errors_max", "count", 1000, "errors of a kind that a port may count within nic_window_s"),
            Setting("nic_window_s", "seconds", 3600.0, "how long errors of a port count, in seconds"),
            *_PATHS,
        ),
        reuse_s=20.0,
    ),
    Check(
        name="gpu-nics",
        lane=QUICK,
        reads="/sys/bus/pci/devices (or pci_topo_file): the way to each GPU and NIC; states of the NICs' ports",
        fails="The NICs nearest to a GPU had an active port and have none, or are not the NIC of gpu_nics.",
        gather=gather_near,
        judge=judge_near,
        settings=(
            Setting("gpu_nics", "names", (), "the NIC next to each GPU, as 0000:1b:00.0=mlx5_0"),
            _NIC_PORTS,
            Setting("pci_topo_file", "text", None, "XML with the PCI tree, as for NCCL_TOPO_FILE"),
            *_PATHS,
        ),
        learn=lambda facts: {"gpu_nics": tuple(f"{gpu}={nic}" for gpu, nic in _pairs(facts))},
        budget_s=_BUDGET_S,
    ),
)
