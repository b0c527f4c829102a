"""Is this rank fit for another iteration? Hardware that is not there is nothing to fail of.

The chained checks compare what the driver or the kernel says with what it said when they were made.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, TypeVar

from nvrx_slurm.inprocess import exception
from nvrx_slurm.inprocess.checks import check_time, check_whole
from nvrx_slurm.inprocess.exception import FaultCounterExceeded
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.system import bounded, gpus, nics
from nvrx_slurm.system.hardware import Absent, HardwareError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SYSFS_TIMEOUT_S = 10.0


class HealthCheck(ABC):
    """Called before a restart, when process groups are gone and `Finalize` is done; looks at this rank only.

    Raising means unhealthy: the wrapper raises it on, and this rank leaves.
    """

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise if this rank cannot go on; returns `state`."""


class CudaHealthCheck(HealthCheck):
    """Waits until the GPU has done all that was asked of it, twice, for at most `timeout` in all.

    The second wait finds what other threads asked for during the first. On the current CUDA device of the calling
    thread; not applicable where this process does not use CUDA. Raises HealthCheckError with CUDA's own error (a
    corrupted context stays so), exception.TimeoutError when it takes too long. TypeError for a timeout that is no
    timedelta, ValueError for one of 0 or less.
    """

    def __init__(self, timeout: datetime.timedelta = datetime.timedelta(seconds=30)) -> None:
        check_time("CudaHealthCheck: timeout", timeout)
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            _not_applicable("CUDA check", "this process does not use CUDA")
            return state
        timeout_s = self.timeout.total_seconds()
        try:
            device = torch.cuda.current_device()
            bounded.call(lambda: _synchronize_twice(torch, device), timeout_s, "nvrx CUDA check")
        except bounded.Overrun:
            raise exception.TimeoutError(f"the GPU did not finish its work within {timeout_s:g} s") from None
        except Exception as error:
            raise exception.HealthCheckError(f"CUDA: {error}") from error
        return state


