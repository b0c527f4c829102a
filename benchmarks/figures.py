"""What a figure is, and how its runs are interleaved."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import isfinite
from statistics import median
from typing import TypeVar

from benchmarks.harness import Failure, Launcher

Samples = dict[str, list[float]]  # by name of the launcher
Measure = Callable[["Launchers", int], Samples]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Launchers:
    """Who takes part: the floor, torchrun, ours, and NVRx where it was asked for and could be installed.

    `watch_s`: how long heartbeats are watched for false alarms.
    """

    floor: Launcher
    torchrun: Launcher
    ours: Launcher
    nvrx: Launcher | None = None
    watch_s: float = 600.0

    def executed(self):
        """Ours without forked workers."""
        return replace(self.ours, name="--ft-warm off", flags=(*self.ours.flags, "--ft-warm=off"))

    def rivals(self):
        """All real launchers."""
        return [self.torchrun, *([self.nvrx] if self.nvrx else []), self.ours]

    def monitored(self):
        """Those that notice a hang; ours without the look at all ranks that comes before the kill."""
        ours = replace(self.ours, flags=(*self.ours.flags, "--ft-hang-collect=0"))
        return [*([self.nvrx] if self.nvrx else []), ours]


@dataclass(frozen=True)
class Figure:
    """One row of the table. `target` bounds our median or, if `relative`, its ratio to that of launcher `base`."""

    name: str
    what: str
    unit: str
    target: float
    measure: Measure
    relative: bool = False
    base: str = "torchrun"


@dataclass
class Result:
    """Samples of a figure and what follows from them."""

    figure: Figure
    samples: Samples
    note: str = ""
    load: tuple[float, ...] = field(default_factory=os.getloadavg)

    def median(self, name):
        """Median of one launcher's samples, None without any."""
        values = self.samples.get(name)
        return median(values) if values else None

    def ratio(self):
        """Ours / the base's; where the target is no ratio, and torchrun has no such figure, ours / NVRx's."""
        ours, theirs = self.median("nvrx-run"), self.median(self.figure.base)
        if theirs is None and not self.figure.relative:
            theirs = self.median("NVRx 0.4.1")
        return ours / theirs if ours is not None and theirs and isfinite(theirs) else None

    def reached(self):
        """Whether our median meets the target."""
        value = self.ratio() if self.figure.relative else self.median("nvrx-run")
        return value is not None and value <= self.figure.target


def interleaved(one, launchers, repeats, warm_up=1):
    """`repeats` samples of each launcher in turns, so that a noisy minute hits all; `warm_up` rounds before them do not
    count.

    A launcher that fails is left out, with its sentence on stderr; the others go on.
    """
    samples = {launcher.name: [] for launcher in launchers}
    for turn in range(-warm_up, repeats):
        for launcher in [who for who in launchers if who.name in samples]:
            try:
                value = one(launcher)
            except Failure as failure:
                print(f"\n{failure}", file=sys.stderr)
                del samples[launcher.name]
                continue
            if turn >= 0:
                samples[launcher.name].append(value)
    return samples


def only_ours(launchers):
    """Return nvrx-run alone, where the others have no such figure or would take minutes."""
    return [launchers.ours]


def in_turns(one, who=Launchers.monitored):
    """Return what measures `one` of each launcher of `who`, in turns."""
    return lambda launchers, repeats: interleaved(one, who(launchers), repeats)


def repeated(sample):
    """Return what takes `sample` again and again: it starts no launcher."""
    return lambda launchers, repeats: {launchers.ours.name: [sample() for _ in range(repeats)]}
