"""Processors, memory, services and the clock, by the kernel's files and systemd."""

from __future__ import annotations

import os
import re
import time

from nvrx_slurm.health.check import (
    Expected,
    Judgement,
    NodeView,
    SiteKey,
    judged,
    listed,
    system_check,
    whole,
)
from nvrx_slurm.system import pci
from nvrx_slurm.system.hardware import Absent

# --- processors -------------------------------------------------------------------------------------------------------

_ONLINE = "/sys/devices/system/cpu/online"


def cpus_online(node: NodeView) -> int:
    """The length of the kernel's list. Raises OSError, and ValueError that names the file."""
    text = node.text(_ONLINE)
    found = pci.ranges(text)
    if found is None:
        raise ValueError(f"{_ONLINE} holds {text[:40]!r}, which is no list of CPUs")
    return len(found)


@system_check(
    "cpu-count",
    _ONLINE,
    settings=(SiteKey("cpus", "count", None, "logical CPUs online"),),
    learn=lambda node, expected: {"cpus": cpus_online(node)},
)
def cpu_count(node: NodeView, expected: Expected) -> Judgement:
    """Not as many logical CPUs are online as expected."""
    online = cpus_online(node)
    wanted = expected["cpus"]
    wrong = (
        [f"{online} CPUs are online instead of {wanted}"] if wanted not in (None, online) else []
    )
    return judged(wrong, f"{online} CPUs are online")


# --- memory -----------------------------------------------------------------------------------------------------------

_KIB_PER_GB = 1e9 / 1024
_MEMORY = re.compile(r"^(MemTotal|MemAvailable): +([0-9]{1,20}) kB", re.MULTILINE)
_EDAC = "/sys/devices/system/edac/mc"
_INTERRUPTS = "/proc/interrupts"


def memory_gb(node: NodeView) -> tuple[float, float]:
    """(total, available) memory in 10^9 bytes, by /proc/meminfo (proc(5)). Raises OSError and ValueError."""
    rows = dict(_MEMORY.findall(node.text("/proc/meminfo")))
    if len(rows) < 2:
        raise ValueError("/proc/meminfo has no MemTotal or MemAvailable")
    return int(rows["MemTotal"]) / _KIB_PER_GB, int(rows["MemAvailable"]) / _KIB_PER_GB


# Other versions of the kernel keep a little more or less for themselves; a lost module is far more than that.
@system_check(
    "memory-size",
    "/proc/meminfo",
    settings=(
        SiteKey("memory_gb", "number", None, "memory that the kernel must see, in 10^9 bytes"),
        SiteKey("memory_free_gb", "number", None, "memory that must be available, in 10^9 bytes"),
    ),
    learn=lambda node, expected: {"memory_gb": int(memory_gb(node)[0] * 0.99)},
)
def memory_size(node: NodeView, expected: Expected) -> Judgement:
    """The node has less memory than it should, or less available than needed."""
    total, available = memory_gb(node)
    rows = (
        (total, "", expected["memory_gb"]),
        (available, " available", expected["memory_free_gb"]),
    )
    wrong = [
        f"{gb:.0f} GB of memory{what} instead of {least:g} GB"
        for gb, what, least in rows
        if least is not None and gb < least
    ]
    return judged(wrong, f"{total:.0f} GB of memory")


@system_check("memory-errors", f"{_EDAC}/mc*/ue_count and the row MCE of {_INTERRUPTS}")
def memory_errors(node: NodeView, expected: Expected) -> Judgement:
    """An uncorrected memory error or a machine check exception happened since boot."""
    controllers = [
        name for name in node.names(_EDAC) if name.startswith("mc") and name[2:].isdecimal()
    ]
    errors = {name: node.number(f"{_EDAC}/{name}/ue_count") for name in controllers}
    rows = node.text(_INTERRUPTS, 16 << 20).splitlines()
    for name, _, rest in (row.partition(":") for row in rows):
        if name.strip() == "MCE":  # counts by CPU, then words
            errors["machine checks"] = sum(
                whole(word, _INTERRUPTS) for word in rest.split() if word.isdecimal()
            )
    if not errors:
        raise Absent("the kernel counts no memory errors here (no EDAC driver, no MCE)")
    wrong = [
        f"uncorrected memory errors: {count} on {name}" for name, count in errors.items() if count
    ]
    return judged(wrong, "no uncorrected error since boot")


# --- services and the clock -------------------------------------------------------------------------------------------

