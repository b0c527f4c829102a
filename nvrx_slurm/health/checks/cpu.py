"""Processors and their clock."""

from __future__ import annotations

from typing import NamedTuple

from nvrx_slurm.health.check import OUTSIDE_PREFLIGHT, QUICK, Check, Expected, NodeView, Setting, Verdict
from nvrx_slurm.system.hardware import Absent

_CPU = "/sys/devices/system/cpu"
_DIGITS = 9  # more are no number of a CPU
_CLOCK = "/sys/devices/system/clocksource/clocksource0"
# Those that threads read without leaving user space (vDSO); a fallen-back clock makes each reading slow.
_FAST_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page")


class Cpus(NamedTuple):
    """How many are online, and how many there are; `smt_off`: the kernel was told to leave siblings offline."""

    online: int
    present: int
    smt_off: bool


def gather_count(node: NodeView, expected: Expected) -> Cpus:
    """From sysfs (Documentation/ABI/testing/sysfs-devices-system-cpu)."""
    try:
        smt = node.text(f"{_CPU}/smt/control", 4096).strip()
    except FileNotFoundError:
        smt = ""
    return Cpus(count(node, f"{_CPU}/online"), count(node, f"{_CPU}/present"), smt in ("off", "forceoff"))


def count(node: NodeView, file: str) -> int:
    """How many there are in a file with a list like "0-55,112". Raises OSError, and ValueError that names the file."""
    cpus, found = node.text(file).strip(), 0
    for part in cpus.split(","):
        low, _, high = part.partition("-")
        ends = [low, high or low]
        if not all(end.isdecimal() and len(end) < _DIGITS for end in ends) or int(ends[1]) < int(low):
            raise ValueError(f"{file} holds {cpus[:40]!r}, which is no list of CPUs")
        found += int(ends[1]) - int(low) + 1
    return found


def judge_count(cpus: Cpus, expected: Expected) -> tuple[Verdict, str]:
    """Fails if not `cpus` are online; where nothing is expected, nobody can tell whether one is offline on purpose."""
    wanted = expected["cpus"]
    if wanted is not None and cpus.online != wanted:
        return Verdict.FAIL, f"{cpus.online} CPUs are online instead of {wanted}"
    if wanted is None and cpus.online < cpus.present:
        said = f"{cpus.online} of {cpus.present} CPUs are online"
        if not cpus.smt_off:
            return Verdict.UNKNOWN, f"{said}; say in the site file how many should be (expect: cpus)"
        return Verdict.PASS, f"{said}, as SMT is switched off"
    return Verdict.PASS, f"{cpus.online} CPUs are online"


class Clock(NamedTuple):
    """The kernel's clock source, and those it could use."""

    current: str
    available: tuple[str, ...]


def gather_clock(node: NodeView, expected: Expected) -> Clock:
    """From sysfs (Documentation/ABI/testing/sysfs-devices-system-... clocksource)."""
    try:
        current = node.text(f"{_CLOCK}/current_clocksource", 4096).strip()
    except FileNotFoundError:
        raise Absent("the kernel does not tell its clock source") from None
    return Clock(current, tuple(node.text(f"{_CLOCK}/available_clocksource", 4096).split()))


def judge_clock(clock: Clock, expected: Expected) -> tuple[Verdict, str]:
    """Fails if it is not `clock_source`; where nothing is expected, if the kernel gave up a fast one."""
    wanted = expected["clock_source"]
    if not clock.current:
        return Verdict.UNKNOWN, f"{_CLOCK}/current_clocksource is empty"
    if clock.current not in clock.available:  # from which the kernel chose it
        return Verdict.UNKNOWN, f"{_CLOCK}/current_clocksource holds {clock.current[:40]!r}, which is not available"
    if wanted and clock.current != wanted:
        return Verdict.FAIL, f"the clock source is {clock.current} instead of {wanted}"
    fast = [name for name in clock.available if name in _FAST_CLOCKS]
    if not wanted and fast and clock.current not in _FAST_CLOCKS:
        return Verdict.FAIL, f"the clock source is {clock.current} though there is {fast[0]}"
    return Verdict.PASS, f"the clock source is {clock.current}"


CHECKS = (
    Check(
        name="cpu-count",
        lane=QUICK,
        reads=f"{_CPU}/online, present and smt/control",
        fails="Not as many logical CPUs are online as expected.",
        gather=gather_count,
        judge=judge_count,
        contexts=OUTSIDE_PREFLIGHT,
        settings=(Setting("cpus", "count", None, "logical CPUs online"),),
        learn=lambda cpus: {"cpus": cpus.online},
    ),
    Check(
        name="clock-source",
        lane=QUICK,
        reads=f"{_CLOCK}/current_clocksource",
        fails="The kernel's clock source is not the expected one, or it fell back from a fast one to a slow one.",
        gather=gather_clock,
        judge=judge_clock,
        contexts=OUTSIDE_PREFLIGHT,
        settings=(Setting("clock_source", "text", None, "clock source, for example tsc"),),
        on_fail="warn",
        learn=lambda clock: {"clock_source": clock.current} if clock.current else {},
    ),
)
