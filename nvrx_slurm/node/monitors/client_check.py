"""Warns where timeouts for hung ranks are configured, but no rank of this node calls init_workload_monitoring()."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nvrx_slurm.node.monitors.monitors import RankMonitor

_EARLIEST_S = 10.0  # scripts import and load for a while before they call it
_LIMITS = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_out_of_section_timeout")


class ClientCheck:
    """Warns once per agent: in the first cycle that runs longer than the timeouts or ends well.

    `limits`: seconds by the names of `core.rank.watch.RankLimits`, of which those are meant that count from
    init_workload_monitoring() on. `monitors`: of the ranks; without them nothing is warned of.
    """

    def __init__(self, limits: Mapping[str, Any], monitors: Sequence[RankMonitor], say: Callable[[str], None]) -> None:
        named = {name: limits.get(name) for name in _LIMITS} | dict(limits.get("rank_section_timeouts") or {})
        self._limits = {name: limit_s for name, limit_s in named.items() if limit_s}
        self._monitors = monitors
        self._say = say
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """All workers of a cycle have been started."""
        if self._limits:
            self._timer = asyncio.get_running_loop().call_later(max(_EARLIEST_S, *self._limits.values()), self._check)

    def ended(self, well: bool, last: bool) -> None:
        """A worker has ended, its monitor still knows it. `well`: with code 0; `last`: no other worker is alive."""
        if self._timer is None:
            return
        if not well:  # this cycle says nothing
            self._timer.cancel()
            self._timer = None
        elif last or self._any_connected():
            self._timer.cancel()
            self._check()

    def _check(self) -> None:
        which = ", ".join(f"{name} {limit_s:g} s" for name, limit_s in self._limits.items())
        self._timer, self._limits = None, {}
        if not self._any_connected():
            self._say(
                f"hangs are not noticed: timeouts are set ({which}), but no rank of this node has called"
                " RankMonitorClient.init_workload_monitoring()"
            )

    def _any_connected(self) -> bool:
        return not self._monitors or any(monitor.connected for monitor in self._monitors)
