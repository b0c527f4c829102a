"""Processors and their clock."""

from __future__ import annotations

from typing import NamedTuple

from nvrx_slurm.health.check import OUTSIDE_GATE, QUICK, Check, Expected, NodeView, Setting, Verdict
from nvrx_slurm.system.hardware import Absent

_CPU = "/sys/devices/system/cpu"
_CLOCK = "/sys/devices/system/clocksource/clocksource0"
# Those that threads read without leaving user space (vDSO); a fallen-back clock makes each reading slow.
_FAST_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page")


def gather_count(node: NodeView, expected: Expected) -> tuple[str, str]:
    """The lists (online, present) of CPUs."""
    return node.text(f"{_CPU}/online").strip(), node.text(f"{_CPU}/present").strip()


def count(cpus: str) -> int:
    """How many there are in a list like "0-55,112". Raises ValueError."""
    found = 0
    for part in cpus.split(","):
        low, _, high = part.partition("-")
        if not low.isdigit() or not (high or low).isdigit() or int(high or low) < int(low):
            raise ValueError(f"{cpus[:40]!r} is no list of CPUs")
        found += int(high or low) - int(low) + 1
    return found


def judge_count(lists: tuple[str, str], expected: Expected) -> tuple[Verdict, str]:
    """Fails if not `cpus` are online; where nothing is expected, if one that is there is not."""
    online, present = map(count, lists)
    wanted = present if expected["cpus"] is None else expected["cpus"]
    if online != wanted:
        return Verdict.FAIL, f"{online} CPUs are online instead of {wanted}"
    return Verdict.PASS, f"{online} CPUs are online"


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
        reads=f"{_CPU}/online and present",
        fails="Not as many logical CPUs are online as expected, or as there are.",
        gather=gather_count,
        judge=judge_count,
        contexts=OUTSIDE_GATE,
        settings=(Setting("cpus", "count", None, "logical CPUs online"),),
        learn=lambda lists: {"cpus": count(lists[0])},
    ),
    Check(
        name="clock-source",
        lane=QUICK,
        reads=f"{_CLOCK}/current_clocksource",
        fails="The kernel's clock source is not the expected one, or it fell back from a fast one to a slow one.",
        gather=gather_clock,
        judge=judge_clock,
        contexts=OUTSIDE_GATE,
        settings=(Setting("clock_source", "text", None, "clock source, for example tsc"),),
        on_fail="warn",
        learn=lambda clock: {"clock_source": clock.current} if clock.current else {},
    ),
)
