"""Processors and their clock."""

from __future__ import annotations

from typing import NamedTuple

from nvrx_slurm.health.check import OUTSIDE_PREFLIGHT, QUICK, Expected, NodeView, Setting, Verdict, check
from nvrx_slurm.system.hardware import Absent

_CPU = "/sys/devices/system/cpu"
_CLOCK = "/sys/devices/system/clocksource/clocksource0"
# Threads read these without a system call (vDSO); with another clock each reading is slow.
_FAST_CLOCKS = ("tsc", "arch_sys_counter", "kvm-clock", "hyperv_clocksource_tsc_page")


class Cpus(NamedTuple):
    """Logical CPUs online, and present. `smt_off`: the kernel was told to leave siblings offline."""

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
    """The length of a list like "0-55,112" in `file`. Raises OSError, and ValueError that names the file."""
    text = node.text(file).strip()
    try:
        parts = [[int(end) for end in part.split("-")] for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{file} holds {text[:40]!r}, which is no list of CPUs") from None
    return sum(ends[-1] - ends[0] + 1 for ends in parts)


@check(
    "cpu-count",
    gather_count,
    f"{_CPU}/online, present and smt/control",
    lane=QUICK,
    contexts=OUTSIDE_PREFLIGHT,
    settings=(Setting("cpus", "count", None, "logical CPUs online"),),
    learn=lambda cpus: {"cpus": cpus.online},
)
def cpu_count(cpus: Cpus, expected: Expected) -> tuple[Verdict, str]:
    """Not as many logical CPUs are online as expected."""
    wanted = expected["cpus"]
    if wanted is not None and cpus.online != wanted:
        return Verdict.FAIL, f"{cpus.online} CPUs are online instead of {wanted}"
    if wanted is None and cpus.online < cpus.present:
        said = f"{cpus.online} of {cpus.present} CPUs are online"
        if not cpus.smt_off:  # without an expectation this may be on purpose
            return Verdict.UNKNOWN, f"{said}; say in the site file how many should be (expect: cpus)"
        return Verdict.PASS, f"{said}, as SMT is switched off"
    return Verdict.PASS, f"{cpus.online} CPUs are online"


def gather_clock(node: NodeView, expected: Expected) -> tuple[str, list[str]]:
    """The kernel's clock source, and those it could use."""
    try:
        current = node.text(f"{_CLOCK}/current_clocksource", 4096).strip()
    except FileNotFoundError:
        raise Absent("the kernel does not tell its clock source") from None
    return current, node.text(f"{_CLOCK}/available_clocksource", 4096).split()


@check(
    "clock-source",
    gather_clock,
    f"{_CLOCK}/current_clocksource",
    lane=QUICK,
    contexts=OUTSIDE_PREFLIGHT,
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
