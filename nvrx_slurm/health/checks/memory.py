"""Memory: how much the kernel sees, and errors that it could not correct."""

from __future__ import annotations

from typing import NamedTuple

from nvrx_slurm.health.check import OUTSIDE_PREFLIGHT, QUICK, Check, Expected, NodeView, Setting, Verdict, listed
from nvrx_slurm.health.checks.counters import all_ones
from nvrx_slurm.system.hardware import Absent

_EDAC = "/sys/devices/system/edac/mc"
_KIB_PER_GB = 1e9 / 1024
_INTERRUPTS = "/proc/interrupts"
_DIGITS = 20  # of 64 bits; longer numbers are none of the kernel's


def gather_size(node: NodeView, expected: Expected) -> dict[str, int]:
    """/proc/meminfo in KiB (proc(5))."""
    return meminfo(node.text("/proc/meminfo"))


def meminfo(text: str) -> dict[str, int]:
    """Its numbers by name. Raises ValueError where there is no MemTotal."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal() and len(words[0]) <= _DIGITS:
            found[name] = int(words[0])
    if "MemTotal" not in found:
        raise ValueError("/proc/meminfo has no MemTotal")
    return found


def judge_size(kib: dict[str, int], expected: Expected) -> tuple[Verdict, str]:
    """Fails below `memory_gb`, as with a lost module, or where less than `memory_free_gb` is available."""
    total_gb = kib["MemTotal"] / _KIB_PER_GB
    if expected["memory_gb"] is not None and total_gb < expected["memory_gb"]:
        return Verdict.FAIL, f"{total_gb:.0f} GB of memory instead of {expected['memory_gb']:g} GB"
    if expected["memory_free_gb"] is not None:
        if "MemAvailable" not in kib:
            return Verdict.UNKNOWN, "/proc/meminfo has no MemAvailable"
        free_gb = kib["MemAvailable"] / _KIB_PER_GB
        if free_gb < expected["memory_free_gb"]:
            return Verdict.FAIL, f"{free_gb:.0f} GB of memory available instead of {expected['memory_free_gb']:g} GB"
    return Verdict.PASS, f"{total_gb:.0f} GB of memory"


class Errors(NamedTuple):
    """Uncorrected errors: by memory controller (EDAC), and machine check exceptions by CPU (/proc/interrupts)."""

    controllers: dict[str, int]
    exceptions: int


def gather_errors(node: NodeView, expected: Expected) -> Errors:
    """EDAC's counters since boot (Documentation/admin-guide/RAS) and the row MCE of /proc/interrupts."""
    controllers = {
        name: _count(node, f"{_EDAC}/{name}/ue_count")
        for name in node.names(_EDAC)
        if name.startswith("mc") and name[2:].isdecimal()
    }
    try:
        exceptions = machine_checks(node.text(_INTERRUPTS, 16 << 20))
    except FileNotFoundError:
        exceptions = None
    if not controllers and exceptions is None:
        raise Absent("the kernel counts no memory errors here (no EDAC driver, no MCE)")
    return Errors(controllers, exceptions or 0)


def _count(node: NodeView, file: str) -> int:
    """Raises OSError, and ValueError that names the file if it holds what no counter is."""
    word = node.text(file, 4096).strip()
    if not word.isdecimal() or len(word) > _DIGITS or all_ones(int(word)):
        raise ValueError(f"{file} holds {word[:40]!r} instead of a count")
    return int(word)


def machine_checks(interrupts: str) -> int | None:
    """Machine check exceptions on all CPUs together; None if there is no such row (other than x86).

    Raises ValueError for a number that no counter can have.
    """
    for line in interrupts.splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "MCE":
            counts = [word for word in rest.split() if word.isdecimal()]
            if any(len(word) > _DIGITS for word in counts):
                raise ValueError(f"{_INTERRUPTS} holds {rest.strip()[:40]!r} instead of counts of MCE")
            return sum(map(int, counts))
    return None


def judge_errors(errors: Errors, expected: Expected) -> tuple[Verdict, str]:
    """Any uncorrected error fails: data may be wrong, and more will come."""
    bad = [f"{count} on {name}" for name, count in errors.controllers.items() if count]
    if bad:
        return Verdict.FAIL, f"uncorrected memory errors: {listed(bad)}"
    if errors.exceptions:
        return Verdict.FAIL, f"{errors.exceptions} machine check exceptions since boot"
    return Verdict.PASS, "no uncorrected error since boot"


CHECKS = (
    Check(
        name="memory-size",
        lane=QUICK,
        reads="/proc/meminfo",
        fails="The node has less memory than it should, or less available than needed.",
        gather=gather_size,
        judge=judge_size,
        contexts=OUTSIDE_PREFLIGHT,
        settings=(
            Setting("memory_gb", "number", None, "memory that the kernel must see, in 10^9 bytes"),
            Setting("memory_free_gb", "number", None, "memory that must be available, in 10^9 bytes"),
        ),
        # Kernels of other versions keep a little more or less for themselves; a lost module is far more than that.
        learn=lambda kib: {"memory_gb": int(kib["MemTotal"] / _KIB_PER_GB * 0.99)},
    ),
    Check(
        name="memory-errors",
        lane=QUICK,
        reads=f"{_EDAC}/mc*/ue_count and the row MCE of /proc/interrupts",
        fails="An uncorrected memory error or a machine check exception happened since boot.",
        gather=gather_errors,
        judge=judge_errors,
        contexts=OUTSIDE_PREFLIGHT,
    ),
)
