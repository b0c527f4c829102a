"""The restart sequence of one rank inside the in-process wrapper, as a table.

The shell (`inprocess/runner.py`) does what the one command of each step says and comes back with what happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from nvrx_slurm.core.machine import Machine, Row


class Phase(Enum):
    """Where a rank is."""

    OUTSIDE = "the wrapped function has not been called"
    ENTERING = "waits until all ranks have called the wrapped function (initial barrier)"
    ASSIGNING = "learns its rank, and where rank 0 is, for the iteration that begins"
    INITIALIZING = "calls `initialize`"
    CHECKING_START = "calls `health_check` before the function"
    RUNNING = "calls the function, or waits as a reserve"
    RETURNED = "waits until the function has returned on all active ranks (completion barrier)"
    STOPPING = "the function has ended here; `abort` is being called"
    FINALIZING = "calls `finalize`"
    CHECKING = "calls the health checks before another iteration"
    ARRIVED = "waits until all ranks are ready for another iteration, or gone (iteration barrier)"
    COMPLETING = "calls `completion`"
    CONCLUDED = "waits until all ranks are about to return (termination barrier)"
    LEAVING = "leaves for good: tells the others, calls `terminate`"
    DONE = "the wrapper returns"
    GONE = "the wrapper raises"


# --- what happened ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Called:
    """The wrapped function was called."""


@dataclass(frozen=True, slots=True)
class Released:
    """All ranks have come to the barrier, or are gone."""


@dataclass(frozen=True, slots=True)
class Assigned:
    """This rank has its place in the new iteration."""


@dataclass(frozen=True, slots=True)
class Disturbed:
    """A rank was lost while ranks were being assigned, so they are assigned again."""


@dataclass(frozen=True, slots=True)
class Done:
    """A plug-in, or what else was to be done, is through."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The function has returned on this rank."""


@dataclass(frozen=True, slots=True)
class Faulted:
    """The function, or `initialize`, raised an Exception."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """The function, or what comes before it, was interrupted because of another rank or a timeout."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The function has returned on all active ranks."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The iteration ended with a fault somewhere, and `abort` has been called here."""


@dataclass(frozen=True, slots=True)
class Failed:
    """This rank cannot go on: a BaseException, an unhealthy or discarded rank, a lost store."""


# --- what to do -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Do:
    """Command: the name of the shell's method."""

    what: str


_EXCEPT = "cannot go on"


