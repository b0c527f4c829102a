"""What slows this node down: read once, on suspicion, off the event loop. What cannot be read says nothing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from nvrx_slurm.system.hardware import Absent, HardwareError

TIMEOUT_S = 8.0
BETWEEN_S = 1.0  # two readings of counters
_BUSY, _STOLEN = 10.0, 0.02  # percent of a minute that tasks waited; share of the CPU time


class Counters(NamedTuple):
    """Ticks that the hypervisor took, and all ticks; how often the cgroup's CPU limit stopped it."""

    stolen: int = 0
    ticks: int = 0
    throttled: int = 0


def read(root: Path = Path("/")) -> str:
    """The signs, each with its figure; "" = none. Takes about a second; bound it by TIMEOUT_S."""
    before = counters(root)
    time.sleep(BETWEEN_S)
    return "; ".join([*_clocks(), *pressure(root), *grown(before, counters(root))])


def _clocks() -> Iterator[str]:
    from nvrx_slurm.system.gpu_facts import throttle_reasons  # only on suspicion

    with contextlib.suppress(Absent, HardwareError):
        for gpu, reasons in throttle_reasons(os.environ).items():
            if reasons:
                yield f"{gpu} is held down ({', '.join(reasons)})"


def pressure(root: Path) -> Iterator[str]:
    """Pressure stall information of the kernel."""
    for what in ("cpu", "memory", "io"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            share = float((root / "proc/pressure" / what).read_text().split("avg60=")[1].split()[0])
            if share >= _BUSY:
                yield f"tasks waited for {what} {share:.0f} % of the last minute"


def grown(before: Counters, after: Counters) -> Iterator[str]:
    """What has happened between two readings."""
    stolen, ticks, throttled = (new - old for old, new in zip(before, after, strict=True))
    if stolen > _STOLEN * max(1, ticks):
        yield f"the hypervisor took {100 * stolen / max(1, ticks):.0f} % of the CPU time"
    if throttled > 0:
        yield f"its cgroup's CPU limit stopped it {throttled} times in {BETWEEN_S:g} s"


def counters(root: Path) -> Counters:
    """What the kernel has counted; 0 where it does not tell."""
    stolen = ticks = throttled = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        times = [int(one) for one in (root / "proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        stolen, ticks = times[7], sum(times)
    with contextlib.suppress(OSError, ValueError, IndexError):
        group = (root / "proc/self/cgroup").read_text().split("0::/", 1)[1].split("\n", 1)[0]
        text = (root / "sys/fs/cgroup" / group / "cpu.stat").read_text()
        throttled = int(text.split("nr_throttled ")[1].split()[0])
    return Counters(stolen, ticks, throttled)
