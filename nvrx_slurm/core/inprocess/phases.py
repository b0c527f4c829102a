"""The restart sequence of one rank inside the in-process wrapper, as a table.

The command of each step is the phase that begins. The shell (`inprocess/runner.py`) does what is to be done in it and
answers with the event that followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar

from nvrx_slurm.core.machine import Machine, Row, rows


class RestartPhase(Enum):
    """The state of a rank."""

    OUTSIDE = "the wrapped function has not been called"
    ENTERING = "waits until all ranks have called the wrapped function (initial barrier)"
    ASSIGNING = "learns its rank, and where rank 0 is, for the iteration that begins"
    STARTING = "calls `initialize` and the first `health_check`"
    RUNNING = "calls the function, or waits as a reserve"
    RETURNED = "waits until the function has returned on all active ranks (completion barrier)"
    STOPPING = "the function has ended here: tells all others of a fault; `abort` is being called"
    RECOVERING = "calls `finalize` and the health checks before another iteration"
    ARRIVED = "waits until all ranks are ready for another iteration, or gone (iteration barrier)"
    COMPLETING = (
        "calls `completion`, waits until all ranks are about to return (termination barrier)"
    )
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


class AssignmentFailed:
    """A rank was lost while ranks were being assigned, so they are assigned again."""


class StepDone:
    """The steps of this phase have ended well."""


class Returned:
    """The function has returned on this rank."""


class FunctionEnded:
    """The function, or a step before it, raised an Exception here, or was stopped for another rank or a timeout."""


class Completed:
    """The function has returned on all active ranks."""


class Interrupted:
    """The iteration ended with a fault on some rank, and `abort` has been called here."""


class CannotGoOn:
    """A BaseException, an unhealthy or discarded rank, or a lost store: this rank leaves."""


_P = RestartPhase
_INSIDE = (
    _P.ENTERING,
    _P.ASSIGNING,
    _P.STARTING,
    _P.RUNNING,
    _P.RETURNED,
    _P.STOPPING,
    _P.RECOVERING,
)


class Restarts(Machine):
    """One call of a wrapped function on one rank; each step emits at most one phase."""

    table: ClassVar[Mapping[tuple[Enum, type], Row]] = rows(
        (_P.OUTSIDE, Called, "go", (_P.ENTERING,), "the initial barrier"),
        ((_P.ENTERING, _P.ARRIVED), Released, "go", (_P.ASSIGNING,), "the next iteration"),
        (_P.ASSIGNING, Assigned, "go", (_P.STARTING,), "active and reserve ranks alike"),
        (_P.ASSIGNING, AssignmentFailed, "go", (_P.ARRIVED,), "with the ranks they had before"),
        (_P.STARTING, StepDone, "go", (_P.RUNNING,), "healthy"),
        (_P.RUNNING, Returned, "go", (_P.RETURNED,), "perhaps not yet on the others"),
        (
            (_P.ASSIGNING, _P.STARTING, _P.RUNNING),
            FunctionEnded,
            "go",
            (_P.STOPPING,),
            "all ranks try again",
        ),
        ((_P.RUNNING, _P.RETURNED), Completed, "go", (_P.COMPLETING,), "all have returned"),
        (_P.STOPPING, Completed, "go", (_P.LEAVING,), "a fault after all had returned"),
        (
            (_P.RUNNING, _P.RETURNED, _P.STOPPING),
            Interrupted,
            "go",
            (_P.RECOVERING,),
            "nothing blocks any more",
        ),
        (_P.RECOVERING, StepDone, "go", (_P.ARRIVED,), "fit for another iteration"),
        (_P.COMPLETING, Released, "go", (_P.DONE,), "all return together"),
        (
            (*_INSIDE, _P.ARRIVED, _P.COMPLETING),
            CannotGoOn,
            "go",
            (_P.LEAVING,),
            "the others go on",
        ),
        (_P.LEAVING, StepDone, "go", (_P.GONE,), "raised to the caller"),
    )

    def __init__(self, now: float) -> None:
        super().__init__(RestartPhase.OUTSIDE, now)

    def deadline(self) -> float | None:
        """None: every wait of the shell has its own bound and ends with an event."""
        return None

    def go(self, event: object, now: float) -> Enum:
        """Go to the only state of the row; the command is the phase that begins."""
        to = self.table[self.state, type(event)].to[0]
        if to not in (RestartPhase.DONE, RestartPhase.GONE):
            self.emit(to)
        return to
