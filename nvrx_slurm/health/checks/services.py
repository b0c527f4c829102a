"""Services that a node needs, and its clock's synchronization."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from nvrx_slurm.health.check import Expected, NodeView, Setting, Verdict, judged, listed, system_check

_SYSTEMCTL = "/usr/bin/systemctl"
_KERNEL_THREAD = "kthreadd"  # parent of the others; a process that sees it sees the node's processes, not a container's
_COMM = 15  # characters of a name that the kernel keeps
_TIME_DAEMONS = ("chronyd", "ntpd", "systemd-timesyn", "ptp4l", "phc2sys")
_STA_UNSYNC = 0x0040  # adjtimex(2)
_STATUS_AT = 10  # field `status` of struct timex, counted in ints
_MARGIN_S = 0.3
_SERVICES = Setting("services", "names", (), "services that must run, for example slurmd, munge")


def gather_services(node: NodeView, expected: Expected) -> dict[str, bool | None]:
    """Whether each of `services` runs: by systemctl, which knows units without processes, too; else by name.

    None where it is not known: in a container, or with /proc mounted hidepid, the node's processes are not seen.
    """
    wanted = [name.removesuffix(".service") for name in expected["services"]]
    states = _states(node, wanted) if node.live else []
    if len(states) == len(wanted):
        return {name: state in ("active", "reloading") for name, state in zip(wanted, states, strict=True)}
    names = running(node)
    absent = False if _KERNEL_THREAD in names else None
    return {name: bool({name[:_COMM], f"{name}d"[:_COMM]} & names) or absent for name in wanted}


def _states(node: NodeView, names: Iterable[str]) -> list[str]:
    """The words of systemd, [] where it does not run. Raises OSError if it does not answer."""
    from nvrx_slurm.child import bounded_process

    node.doing("asking systemctl about the services")
    left_s = max(0.1, node.deadline_s - _MARGIN_S - time.monotonic())
    command = [_SYSTEMCTL, "is-active", *(f"{name}.service" for name in names)]
    try:
        ended = bounded_process.run(command, os.environ, left_s, dies_with_parent=False)
    except FileNotFoundError:
        return []
    if ended.code is None:
        raise OSError(0, "systemctl did not answer")
    return ended.stdout.decode(errors="replace").split()


def running(node: NodeView) -> set[str]:
    """Names of all processes, as the kernel keeps them (15 characters)."""
    found = set()
    for pid in filter(str.isdecimal, node.names("/proc")):
        try:
            found.add(node.text(f"/proc/{pid}/comm", 64).strip())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@system_check(
    "services",
    gather_services,
    "systemctl is-active; without systemd /proc/*/comm",
    settings=(_SERVICES,),
    group="",
    only_if=_SERVICES.name,
    budget_s=4.0,
    learn=lambda active: {"services": tuple(name for name, runs in active.items() if runs)},
)
def services(active: dict[str, bool | None], expected: Expected) -> tuple[Verdict, str]:
    """A service of `services` does not run."""
    down = [f"{name} is not running" for name, runs in active.items() if runs is False]
    unseen = [f"{name} cannot be seen from here" for name, runs in active.items() if runs is None]
    return judged(down, f"running: {listed(active, 6)}", unseen)


def gather_time(node: NodeView, expected: Expected) -> tuple[bool | None, list[str]]:
    """(whether the kernel's clock is synchronized, None in a recorded tree; time daemons that run)."""
    names = running(node)
    return _synchronized() if node.live else None, [name for name in _TIME_DAEMONS if name in names]


def _synchronized() -> bool:
    import ctypes

    timex = (ctypes.c_int * 128)()  # larger than struct timex; modes 0: nothing is set
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(timex) == -1:
        raise OSError(ctypes.get_errno(), f"adjtimex: {os.strerror(ctypes.get_errno())}")
    return not timex[_STATUS_AT] & _STA_UNSYNC


@system_check(
    "time-sync",
    gather_time,
    "adjtimex(2) and /proc/*/comm",
    contexts=("periodic", "manual"),
    on_fail="warn",
)
def time_sync(facts: tuple[bool | None, list[str]], expected: Expected) -> tuple[Verdict, str]:
    """The kernel's clock is not synchronized and no time daemon runs."""
    synchronized, daemons = facts
    if synchronized or (daemons and synchronized is None):
        return Verdict.PASS, f"the clock is synchronized ({listed(daemons) or 'no known daemon'})"
    if not daemons:
        return Verdict.FAIL, f"the clock is not synchronized: none of {', '.join(_TIME_DAEMONS)} runs"
    return Verdict.UNKNOWN, f"{listed(daemons)} runs, but the clock is not synchronized (for chrony: is rtcsync set?)"


CHECKS = (services, time_sync)
