"""Services that a node needs, and its clock's synchronization."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from nvrx_slurm.health.check import OUTSIDE_PREFLIGHT, QUICK, Check, Expected, NodeView, Setting, Verdict, listed

# A unit's control group has processes while it runs: no systemctl is needed to see that.
_SLICES = ("/sys/fs/cgroup/system.slice", "/sys/fs/cgroup/systemd/system.slice")
_SYSTEMCTL = "/usr/bin/systemctl"
_KERNEL_THREAD = "kthreadd"  # the parent of all others; who sees it sees the node's processes, not a container's
_COMM = 15  # characters of a name that the kernel keeps
_TIME_DAEMONS = ("chronyd", "ntpd", "systemd-timesyn", "ptp4l", "phc2sys")
_STA_UNSYNC = 0x0040  # adjtimex(2)
_MARGIN_S = 0.3


def gather_services(node: NodeView, expected: Expected) -> dict[str, bool | None]:
    """Whether each of `services` runs: by its control group, by systemctl (of those without processes), or by name.

    None where we cannot know: in a container, or with /proc mounted hidepid, the node's processes are not seen.
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
    """Whether a control group holds processes: version 2 tells it of all below, version 1 of each directory."""
    try:
        return "populated 1" in node.text(f"{group}/cgroup.events", 4096).splitlines()
    except OSError:
        pass
    try:
        return bool(node.text(f"{group}/cgroup.procs", 4096).strip())
    except OSError:
        return False


def _active(node: NodeView, name: str) -> bool:
    """What systemd says, for units that are done once they have started. Raises OSError if it does not answer."""
    import subprocess

    node.doing(f"asking systemctl about {name}")
    command = [_SYSTEMCTL, "is-active", "--quiet", f"{name}.service"]
    left_s = max(0.1, node.deadline_s - _MARGIN_S - time.monotonic())
    try:
        return subprocess.run(command, timeout=left_s, check=False, stdin=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        return False
    except subprocess.TimeoutExpired:
        raise OSError(0, f"systemctl did not answer about {name}") from None


def running(node: NodeView) -> set[str]:
    """Names of all processes, as the kernel keeps them (15 characters)."""
    found = set()
    for pid in node.names("/proc"):
        if pid.isdecimal():
            try:
                found.add(node.text(f"/proc/{pid}/comm", 64).strip())
            except (FileNotFoundError, ProcessLookupError):
                continue
    return found


def judge_services(active: dict[str, bool | None], expected: Expected) -> tuple[Verdict, str]:
    """All of them must run."""
    if down := [name for name, runs in active.items() if runs is False]:
        return Verdict.FAIL, f"not running: {listed(down)}"
    if unseen := [name for name, runs in active.items() if runs is None]:
        return Verdict.UNKNOWN, f"the node's processes cannot be seen from here, among them {listed(unseen)}"
    return Verdict.PASS, f"running: {listed(active, 6)}"


class TimeSync(NamedTuple):
    """`synchronized`: the kernel's word, None if it was not asked (a recorded tree). `daemons`: those that run."""

    synchronized: bool | None
    daemons: list[str]


def gather_time(node: NodeView, expected: Expected) -> TimeSync:
    """adjtimex(2) and the names of processes."""
    names = running(node)
    return TimeSync(_synchronized() if node.live else None, [name for name in _TIME_DAEMONS if name in names])


def _synchronized() -> bool:
    import ctypes

    class Timex(ctypes.Structure):
        """The beginning of struct timex; the kernel fills more."""

        _fields_ = (
            ("modes", ctypes.c_uint),
            ("offset", ctypes.c_long),
            ("freq", ctypes.c_long),
            ("maxerror", ctypes.c_long),
            ("esterror", ctypes.c_long),
            ("status", ctypes.c_int),
            ("rest", ctypes.c_char * 256),
        )

    timex = Timex()  # modes 0: nothing is set
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(ctypes.byref(timex)) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"adjtimex: {os.strerror(number)}")
    return not timex.status & _STA_UNSYNC


def judge_time(facts: TimeSync, expected: Expected) -> tuple[Verdict, str]:
    """The kernel's word counts; a daemon that runs without having told the kernel leaves it open."""
    who = listed(facts.daemons) or "nobody"
    if facts.synchronized:
        return Verdict.PASS, f"the clock is synchronized (by {who})" if facts.daemons else "the clock is synchronized"
    if not facts.daemons:
        return Verdict.FAIL, f"the clock is synchronized by nobody: none of {', '.join(_TIME_DAEMONS)} runs"
    if facts.synchronized is None:
        return Verdict.PASS, f"{who} runs"
    return Verdict.UNKNOWN, f"{who} runs, but the kernel's clock is not synchronized (for chrony: is rtcsync set?)"


CHECKS = (
    Check(
        name="services",
        reads="the control groups of the units, else systemctl is-active; without systemd /proc/*/comm",
        fails="A service of `services` does not run.",
        gather=gather_services,
        judge=judge_services,
        settings=(Setting("services", "names", (), "services that must run, for example slurmd, munge"),),
        contexts=OUTSIDE_PREFLIGHT,  # a container sees none, and one that is restarted is no reason to leave a node out
        only_if="services",
        budget_s=4.0,
        learn=lambda active: {"services": tuple(name for name, runs in active.items() if runs)},
    ),
    Check(
        name="time-sync",
        lane=QUICK,
        reads="adjtimex(2) and /proc/*/comm",
        fails="The kernel's clock is not synchronized and no time daemon runs.",
        gather=gather_time,
        judge=judge_time,
        contexts=("periodic", "manual"),
        on_fail="warn",
    ),
)
