"""The arguments of `Wrapper`, checked."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nvrx_slurm.inprocess.checks import check_time
from nvrx_slurm.inprocess.plugins.abort import Abort, AbortTorchDistributed
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.plugins.health_check import HealthCheck
from nvrx_slurm.inprocess.plugins.rank_assignment import (
    ActivateAllRanks,
    RankAssignment,
    ShiftRanks,
    with_defaults,
)
from nvrx_slurm.inprocess.plugins.steps import Completion, Finalize, Initialize, Terminate
from nvrx_slurm.inprocess.store.stores import CLOSED, StoreView, TCPStore

_TYPES: dict[str, Any] = {
    "store_factory": Callable,
    "rank_assignment": RankAssignment,
    "enabled": bool,
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
_REQUIRED = ("store_factory", "rank_assignment", "enabled")  # the others may be None
_RETRY_S = 0.005
# torch's and ours, where no `timeout` is among store_kwargs
_STORE_TIMEOUT = timedelta(seconds=300)

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Arguments:
    """Those of `Wrapper`, checked; `rank_assignment` with its defaults.

    Raises TypeError for a value of a wrong type, ValueError for values that contradict each other.
    """

    store_factory: Callable[..., Any] = TCPStore
    store_kwargs: Mapping[str, Any] | None = None
    initialize: Initialize | None = None
    abort: Abort | None = AbortTorchDistributed()  # noqa: RUF009 - it has no state
    finalize: Finalize | None = None
    health_check: HealthCheck | None = None
    rank_assignment: RankAssignment = Compose(ActivateAllRanks(), ShiftRanks())  # type: ignore[assignment] # noqa: RUF009
    monitor_thread_interval: timedelta = timedelta(seconds=1)
    monitor_process_interval: timedelta = timedelta(seconds=1)
    heartbeat_interval: timedelta = timedelta(seconds=1)
    progress_watchdog_interval: timedelta = timedelta(seconds=1)
    soft_timeout: timedelta = timedelta(seconds=60)
    hard_timeout: timedelta = timedelta(seconds=90)
    heartbeat_timeout: timedelta = timedelta(seconds=30)
    barrier_timeout: timedelta = timedelta(seconds=120)
    completion_timeout: timedelta = timedelta(seconds=120)
    last_call_wait: timedelta = timedelta(seconds=1)
    termination_grace_time: timedelta = timedelta(seconds=5)
    monitor_process_logfile: str | None = None
    monitor_process_pidfile: str | None = None
    completion: Completion | None = None
    terminate: Terminate | None = None
    enabled: bool = True
    # the check at a restart
    restart_health_check: HealthCheck | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if not dist.is_available():
            raise ValueError("the in-process wrapper needs a torch built with torch.distributed")
        self._check_types()
        self._check_values()
        object.__setattr__(self, "rank_assignment", with_defaults(self.rank_assignment))

    def _check_types(self) -> None:
        for name, kind in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name in _REQUIRED):
                raise TypeError(f"{name} must be a {kind.__name__}, not {value!r}")

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
            raise TypeError(
                f"store_factory must return a torch.distributed.Store, not {made!r} as {factory!r} did"
            )
        return made

    def connect(self, prefix: str) -> StoreView:
        """A connection to the keys of a call: not to the server of an earlier call, which is about to end."""
        deadline_s = time.monotonic() + self.barrier_timeout.total_seconds()
        while True:
            is_late = time.monotonic() > deadline_s
            try:
                store = self.make_store()
                if is_late or not store.check([CLOSED]):
                    return StoreView(store).under(prefix)
            except dist.DistNetworkError:
                if is_late:
                    raise
            time.sleep(_RETRY_S)

    @property
    def first_store_s(self) -> float:
        """Bound in seconds on making the first store: the store may wait for its server and for its first answer."""
        given = (self.store_kwargs or {}).get("timeout", _STORE_TIMEOUT)
        own: timedelta = given if isinstance(given, timedelta) else _STORE_TIMEOUT
        return (max(2 * own, self.barrier_timeout) + self.heartbeat_timeout).total_seconds()

    @property
    def restart_s(self) -> float:
        """Bound in seconds on a rank's way from the end of an iteration to the next barrier."""
        return (self.barrier_timeout + self.last_call_wait).total_seconds()

    @property
    def overdue_s(self) -> float:
        """Seconds after an iteration's end when a missing rank is declared gone; its own monitor kills it first."""
        return (
            self.restart_s + (self.termination_grace_time + self.heartbeat_timeout).total_seconds()
        )
