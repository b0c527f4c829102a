"""InfiniBand and RoCE ports of this node, from sysfs (Documentation/ABI/stable/sysfs-class-infiniband)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from nvrx_slurm.system import pci
from nvrx_slurm.system.hardware import Absent, HardwareError
from nvrx_slurm.system.pci import Place

_CLASS = "class/infiniband"
SYSROOT_ENV = "NVRX_SYSROOT"
ACTIVE = "ACTIVE"
_STATES = frozenset({"NOP", "DOWN", "INIT", "ARMED", ACTIVE, "ACTIVE_DEFER"})
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec\b")
ERRORS = (
    "excessive_buffer_overrun_errors",
    "link_error_recovery",
    "local_link_integrity_errors",
    "port_rcv_errors",
    "symbol_error",
)


class Port(NamedTuple):
    """`state`: the kernel's word (DOWN, INIT, ARMED, ACTIVE, ACTIVE_DEFER); `link_downed`: how often the link went
    down since the counter was reset, None if it is not kept; `phys_state`: "LinkUp", "Polling", ...; `rate_gbps`:
    Gb/s, None if not told; `errors`: the counters of ERRORS that are kept."""

    nic: str
    state: str
    link_downed: int | None
    phys_state: str = ""
    rate_gbps: float | None = None
    errors: Mapping[str, int] = {}


def sysfs_root(env: Mapping[str, str]) -> Place:
    """Where sysfs is: below NVRX_SYSROOT (for containers that have the host's elsewhere, and recorded nodes)."""
    return f"{(env.get(SYSROOT_ENV) or '/').rstrip('/')}/sys"


def ports(root: Place, say: Callable[[str], object] = len) -> dict[str, Port]:
    """All ports by "<nic>/<port>", as in "mlx5_0/1". `say` is told which one is read next.

    Raises Absent without any, HardwareError if one cannot be read.
    """
    found = {}
    for nic in names(root):
        for number in pci.listed(f"{root}/{_CLASS}/{nic}/ports"):
            if number.isdecimal():
                say(f"reading port {number} of NIC {nic}")
                found[f"{nic}/{number}"] = _port(
                    nic, number, f"{root}/{_CLASS}/{nic}/ports/{number}"
                )
    if not found:
        raise Absent(f"no InfiniBand or RoCE port below {root}/{_CLASS}")
    return found


def names(root: Place) -> list[str]:
    """All InfiniBand and RoCE NICs."""
    return pci.listed(f"{root}/{_CLASS}")


def nearest(root: Place, pci_address: str) -> set[str]:
    """NICs that share the longest way on the PCI tree with the device at `pci_address` (several if equally near).

    Where the device is on a tree without any NIC (as on GB200): those of its NUMA node. Raises Absent without any.
    """
    addresses = {
        nic: os.path.basename(os.path.realpath(f"{root}/{_CLASS}/{nic}/device"))
        for nic in names(root)
    }
    start = pci.way(root, f"{root}/bus/pci/devices/{pci_address}")
    if not start:
        raise Absent(f"no PCI device {pci_address} is below {root}")
    ways = {nic: pci.way(root, f"{root}/{_CLASS}/{nic}/device") for nic in addresses}
    shared = {nic: len(os.path.commonprefix([start, other])) for nic, other in ways.items()}
    found = {nic for nic, parts in shared.items() if parts and parts == max(shared.values())}
    node = pci.numa_node(root, pci_address)
    if not found and node is not None:
        found = {nic for nic, at in addresses.items() if pci.numa_node(root, at) == node}
    if not found:
        raise Absent(f"no NIC is near the PCI device {pci_address}")
    return found


def _port(nic: str, port: str, directory: str) -> Port:
    said = pci.text(f"{directory}/state")
    if said is None:
        raise HardwareError(f"NIC {nic} port {port}: its state cannot be read")
    rate = _RATE.match(pci.text(f"{directory}/rate") or "")  # "400 Gb/sec (4X NDR)"
    counters = {
        name: pci.number(f"{directory}/counters/{name}") for name in ("link_downed", *ERRORS)
    }
    return Port(
        nic=nic,
        state=state(said, f"{directory}/state"),
        link_downed=counters.pop("link_downed"),
        phys_state=word(pci.text(f"{directory}/phys_state") or ""),
        rate_gbps=float(rate[1]) if rate else None,
        errors={name: count for name, count in counters.items() if count is not None},
    )


def word(state: str) -> str:
    """ "ACTIVE" of "4: ACTIVE"."""
    return state.partition(":")[2].strip() or state


def state(text: str, file: str) -> str:
    """The kernel's word for a port's state in `file`. Raises HardwareError for anything else: it tells nothing."""
    found = word(text)
    if found not in _STATES:
        raise HardwareError(f"{file} holds {text[:40]!r}, which is no state of a port")
    return found
