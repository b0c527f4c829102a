"""Processors and their clock."""

from __future__ import annotations

from nvrx_slurm.health.check import Expected, NodeView, Setting, Verdict, judged, system_check
from nvrx_slurm.system.hardware import Absent

_CPU = "/sys/devices/system/cpu"
_CLOCK = "/sys/devices/system/clocksource/clocksource0"
# Threads read these without a system call (vDSO); with another clock each reading is slow.
_FAST_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page")


def gather_count(node: NodeView, expected: Expected) -> tuple[int, int]:
    """Logical CPUs online, and present (Documentation/ABI/testing/sysfs-devices-system-cpu)."""
    return count(node, f"{_CPU}/online"), count(node, f"{_CPU}/present")


def count(node: NodeView, file: str) -> int:
    """The length of a list like "0-55,112" in `file`. Raises OSError, and ValueError that names the file."""
    text = node.text(file).strip()
    try:
        parts = [[int(end) for end in part.split("-")] for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{file} holds {text[:40]!r}, which is no list of CPUs") from None
    return sum(ends[-1] - ends[0] + 1 for ends in parts)


@system_check(
    "cpu-count",
    gather_count,
    f"{_CPU}/online and present",
    settings=(Setting("cpus", "count", None, "logical CPUs online"),),
    learn=lambda cpus: {"cpus": cpus[0]},
)
def cpu_count(cpus: tuple[int, int], expected: Expected) -> tuple[Verdict, str]:
    """Not as many logical CPUs are online as expected."""
    (online, present), wanted = cpus, expected["cpus"]
    wrong = [f"{online} CPUs are online instead of {wanted}"] if wanted not in (None, online) else []
    return judged(wrong, f"{online} of {present} CPUs are online")


def gather_clock(node: NodeView, expected: Expected) -> tuple[str, list[str]]:
    """The kernel's clock source, and those it could use."""
    try:
        current = node.text(f"{_CLOCK}/current_clocksource", 4096).strip()
    except FileNotFoundError:
        raise Absent("the kernel does not tell its clock source") from None
    return current, node.text(f"{_CLOCK}/available_clocksource", 4096).split()


@system_check(
    "clock-source",
    gather_clock,
    f"{_CLOCK}/current_clocksource",
    settings=(Setting("clock_source", "text", None, "clock source, for example tsc"),),
    on_fail="warn",
    learn=lambda clock: {"clock_source": clock[0]},
)
def clock_source(clock: tuple[str, list[str]], expected: Expected) -> tuple[Verdict, str]:
    """The kernel's clock source is not the expected one, or it fell back from a fast one to a slow one."""
    (current, available), wanted = clock, expected["clock_source"]
    if wanted and current != wanted:
        return Verdict.FAIL, f"the clock source is {current} instead of {wanted}"
    fast = [name for name in available if name in _FAST_CLOCKS]
    if not wanted and fast and current not in _FAST_CLOCKS:
        return Verdict.FAIL, f"the clock source is {current} though there is {fast[0]}"
    return Verdict.PASS, f"the clock source is {current}"


CHECKS = (cpu_count, clock_source)
