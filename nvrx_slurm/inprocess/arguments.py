"""The arguments of `Wrapper`, checked."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from nvrx_slurm.inprocess.checks import check_time
from nvrx_slurm.inprocess.plugins.abort import Abort
from nvrx_slurm.inprocess.plugins.completion import Completion
from nvrx_slurm.inprocess.plugins.finalize import Finalize
from nvrx_slurm.inprocess.plugins.health_check import HealthCheck
from nvrx_slurm.inprocess.plugins.initialize import Initialize
from nvrx_slurm.inprocess.plugins.rank_assignment import RankAssignment
from nvrx_slurm.inprocess.plugins.terminate import Terminate

_OPTIONAL: dict[str, type] = {
    "store_kwargs": Mapping,
    "initialize": Initialize,
    "abort": Abort,
    "finalize": Finalize,
    "health_check": HealthCheck,
    "completion": Completion,
    "terminate": Terminate,
    "monitor_process_logfile": str,
    "monitor_process_pidfile": str,
}
_STORE_TIMEOUT = timedelta(seconds=300)  # torch's and ours, where no `timeout` is among store_kwargs

# The first of each pair must be shorter than the second.
_SHORTER = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("monitor_process_interval", "soft_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)
_MAY_BE_ZERO = {"last_call_wait", "termination_grace_time"}
_TIMES = {name for pair in _SHORTER for name in pair} | {"completion_timeout"} | _MAY_BE_ZERO


class Arguments(SimpleNamespace):
    """Those of `Wrapper`, and the health check at a restart.

    Raises TypeError for a value of a wrong type, ValueError for values that contradict each other.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given, restart_health_check=None)
        if not dist.is_available():
            raise ValueError("the in-process wrapper needs a torch built with torch.distributed")
        self._check_types()
        self._check_values()

    def _check_types(self) -> None:
        if not callable(self.store_factory):
            raise TypeError(f"store_factory must be callable, not {self.store_factory!r}")
        if not isinstance(self.rank_assignment, RankAssignment):
            hint = " (a comma behind it makes it a tuple)" if isinstance(self.rank_assignment, tuple) else ""
            raise TypeError(f"rank_assignment must be a RankAssignment, not {self.rank_assignment!r}{hint}")
        if not isinstance(self.enabled, bool):
            raise TypeError(f"enabled must be a bool, not {self.enabled!r}")
        for name, kind in _OPTIONAL.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} must be a {kind.__name__} or None, not {value!r}")

    def _check_values(self) -> None:
        for name in _TIMES:
            check_time(name, getattr(self, name), may_be_zero=name in _MAY_BE_ZERO)
        for short, long in _SHORTER:
            if not getattr(self, short) < getattr(self, long):
                raise ValueError(
                    f"{short} ({getattr(self, short)}) must be shorter than {long} ({getattr(self, long)})"
                )
        for name in ("monitor_process_logfile", "monitor_process_pidfile"):
            value = getattr(self, name)
            if value is not None and not Path(value).is_absolute():
                raise ValueError(f"{name} must be an absolute path, not {value!r}")

    def make_store(self) -> Any:
        """A new store, or another connection to the same one. Raises TypeError if the factory makes no store."""
        made = self.store_factory(**dict(self.store_kwargs or {}))
        if not isinstance(made, dist.Store):
            factory = self.store_factory
            raise TypeError(f"store_factory must return a torch.distributed.Store, not {made!r} as {factory!r} did")
        return made

    @property
    def first_store_s(self) -> float:
        """Bound in seconds on making the first store: the store may wait for its server and for its first answer."""
        own = (self.store_kwargs or {}).get("timeout", _STORE_TIMEOUT)
        own_s = (own if isinstance(own, timedelta) else _STORE_TIMEOUT).total_seconds()
        return max(2 * own_s, self.seconds("barrier_timeout")) + self.seconds("heartbeat_timeout")

    @property
    def restart_s(self) -> float:
        """Bound in seconds on a rank's way from the end of an iteration to the next barrier."""
        return self.seconds("barrier_timeout") + self.seconds("last_call_wait")

    @property
    def overdue_s(self) -> float:
        """Seconds after an iteration's end when a missing rank is declared gone; its own monitor kills it first."""
        names = ("barrier_timeout", "last_call_wait", "termination_grace_time", "heartbeat_timeout")
        return sum(map(self.seconds, names))

    def file_of(self, name: str, initial_rank: int) -> str | None:
        """One of the two files, with `{rank}` filled in."""
        value: str | None = getattr(self, name)
        return value and value.replace("{rank}", str(initial_rank))

    def seconds(self, name: str) -> float:
        """One of the times."""
        value: timedelta = getattr(self, name)
        return value.total_seconds()