_SYSTEMCTL = "/usr/bin/systemctl"
_STA_UNSYNC = 0x0040  # adjtimex(2)
_STATUS_AT = 10  # field `status` of struct timex, counted in ints
_MARGIN_S = 0.3
_SERVICES = SiteKey("services", "names", (), "services that must run, for example slurmd, munge")


def running_services(node: NodeView, names: list[str]) -> list[str]:
    """The services of `names` that run, by systemctl. Raises Absent where systemd does not run, OSError without an
    answer."""
    from nvrx_slurm.child import bounded_process

    if not node.live:
        raise Absent("systemd is asked on the node itself only")
    node.doing("asking systemctl about the services")
    left_s = max(0.1, node.deadline_s - _MARGIN_S - time.monotonic())
    command = [
        _SYSTEMCTL,
        "is-active",
        *(f"{name.removesuffix('.service')}.service" for name in names),
    ]
    try:
        ended = bounded_process.run(command, os.environ, left_s, dies_with_parent=False)
    except FileNotFoundError:
        raise Absent("systemd does not run here") from None
    if ended.code is None:
        raise OSError(0, "systemctl did not answer")
    states = ended.stdout.decode(errors="replace").split()
    if len(states) != len(names):
        raise Absent("systemd does not run here")
    return [
        name for name, state in zip(names, states, strict=True) if state in ("active", "reloading")
    ]


@system_check(
    "services",
    "systemctl is-active",
    settings=(_SERVICES,),
    group="",
    only_if=_SERVICES.name,
    budget_s=4.0,
    learn=lambda node, expected: {
        "services": tuple(running_services(node, list(expected["services"])))
    },
)
def services(node: NodeView, expected: Expected) -> Judgement:
    """A service of `services` does not run."""
    wanted = list(expected["services"])
    running = running_services(node, wanted)
    down = [f"{name} is not running" for name in wanted if name not in running]
    return judged(down, f"running: {listed(running, 6)}")


@system_check("time-sync", "adjtimex(2)", contexts=("periodic", "manual"), on_fail="warn")
def time_sync(node: NodeView, expected: Expected) -> Judgement:
    """The kernel's clock is not synchronized."""
    import ctypes

    if not node.live:
        raise Absent("the kernel's clock is asked on the node itself only")
    timex = (ctypes.c_int * 128)()  # larger than struct timex; modes 0: nothing is set
    if ctypes.CDLL(None, use_errno=True).adjtimex(timex) == -1:
        raise OSError(ctypes.get_errno(), f"adjtimex: {os.strerror(ctypes.get_errno())}")
    wrong = ["the clock is not synchronized: does a time daemon run (for chrony: with rtcsync)?"]
    return judged(wrong if timex[_STATUS_AT] & _STA_UNSYNC else [], "the clock is synchronized")


# --- the node's name ----------------------------------------------------------------------------

_HOSTS = "/etc/hosts"
_HOSTNAME = "/proc/sys/kernel/hostname"


@system_check(
    "own-name",
    f"{_HOSTS}, {_HOSTNAME}; in jobs of several nodes",
    contexts=("preflight", "manual"),
    on_fail="warn",
)
def own_name(node: NodeView, expected: Expected) -> Judgement:
    """The node's own name means loopback, so that gloo tells other nodes an address that is theirs."""
    if node.env.get("SLURM_JOB_NUM_NODES", "1") == "1":
        raise Absent("this is no job of several nodes")
    name = node.text(_HOSTNAME, 256, absent=f"there is no {_HOSTNAME}").strip()
    short = name.partition(".")[0]
    if node.env.get("SLURMD_NODENAME", short).partition(".")[0] != short:
        raise Absent("Slurm has another name for this node")
    if node.env.get("GLOO_SOCKET_IFNAME"):
        raise Absent("GLOO_SOCKET_IFNAME names the interface")
    rows = [
        line.partition("#")[0].split()
        for line in node.text(_HOSTS, absent=f"there is no {_HOSTS}").splitlines()
    ]
    addresses = [row[0] for row in rows if name in row[1:] or short in row[1:]]
    is_loopback = addresses and (addresses[0].startswith("127.") or addresses[0] == "::1")
    why = f"{_HOSTS} has {name} at {addresses[0]}: set GLOO_SOCKET_IFNAME" if is_loopback else ""
    return judged([why] if why else [], f"{name} is no name of loopback")


CHECKS = (memory_size, memory_errors, cpu_count, services, time_sync, own_name)