class Restarts(Machine):
    """One call of a wrapped function on one rank; each step emits at most one `Do`."""

    table: ClassVar[Mapping[tuple[Enum, type], Row]] = {
        (Phase.OUTSIDE, Called): Row("on_called", (Phase.ENTERING,), "the initial barrier"),
        (Phase.ENTERING, Released): Row("on_released", (Phase.ASSIGNING,), "the first iteration"),
        (Phase.ENTERING, Failed): Row("on_failed", (Phase.LEAVING,), "not all came, or there is no store"),
        (Phase.ASSIGNING, Assigned): Row("on_assigned", (Phase.INITIALIZING,), "active and reserve ranks alike"),
        (Phase.ASSIGNING, Disturbed): Row("on_disturbed", (Phase.ARRIVED,), "with the ranks it had before"),
        (Phase.ASSIGNING, Stopped): Row("on_stopped", (Phase.STOPPING,), "a rank was lost before it began"),
        (Phase.ASSIGNING, Failed): Row("on_failed", (Phase.LEAVING,), "discarded, or nobody is active"),
        (Phase.INITIALIZING, Done): Row("on_initialized", (Phase.CHECKING_START,), "may this be tried?"),
        (Phase.INITIALIZING, Faulted): Row("on_faulted", (Phase.STOPPING,), "an Exception means another try"),
        (Phase.INITIALIZING, Stopped): Row("on_stopped", (Phase.STOPPING,), "another rank failed meanwhile"),
        (Phase.INITIALIZING, Failed): Row("on_failed", (Phase.LEAVING,), "RestartAbort: enough tries"),
        (Phase.CHECKING_START, Done): Row("on_checked_start", (Phase.RUNNING,), "healthy"),
        (Phase.CHECKING_START, Stopped): Row("on_stopped", (Phase.STOPPING,), "another rank failed meanwhile"),
        (Phase.CHECKING_START, Failed): Row("on_failed", (Phase.LEAVING,), "unhealthy"),
        (Phase.RUNNING, Returned): Row("on_returned", (Phase.RETURNED,), "perhaps not yet on the others"),
        (Phase.RUNNING, Faulted): Row("on_faulted", (Phase.STOPPING,), "tells all others"),
        (Phase.RUNNING, Stopped): Row("on_stopped", (Phase.STOPPING,), "as told by another rank or a timeout"),
        (Phase.RUNNING, Failed): Row("on_failed", (Phase.LEAVING,), "a BaseException of the function"),
        (Phase.RUNNING, Completed): Row("on_completed", (Phase.COMPLETING,), "a reserve is not needed any more"),
        (Phase.RUNNING, Interrupted): Row("on_interrupted", (Phase.FINALIZING,), "a reserve may be needed"),
        (Phase.RETURNED, Completed): Row("on_completed", (Phase.COMPLETING,), "all have returned"),
        (Phase.RETURNED, Interrupted): Row("on_interrupted", (Phase.FINALIZING,), "one failed after all: once more"),
        (Phase.RETURNED, Failed): Row("on_failed", (Phase.LEAVING,), _EXCEPT),
        (Phase.STOPPING, Interrupted): Row("on_interrupted", (Phase.FINALIZING,), "nothing blocks any more"),
        (Phase.STOPPING, Completed): Row("on_too_late", (Phase.LEAVING,), "a fault after all had returned"),
        (Phase.STOPPING, Failed): Row("on_failed", (Phase.LEAVING,), "the abort never ended, or no store"),
        (Phase.FINALIZING, Done): Row("on_finalized", (Phase.CHECKING,), "clean"),
        (Phase.FINALIZING, Failed): Row("on_failed", (Phase.LEAVING,), "this process cannot be used again"),
        (Phase.CHECKING, Done): Row("on_checked", (Phase.ARRIVED,), "fit for another iteration"),
        (Phase.CHECKING, Failed): Row("on_failed", (Phase.LEAVING,), "unhealthy"),
        (Phase.ARRIVED, Released): Row("on_released", (Phase.ASSIGNING,), "the next iteration"),
        (Phase.ARRIVED, Failed): Row("on_failed", (Phase.LEAVING,), "declared dead by others, or no store"),
        (Phase.COMPLETING, Done): Row("on_concluded", (Phase.CONCLUDED,), "all have a result"),
        (Phase.COMPLETING, Failed): Row("on_failed", (Phase.LEAVING,), "the plug-in raised"),
        (Phase.CONCLUDED, Released): Row("on_all_concluded", (Phase.DONE,), "all return together"),
        (Phase.CONCLUDED, Failed): Row("on_failed", (Phase.LEAVING,), _EXCEPT),
        (Phase.LEAVING, Done): Row("on_left", (Phase.GONE,), "raised to the caller"),
    }

    def __init__(self, now: float) -> None:
        super().__init__(Phase.OUTSIDE, now)

    def deadline(self) -> float | None:
        """None: every wait of the shell has its own bound and ends with an event."""
        return None

    def _go(self, phase: Phase, what: str) -> None:
        self.state = phase
        self.emit(Do(what))

    def on_called(self, event: object, now: float) -> None:
        """The call begins."""
        self._go(Phase.ENTERING, "enter")

    def on_released(self, event: object, now: float) -> None:
        """An iteration begins."""
        self._go(Phase.ASSIGNING, "assign")

    def on_assigned(self, event: object, now: float) -> None:
        """The rank has its place."""
        self._go(Phase.INITIALIZING, "initialize")

    def on_disturbed(self, event: object, now: float) -> None:
        """Ranks are to be assigned again."""
        self._go(Phase.ARRIVED, "arrive_unassigned")

    def on_initialized(self, event: object, now: float) -> None:
        """`initialize` allows this iteration."""
        self._go(Phase.CHECKING_START, "check_at_start")

    def on_checked_start(self, event: object, now: float) -> None:
        """The rank is healthy."""
        self._go(Phase.RUNNING, "run_or_wait")

    def on_returned(self, event: object, now: float) -> None:
        """The function has a result."""
        self._go(Phase.RETURNED, "complete")

    def on_faulted(self, event: object, now: float) -> None:
        """This rank is the fault, or one of several."""
        self._go(Phase.STOPPING, "tell_fault")

    def on_stopped(self, event: object, now: float) -> None:
        """The rank was interrupted."""
        self._go(Phase.STOPPING, "await_abort")

    def on_completed(self, event: object, now: float) -> None:
        """The run is a success."""
        self._go(Phase.COMPLETING, "call_completion")

    def on_interrupted(self, event: object, now: float) -> None:
        """The function has ended everywhere on this rank, its process groups too."""
        self._go(Phase.FINALIZING, "finalize")

    def on_too_late(self, event: object, now: float) -> None:
        """The others return; this rank has nothing to return."""
        self._go(Phase.LEAVING, "leave")

    def on_finalized(self, event: object, now: float) -> None:
        """Nothing of the iteration is left."""
        self._go(Phase.CHECKING, "check")

    def on_checked(self, event: object, now: float) -> None:
        """The rank is fit."""
        self._go(Phase.ARRIVED, "arrive")

    def on_concluded(self, event: object, now: float) -> None:
        """`completion` has been called."""
        self._go(Phase.CONCLUDED, "conclude")

    def on_all_concluded(self, event: object, now: float) -> None:
        """Return."""
        self.state = Phase.DONE

    def on_failed(self, event: object, now: float) -> None:
        """The rank leaves; the others go on without it."""
        self._go(Phase.LEAVING, "leave")

    def on_left(self, event: object, now: float) -> None:
        """Raise."""
        self.state = Phase.GONE
