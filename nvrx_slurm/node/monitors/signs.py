"""What slows this node down: read once, on suspicion, off the event loop. What cannot be read says nothing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from nvrx_slurm.system.hardware import Absent, HardwareError

TIMEOUT_S = 8.0
_BETWEEN_S = 1.0  # two readings of counters
_BUSY, _STOLEN = 10.0, 0.02  # percent of a minute that tasks waited; share of the CPU time


def read() -> str:
    """The signs, each with its figure; "" = none. Takes about a second; bound it by TIMEOUT_S."""
    return "; ".join([*_clocks(), *_pressure(), *_counters()])


def _clocks() -> Iterator[str]:
    from nvrx_slurm.system.gpu_facts import throttle_reasons  # only on suspicion

    with contextlib.suppress(Absent, HardwareError):
        for gpu, reasons in throttle_reasons(os.environ).items():
            if reasons:
                yield f"{gpu} is held down ({', '.join(reasons)})"


def _pressure() -> Iterator[str]:
    """Pressure stall information of the kernel."""
    for what in ("cpu", "memory", "io"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            share = float(Path("/proc/pressure", what).read_text().split("avg60=")[1].split()[0])
            if share >= _BUSY:
                yield f"tasks waited for {what} {share:.0f} % of the last minute"


def _counters() -> Iterator[str]:
    before = _stolen(), _throttled()
    time.sleep(_BETWEEN_S)
    (old, all_old), (new, all_new) = before[0], _stolen()
    if new - old > _STOLEN * max(1, all_new - all_old):
        yield f"the hypervisor took {100 * (new - old) / max(1, all_new - all_old):.0f} % of the CPU time"
    if (times := _throttled() - before[1]) > 0:
        yield f"its cgroup's CPU limit stopped it {times} times in {_BETWEEN_S:g} s"


def _stolen() -> tuple[int, int]:
    """Ticks that the hypervisor took, and all ticks."""
    try:
        ticks = [int(one) for one in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return ticks[7], sum(ticks)
    except (OSError, ValueError, IndexError):
        return 0, 0


def _throttled() -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        group = Path("/proc/self/cgroup").read_text().split("0::/", 1)[1].split("\n", 1)[0]
        return int(Path("/sys/fs/cgroup", group, "cpu.stat").read_text().split("nr_throttled ")[1].split()[0])
    return 0