class FaultCounter(HealthCheck):
    """Lets this rank fail `max_rank_faults` times (None: always), counting what the wrapped function raised here.

    Raises FaultCounterExceeded at the next fault. TypeError for what is no whole number, ValueError for a negative one.
    """

    def __init__(self, max_rank_faults: int | None = None) -> None:
        if max_rank_faults is not None:
            check_whole("FaultCounter: max_rank_faults", max_rank_faults, 0)
        self.max_rank_faults = max_rank_faults
        self.faults_count = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`."""
        if state.fn_exception is not None:
            self.faults_count += 1
        if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
            raise FaultCounterExceeded(
                f"this rank failed {self.faults_count} times, max_rank_faults={self.max_rank_faults}"
            )
        return state


class _HardwareCheck(HealthCheck, ABC, Generic[T]):
    """Reads {name: fact} of the hardware at construction and at every call.

    What could be read once and cannot any more has failed; what never could be read is not applicable, said once.
    TypeError for a `device_index` that is neither None nor a whole number, ValueError for one below 0.
    """

    what: str

    def __init__(self, device_index: int | None = None) -> None:
        if device_index is not None:
            check_whole(f"{type(self).__name__}: device_index", device_index, 0)
        self.device_index = device_index
        self._first: dict[str, T] = {}
        try:
            self._first = self._read()
        except Absent as why:
            _not_applicable(self.what, str(why))
        except HardwareError as failure:
            logger.warning("%s: %s", self.what, failure)

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`, raises HealthCheckError with what is wrong."""
        try:
            now = self._read()
        except Absent as why:
            if self._first:
                raise exception.HealthCheckError(f"{self.what}: was there before, now {why}") from None
            return state
        except HardwareError as failure:
            raise exception.HealthCheckError(f"{self.what}: {failure}") from None
        problems = [f"{name} is gone" for name in sorted(self._first.keys() - now.keys())]
        problems += [problem for name, fact in now.items() if (problem := self._problem(name, fact))]
        if problems:
            raise exception.HealthCheckError(f"{self.what}: {'; '.join(problems)}")
        self._first = self._first or now
        return state

    @abstractmethod
    def _read(self) -> dict[str, T]:
        """The facts now; raises Absent or HardwareError."""

    @abstractmethod
    def _problem(self, name: str, fact: T) -> str | None:
        """What is wrong with one of them."""


class ChainedGPUHealthCheck(_HardwareCheck[str]):
    """Fails if the driver wants a GPU reset, drained or its node rebooted, or a GPU has gone.

    `device_index`: CUDA's number of the GPU (as LOCAL_RANK mostly is); None: all GPUs this process sees.
    """

    what = "GPU check"

    def _read(self) -> dict[str, str]:
        return gpus.recovery_actions(os.environ, self.device_index)

    def _problem(self, name: str, fact: str) -> str | None:
        return None if fact == gpus.NO_ACTION else f"{name} needs recovery action {fact}"


class ChainedNVLHealthCheck(_HardwareCheck[dict[int, bool]]):
    """Fails if an NVLink is down that was up before, or that has others of the same GPU up beside it.

    A GPU with NVLink ports of which none was ever up (no bridge, no switch) is not at fault. `device_index` as for
    `ChainedGPUHealthCheck`.
    """

    what = "NVLink check"

    def _read(self) -> dict[str, dict[int, bool]]:
        return gpus.nvlinks(os.environ, self.device_index)

    def _problem(self, name: str, fact: dict[int, bool]) -> str | None:
        before = self._first.get(name, {})
        down = [str(link) for link in sorted({*before, *fact}) if not fact.get(link, False)]
        in_use = any(fact.values()) or any(before.values())
        return f"{name} has NVLink {', '.join(down)} down" if down and in_use else None


class ChainedNicHealthCheck(_HardwareCheck[nics.Port]):
    """Fails if a port of an InfiniBand or RoCE NIC that was active is not any more, went down meanwhile, or has gone.

    `device_index`: look at the NICs nearest to that GPU (as for `ChainedGPUHealthCheck`); None: at all of the node.
    `sysfs_root`: None: sys below NVRX_SYSROOT, else /sys.
    """

    what = "NIC check"

    def __init__(self, device_index: int | None = None, sysfs_root: str | os.PathLike[str] | None = None) -> None:
        self.sysfs_root = nics.sysfs_root(os.environ) if sysfs_root is None else Path(sysfs_root)
        self._nics: set[str] | None = None
        super().__init__(device_index)

    def _read(self) -> dict[str, nics.Port]:
        try:
            found = bounded.call(lambda: nics.ports(self.sysfs_root), _SYSFS_TIMEOUT_S, "nvrx NIC check")
        except bounded.Overrun:
            raise HardwareError(f"the NICs' driver did not answer within {_SYSFS_TIMEOUT_S:g} s") from None
        if self.device_index is None:
            return found
        if self._nics is None:  # asked once: a GPU that is lost later has no address to ask for
            (address,) = gpus.pci_addresses(os.environ, self.device_index).values()
            self._nics = nics.nearest(self.sysfs_root, address)
        return {name: port for name, port in found.items() if port.nic in self._nics}

    def _problem(self, name: str, fact: nics.Port) -> str | None:
        before = self._first.get(name)
        if before is None or before.state != nics.ACTIVE:
            return None  # a port that was never in use
        if fact.state != nics.ACTIVE:
            return f"NIC port {name} was {nics.ACTIVE} and is {fact.state}"
        times = (fact.link_downed or 0) - (before.link_downed or 0)
        if before.link_downed is None or times <= 0:  # a counter that was reset starts anew
            return None
        self._first = {**self._first, name: fact}  # told once
        return f"the link of NIC port {name} went down {times} times"


def _synchronize_twice(torch: Any, device: int) -> None:
    torch.cuda.synchronize(device)
    torch.cuda.synchronize(device)


_said: set[tuple[str, str]] = set()


def _not_applicable(what: str, why: str) -> None:
    if (what, why) not in _said:
        _said.add((what, why))
        logger.info("%s: not applicable: %s", what, why)
