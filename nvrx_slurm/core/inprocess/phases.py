"""The restart sequence of one rank inside the in-process wrapper, as a table.

The command of each step is the phase that begins. The shell (`inprocess/runner.py`) does what is to be done in it and
answers with the event that followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar

from nvrx_slurm.core.machine import Machine, Row


class Phase(Enum):
    """The state of a rank."""

    OUTSIDE = "the wrapped function has not been called"
    ENTERING = "waits until all ranks have called the wrapped function (initial barrier)"
    ASSIGNING = "learns its rank, and where rank 0 is, for the iteration that begins"
    INITIALIZING = "calls `initialize`"
    CHECKING_START = "calls `health_check` before the function"
    RUNNING = "calls the function, or waits as a reserve"
    RETURNED = "waits until the function has returned on all active ranks (completion barrier)"
    TELLING = "the function has failed here: tells all others; `abort` is being called"
    STOPPING = "the function has ended here; `abort` is being called"
    FINALIZING = "calls `finalize`"
    CHECKING = "calls the health checks before another iteration"
    ARRIVED = "waits until all ranks are ready for another iteration, or gone (iteration barrier)"
    UNASSIGNED = "waits as in ARRIVED, for ranks to be assigned again"
    COMPLETING = "calls `completion`"
    CONCLUDED = "waits until all ranks are about to return (termination barrier)"
    LEAVING = "leaves for good: tells the others, calls `terminate`"
    DONE = "the wrapper returns"
    GONE = "the wrapper raises"


# --- events -----------------------------------------------------------------------------------------------------------


class Called:
    """The wrapped function was called."""


class Released:
    """All ranks have come to the barrier or have left."""


class Assigned:
    """This rank has its place in the new iteration."""


class Disturbed:
    """A rank was lost while ranks were being assigned, so they are assigned again."""


class Done:
    """A plug-in, or another step, has ended."""


class Returned:
    """The function has returned on this rank."""


class Faulted:
    """The function, `initialize` or the first health check raised an Exception."""


class Stopped:
    """The function, or a step before it, was interrupted because of another rank or a timeout."""


class Completed:
    """The function has returned on all active ranks."""


class Interrupted:
    """The iteration ended with a fault on some rank, and `abort` has been called here."""


class Failed:
    """This rank cannot go on: a BaseException, an unhealthy or discarded rank, a lost store."""


_EXCEPT = "cannot go on"


class Restarts(Machine):
    """One call of a wrapped function on one rank; each step emits at most one phase."""

    table: ClassVar[Mapping[tuple[Enum, type], Row]] = {
        (Phase.OUTSIDE, Called): Row("go", (Phase.ENTERING,), "the initial barrier"),
        (Phase.ENTERING, Released): Row("go", (Phase.ASSIGNING,), "the first iteration"),
        (Phase.ENTERING, Failed): Row("go", (Phase.LEAVING,), "not all came, or there is no store"),
        (Phase.ASSIGNING, Assigned): Row("go", (Phase.INITIALIZING,), "active and reserve ranks alike"),
        (Phase.ASSIGNING, Disturbed): Row("go", (Phase.UNASSIGNED,), "with the ranks it had before"),
        (Phase.ASSIGNING, Stopped): Row("go", (Phase.STOPPING,), "a rank was lost before it began"),
        (Phase.ASSIGNING, Failed): Row("go", (Phase.LEAVING,), "discarded, or no rank is active"),
        (Phase.INITIALIZING, Done): Row("go", (Phase.CHECKING_START,), "may this be tried?"),
        (Phase.INITIALIZING, Faulted): Row("go", (Phase.TELLING,), "an Exception means another try"),
        (Phase.INITIALIZING, Stopped): Row("go", (Phase.STOPPING,), "another rank failed meanwhile"),
        (Phase.INITIALIZING, Failed): Row("go", (Phase.LEAVING,), "RestartAbort: enough tries"),
        (Phase.CHECKING_START, Done): Row("go", (Phase.RUNNING,), "healthy"),
        (Phase.CHECKING_START, Stopped): Row("go", (Phase.STOPPING,), "another rank failed meanwhile"),
        (Phase.CHECKING_START, Faulted): Row("go", (Phase.TELLING,), "unhealthy now: another try, as in NVRx"),
        (Phase.CHECKING_START, Failed): Row("go", (Phase.LEAVING,), _EXCEPT),
        (Phase.RUNNING, Returned): Row("go", (Phase.RETURNED,), "perhaps not yet on the others"),
        (Phase.RUNNING, Faulted): Row("go", (Phase.TELLING,), "tells all others"),
        (Phase.RUNNING, Stopped): Row("go", (Phase.STOPPING,), "as told by another rank or a timeout"),
        (Phase.RUNNING, Failed): Row("go", (Phase.LEAVING,), "a BaseException of the function"),
        (Phase.RUNNING, Completed): Row("go", (Phase.COMPLETING,), "a reserve is not needed any more"),
        (Phase.RUNNING, Interrupted): Row("go", (Phase.FINALIZING,), "a reserve may be needed"),
        (Phase.RETURNED, Completed): Row("go", (Phase.COMPLETING,), "all have returned"),
        (Phase.RETURNED, Interrupted): Row("go", (Phase.FINALIZING,), "one failed after all: once more"),
        (Phase.RETURNED, Failed): Row("go", (Phase.LEAVING,), _EXCEPT),
        (Phase.TELLING, Interrupted): Row("go", (Phase.FINALIZING,), "nothing blocks any more"),
        (Phase.TELLING, Completed): Row("go", (Phase.LEAVING,), "a fault after all had returned"),
        (Phase.TELLING, Failed): Row("go", (Phase.LEAVING,), "the abort never ended, or no store"),
        (Phase.STOPPING, Interrupted): Row("go", (Phase.FINALIZING,), "nothing blocks any more"),
        (Phase.STOPPING, Completed): Row("go", (Phase.LEAVING,), "a fault after all had returned"),
        (Phase.STOPPING, Failed): Row("go", (Phase.LEAVING,), "the abort never ended, or no store"),
        (Phase.FINALIZING, Done): Row("go", (Phase.CHECKING,), "clean"),
        (Phase.FINALIZING, Failed): Row("go", (Phase.LEAVING,), "this process cannot be used again"),
        (Phase.CHECKING, Done): Row("go", (Phase.ARRIVED,), "fit for another iteration"),
        (Phase.CHECKING, Failed): Row("go", (Phase.LEAVING,), "unhealthy"),
        (Phase.ARRIVED, Released): Row("go", (Phase.ASSIGNING,), "the next iteration"),
        (Phase.ARRIVED, Failed): Row("go", (Phase.LEAVING,), "declared dead by others, or no store"),
        (Phase.UNASSIGNED, Released): Row("go", (Phase.ASSIGNING,), "the next iteration"),
        (Phase.UNASSIGNED, Failed): Row("go", (Phase.LEAVING,), "declared dead by others, or no store"),
        (Phase.COMPLETING, Done): Row("go", (Phase.CONCLUDED,), "all have a result"),
        (Phase.COMPLETING, Failed): Row("go", (Phase.LEAVING,), "the plug-in raised"),
        (Phase.CONCLUDED, Released): Row("go", (Phase.DONE,), "all return together"),
        (Phase.CONCLUDED, Failed): Row("go", (Phase.LEAVING,), _EXCEPT),
        (Phase.LEAVING, Done): Row("go", (Phase.GONE,), "raised to the caller"),
    }

    def __init__(self, now: float) -> None:
        super().__init__(Phase.OUTSIDE, now)

    def deadline(self) -> float | None:
        """None: every wait of the shell has its own bound and ends with an event."""
        return None

    def go(self, event: object, now: float) -> Enum:
        """To the only state of the row; the command is the phase that begins."""
        to = self.table[self.state, type(event)].to[0]
        if to not in (Phase.DONE, Phase.GONE):
            self.emit(to)
        return to
