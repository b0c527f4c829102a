"""What the in-process wrapper and its plug-ins raise.

A `RestartError` on one rank takes that rank out or restarts the function everywhere; `RestartAbort` ends the wrapper
on the rank that raises it, like any other BaseException.
"""

from __future__ import annotations

from nvrx_slurm.errors import NvrxError


class RestartError(NvrxError):
    """Base of all errors of in-process restart."""


class HealthCheckError(RestartError):
    """A health check found this rank unfit to go on; the rank leaves."""


class FaultCounterExceeded(RestartError):
    """This rank failed more often than `FaultCounter` allows; the rank leaves."""


class RankDiscarded(RestartError):
    """Rank assignment has no place for this rank any more; the rank leaves."""


class InternalError(RestartError):
    """A plug-in or the wrapper itself broke its own contract."""


class TimeoutError(RestartError):
    """Something did not happen within its bound."""


class BarrierError(RestartError):
    """A barrier could not be passed."""


class BarrierTimeout(BarrierError):
    """Not all ranks came within the barrier's timeout."""


class BarrierOverflow(BarrierError):
    """More ranks came to a barrier than it was made for."""


class RestartAbort(BaseException):
    """No further restart is wanted: the wrapper ends and raises this. Not an `Exception`, which would restart."""
