"""What ranks tell of each window goes past the coordinator's core and its event log: what it shows goes in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator, Stage
from nvrx_slurm.core.straggler.detector import Detector, Reading
from nvrx_slurm.core.straggler.suspects import seats


class SlowRanks:
    """Feeds the detector of the cycle that runs. `post`: gets what it finds."""

    def __init__(self, core: Coordinator, post: Callable[[Any], None]) -> None:
        self._core = core
        self._post = post
        self._window_s = core.settings.straggler_window_s
        self._watched = (0, -1)  # term and cycle of the detector
        self._detector = Detector((), self._window_s, 0.0)

    def told(self, window: t.Window, now: float) -> None:
        """A node tells of its ranks."""
        core = self._core
        runs = core.state is Stage.RUNNING and window.cycle == core.job.cycle
        if not runs or not self._window_s:
            return
        cycle = (window.term, window.cycle)
        if self._watched != cycle:
            self._watched = cycle
            places = seats(core.job.assignment, core.roster.members)
            self._detector = Detector(places, self._window_s, now)
        columns = zip(window.waits, window.waited_s, window.until_s, strict=False)
        readings = [Reading(*one) for one in columns]
        is_over = self._detector.told(dict(zip(window.ranks, readings, strict=False)), now)
        if not is_over:
            return
        found = self._detector.close(now)
        if found is not None or core.suspects.watches:
            self._post(ev.SlowSeen(window.cycle, found, self._detector.windows))
