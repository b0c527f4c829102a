"""Memory: its size, and errors that it could not correct."""

from __future__ import annotations

from nvrx_slurm.health.check import Expected, NodeView, Setting, Verdict, judged, system_check, whole
from nvrx_slurm.system.hardware import Absent

_EDAC = "/sys/devices/system/edac/mc"
_KIB_PER_GB = 1e9 / 1024
_INTERRUPTS = "/proc/interrupts"
_SIZE = (
    Setting("memory_gb", "number", None, "memory that the kernel must see, in 10^9 bytes"),
    Setting("memory_free_gb", "number", None, "memory that must be available, in 10^9 bytes"),
)


def gather_size(node: NodeView, expected: Expected) -> tuple[float, float]:
    """(total, available) memory in 10^9 bytes, by /proc/meminfo (proc(5))."""
    rows = dict(line.split(":", 1) for line in node.text("/proc/meminfo").splitlines() if ":" in line)
    try:
        total, available = (whole(rows[name].split()[0], "/proc/meminfo") for name in ("MemTotal", "MemAvailable"))
    except (KeyError, IndexError):
        raise ValueError("/proc/meminfo has no MemTotal or MemAvailable") from None
    return total / _KIB_PER_GB, available / _KIB_PER_GB


# Other versions of the kernel keep a little more or less for themselves; a lost module is far more than that.
@system_check(
    "memory-size",
    gather_size,
    "/proc/meminfo",
    settings=_SIZE,
    learn=lambda size: {"memory_gb": int(size[0] * 0.99)},
)
def memory_size(size: tuple[float, float], expected: Expected) -> tuple[Verdict, str]:
    """The node has less memory than it should, or less available than needed."""
    wrong = [
        f"{gb:.0f} GB of memory{what} instead of {expected[name]:g} GB"
        for gb, what, name in zip(size, ("", " available"), ("memory_gb", "memory_free_gb"), strict=True)
        if expected[name] is not None and gb < expected[name]
    ]
    return judged(wrong, f"{size[0]:.0f} GB of memory")


def gather_errors(node: NodeView, expected: Expected) -> dict[str, int]:
    """Uncorrected errors since boot by memory controller (Documentation/admin-guide/RAS), machine check exceptions."""
    names = [name for name in node.names(_EDAC) if name.startswith("mc") and name[2:].isdecimal()]
    errors = {name: node.number(f"{_EDAC}/{name}/ue_count") for name in names}
    try:
        rows = node.text(_INTERRUPTS, 16 << 20).splitlines()
    except FileNotFoundError:
        rows = []
    for name, _, rest in (row.partition(":") for row in rows):
        if name.strip() == "MCE":  # counts by CPU, then words
            errors["machine checks"] = sum(whole(word, _INTERRUPTS) for word in rest.split() if word.isdecimal())
    if not errors:
        raise Absent("the kernel counts no memory errors here (no EDAC driver, no MCE)")
    return errors


@system_check(
    "memory-errors",
    gather_errors,
    f"{_EDAC}/mc*/ue_count and the row MCE of {_INTERRUPTS}",
)
def memory_errors(errors: dict[str, int], expected: Expected) -> tuple[Verdict, str]:
    """An uncorrected memory error or a machine check exception happened since boot."""
    wrong = [f"uncorrected memory errors: {count} on {name}" for name, count in errors.items() if count]
    return judged(wrong, "no uncorrected error since boot")


CHECKS = (memory_size, memory_errors)
