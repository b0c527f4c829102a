"""Health checks: whether this rank is fit for another iteration. Hardware that the node does not have never fails.

The chained checks compare what the driver or the kernel reports now with its report when the check was made.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
from abc import ABC, abstractmethod
from typing import Any

from nvrx_slurm.inprocess import exception
from nvrx_slurm.inprocess.checks import check_time, check_whole
from nvrx_slurm.inprocess.exception import FaultCounterExceeded
from nvrx_slurm.inprocess.plugins.compose import PlugIn
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.system import bounded, gpus, nics
from nvrx_slurm.system.hardware import Absent, HardwareError

logger = logging.getLogger(__name__)

_SYSFS_TIMEOUT_S = 10.0


class HealthCheck(PlugIn):
    """Base of all health checks of this rank.

    The wrapper calls it at the start of each iteration, and before a restart: after the abort and `Finalize`.
    An Exception means unhealthy. At the start it is a fault of the iteration like any other, so that all ranks try
    again; before a restart the wrapper raises HealthCheckError from it, and this rank leaves.
    """


class CudaHealthCheck(HealthCheck):
    """Synchronize the current CUDA device of the calling thread twice, for at most `timeout` in all.

    The second call waits for work that other threads queued during the first. Passes if this process does not use CUDA.
    Raises HealthCheckError with CUDA's own error (a corrupted context stays so), exception.TimeoutError after
    `timeout`. The constructor raises TypeError unless `timeout` is a timedelta, ValueError unless it is above 0.
    """

    def __init__(self, timeout: datetime.timedelta = datetime.timedelta(seconds=30)) -> None:
        check_time("CudaHealthCheck: timeout", timeout)
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        """See the class; returns `state`."""
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            logger.debug("CUDA check: not applicable: this process does not use CUDA")
            return state
        timeout_s = self.timeout.total_seconds()

        def synchronize_twice() -> None:
            torch.cuda.synchronize(device)
            torch.cuda.synchronize(device)

        try:
            device = torch.cuda.current_device()
            bounded.call(synchronize_twice, timeout_s, "nvrx CUDA check")
        except bounded.Overrun:
            raise exception.TimeoutError(
                f"the GPU did not finish its work within {timeout_s:g} s"
            ) from None
        except Exception as error:
            raise exception.HealthCheckError(f"CUDA: {error}") from error
        return state


class FaultCounter(HealthCheck):
    """Let the function fail `max_rank_faults` times on this rank (None: any number of times).

    Raises FaultCounterExceeded at the next fault. The constructor raises TypeError unless the number is an int or None,
    ValueError if it is negative.
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


class _HardwareCheck(HealthCheck, ABC):
    """Compares the hardware at each call with the first reading, which the constructor takes: {name: fact}.

    A device that could be read once and cannot be read now has failed; one that never could be read is not applicable.
    The constructor raises TypeError unless `device_index` is an int or None, ValueError if it is negative.
    """

    what: str

    def __init__(self, device_index: int | None = None) -> None:
        if device_index is not None:
            check_whole(f"{type(self).__name__}: device_index", device_index, 0)
        self.device_index = device_index
        self._first: dict[str, Any] = {}
        try:
            self._first = self._read()
        except Absent as why:
            logger.debug("%s: not applicable: %s", self.what, why)
        except HardwareError as failure:
            logger.warning("%s: %s", self.what, failure)

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raises HealthCheckError with every problem found; returns `state`."""
        try:
            now = self._read()
        except Absent as why:
            if not self._first:
                return state
            raise exception.HealthCheckError(f"{self.what}: was there before, now {why}") from None
        except HardwareError as failure:
            raise exception.HealthCheckError(f"{self.what}: {failure}") from None
        problems = [f"{name} is gone" for name in sorted(self._first.keys() - now.keys())]
        problems += [
            problem for name, fact in now.items() if (problem := self._problem(name, fact))
        ]
        if problems:
            raise exception.HealthCheckError(f"{self.what}: {'; '.join(problems)}")
        self._first = self._first or now
        return state

    @abstractmethod
    def _read(self) -> dict[str, Any]:
        """The facts now; raises Absent or HardwareError."""

    @abstractmethod
    def _problem(self, name: str, fact: Any) -> str | None:
        """One sentence about a device, None if it is well."""


class ChainedGPUHealthCheck(_HardwareCheck):
    """Fails if the driver asks for a GPU's reset, a drain or a reboot, or a GPU has gone.

    `device_index`: CUDA's number of the GPU (usually LOCAL_RANK); None: all GPUs that this process may use.
    """

    what = "GPU check"

    def _read(self) -> dict[str, str]:
        return gpus.recovery_actions(os.environ, self.device_index)

    def _problem(self, name: str, fact: str) -> str | None:
        return None if fact == gpus.NO_ACTION else f"{name} needs recovery action {fact}"


class ChainedNVLHealthCheck(_HardwareCheck):
    """Fails if an NVLink is down that was up before, or that is down while another of the same GPU is up.

    A GPU whose links were never up (no bridge, no switch) passes. `device_index` as for `ChainedGPUHealthCheck`.
    """

    what = "NVLink check"

    def _read(self) -> dict[str, dict[int, bool]]:
        return gpus.nvlinks(os.environ, self.device_index)

    def _problem(self, name: str, fact: dict[int, bool]) -> str | None:
        before = self._first.get(name, {})
        down = [str(link) for link in sorted({*before, *fact}) if not fact.get(link, False)]
        in_use = any(fact.values()) or any(before.values())
        return f"{name} has NVLink {', '.join(down)} down" if down and in_use else None


class ChainedNicHealthCheck(_HardwareCheck):
    """Fails if an active InfiniBand or RoCE port has gone, is not active any more, or was down in between.

    `device_index`: check the NICs nearest to that GPU (see `ChainedGPUHealthCheck`); None: all NICs of the node.
    """

    what = "NIC check"

    def __init__(self, device_index: int | None = None) -> None:
        self._sysfs_root = nics.sysfs_root(os.environ)
        self._nics: set[str] | None = None
        super().__init__(device_index)

    def _read(self) -> dict[str, nics.Port]:
        try:
            found = bounded.call(
                lambda: nics.ports(self._sysfs_root), _SYSFS_TIMEOUT_S, "nvrx NIC check"
            )
        except bounded.Overrun:
            raise HardwareError(
                f"the NICs' driver did not answer within {_SYSFS_TIMEOUT_S:g} s"
            ) from None
        if self.device_index is None:
            return found
        if self._nics is None:  # kept: a GPU that is lost later has no PCI address
            (address,) = gpus.pci_addresses(os.environ, self.device_index).values()
            self._nics = nics.nearest(self._sysfs_root, address)
        return {name: port for name, port in found.items() if port.nic in self._nics}

    def _problem(self, name: str, fact: nics.Port) -> str | None:
        before = self._first.get(name)
        if before is None or before.state != nics.ACTIVE:
            return None  # the port was never in use
        if fact.state != nics.ACTIVE:
            return f"NIC port {name} was {nics.ACTIVE} and is {fact.state}"
        times = (fact.link_downed or 0) - (before.link_downed or 0)
        if before.link_downed is None or times <= 0:  # the counter is not kept, or was reset
            return None
        self._first = {**self._first, name: fact}  # report it once
        return f"the link of NIC port {name} went down {times} times"
