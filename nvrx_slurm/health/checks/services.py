"""Services that a node needs, and its clock's synchronization."""

from __future__ import annotations

import os
import time

from nvrx_slurm.health.check import (
    OUTSIDE_PREFLIGHT,
    QUICK,
    Expected,
    NodeView,
    Setting,
    Verdict,
    check,
    judged,
    listed,
)

# The control group of a unit has processes while it runs: no systemctl is needed to see that.
_SLICES = ("/sys/fs/cgroup/system.slice", "/sys/fs/cgroup/systemd/system.slice")
_SYSTEMCTL = "/usr/bin/systemctl"
_KERNEL_THREAD = "kthreadd"  # parent of the others; a process that sees it sees the node's processes, not a container's
_COMM = 15  # characters of a name that the kernel keeps
_TIME_DAEMONS = ("chronyd", "ntpd", "systemd-timesyn", "ptp4l", "phc2sys")
_STA_UNSYNC = 0x0040  # adjtimex(2)
_STATUS_AT = 10  # field `status` of struct timex, counted in ints
_MARGIN_S = 0.3
_SERVICES = Setting("services", "names", (), "services that must run, for example slurmd, munge")


def gather_services(node: NodeView, expected: Expected) -> dict[str, bool | None]:
    """Whether each of `services` runs: by its control group, by systemctl (units without processes), or by name.

    None where it is not known: in a container, or with /proc mounted hidepid, the node's processes are not seen.
    """
    wanted = [name.removesuffix(".service") for name in expected["services"]]
    if slices := [directory for directory in _SLICES if node.names(directory)]:
        return {name: _unit_runs(node, slices, name) for name in wanted}
    names = running(node)
    absent = False if _KERNEL_THREAD in names else None
    return {name: bool({name[:_COMM], f"{name}d"[:_COMM]} & names) or absent for name in wanted}


def _unit_runs(node: NodeView, slices: list[str], name: str) -> bool:
    populated = any(_populated(node, f"{directory}/{name}.service") for directory in slices)
    return populated or (node.live and _active(node, name))


def _populated(node: NodeView, group: str) -> bool:
    """Whether a control group holds processes; version 2 has cgroup.events, version 1 only cgroup.procs."""
    for file, says in (("cgroup.events", lambda text: "populated 1" in text), ("cgroup.procs", str.strip)):
        try:
            return bool(says(node.text(f"{group}/{file}", 4096)))
        except OSError:
            continue
    return False


def _active(node: NodeView, name: str) -> bool:
    """The word of systemd, for units that are done once they have started. Raises OSError if it does not answer."""
    from nvrx_slurm.system import bounded_process

    node.doing(f"asking systemctl about {name}")
    command = [_SYSTEMCTL, "is-active", "--quiet", f"{name}.service"]
    left_s = max(0.1, node.deadline_s - _MARGIN_S - time.monotonic())
    try:
        ended = bounded_process.run(command, os.environ, left_s, dies_with_parent=False)
    except FileNotFoundError:
        return False
    if ended.code is None:
        raise OSError(0, f"systemctl did not answer about {name}")
    return ended.code == 0


def running(node: NodeView) -> set[str]:
    """Names of all processes, as the kernel keeps them (15 characters)."""
    found = set()
    for pid in filter(str.isdecimal, node.names("/proc")):
        try:
            found.add(node.text(f"/proc/{pid}/comm", 64).strip())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@check(
    "services",
    gather_services,
    "the control groups of the units, else systemctl is-active; without systemd /proc/*/comm",
    settings=(_SERVICES,),
    contexts=OUTSIDE_PREFLIGHT,  # a container sees none, and one that is restarted is no reason to leave a node out
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


@check(
    "time-sync",
    gather_time,
    "adjtimex(2) and /proc/*/comm",
    lane=QUICK,
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
