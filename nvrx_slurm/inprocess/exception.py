"""Exceptions of the in-process wrapper and its plug-ins.

A `RestartError` on one rank removes that rank or restarts the function everywhere. `RestartAbort` ends the wrapper on
the rank that raises it, like any other BaseException.
"""

from __future__ import annotations

from nvrx_slurm.errors import NvrxError


class RestartError(NvrxError):
    """Base of all errors of in-process restart."""


class HealthCheckError(RestartError):
    """A health check failed, `__cause__` says why; the rank leaves."""


class FaultCounterExceeded(RestartError):
    """This rank failed more often than `FaultCounter` allows; the rank leaves."""


class RankDiscarded(RestartError):
    """Rank assignment has no place for this rank; the rank leaves."""


class InternalError(RestartError):
    """A plug-in or the wrapper broke its contract."""


class TimeoutError(RestartError):
    """An operation did not end within its bound."""


class BarrierError(RestartError):
    """A barrier failed."""


class BarrierTimeout(BarrierError):
    """Not all ranks arrived within the barrier's timeout."""


class BarrierOverflow(BarrierError):
    """More ranks arrived than the barrier was made for."""


class RestartAbort(BaseException):
    """Do not restart: the wrapper ends and raises this. Not an `Exception`, which would cause a restart."""
