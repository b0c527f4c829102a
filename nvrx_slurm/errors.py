"""The error tree and the table of exit codes.

Slurm, batch scripts and job chains decide by these numbers. A code is the same on every node that learns of the event.
128+n means "ended by signal n", as in a shell. Slurm calls such a job FAILED, also for 138 (warned, work saved).
"""

from __future__ import annotations

from enum import IntEnum

# For features that need an extra package; each says how to get it.
NEEDS_GRPC = "gRPC is missing: pip install 'nvrx_slurm[node-service]'"


class ExitCode(IntEnum):
    """What ``nvrx-run`` and ``nvrx`` exit with (see docs/reference/exit-codes.md for what to do about each)."""

    OK = 0  # the workload finished on all ranks
    FAILED = 1  # the workload failed and no restart was left, or none was asked for
    USAGE = 2  # bad flags, environment, YAML or allocation shape; nothing was started
    NO_RESTART = 93  # another try would end the same way
    TOO_FEW_NODES = 94  # fewer than MIN healthy nodes until the join timeout ran out
    NODE_REFUSED = 95  # the coordinator does not take this node
    COORDINATOR_LOST = 96  # no coordinator of this job was found in time
    INTERNAL = 97  # a defect of nvrx_slurm itself


def signal_exit_code(signum: int) -> int:
    """Exit code of a job ended by signal `signum` (1..64): 128 + signum, as shells report it."""
    return 128 + int(signum)


class NvrxError(Exception):
    """Base of all errors of this package. A program that ends because of one exits with its `exit_code`."""

    exit_code: int = ExitCode.FAILED


class UsageError(NvrxError):
    """Input from a person or a file is wrong. The message is one sentence: what is wrong, where, what to do."""

    exit_code = ExitCode.USAGE


class ProtocolError(NvrxError):
    """A peer sent a message that this version never sends (too long, wrong type, wrong order)."""

    exit_code = ExitCode.INTERNAL


class AuthError(NvrxError):
    """A peer could not prove that it belongs to this job."""

    exit_code = ExitCode.NODE_REFUSED


class UnknownTransition(NvrxError):
    """A state machine got an event for which its table has no row: a defect, never ignored."""

    exit_code = ExitCode.INTERNAL
