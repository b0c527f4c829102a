"""Error tree and the one table of exit codes.

Slurm, batch scripts and job chains decide by these numbers, so each is the same on every node that could
learn of the event, and each comes with a sentence. 128+n means "ended by signal n", as in a shell.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What ``nvrx-run`` and ``nvrx`` exit with (see docs/operations.md for what to do about each)."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NO_RESTART = 93
    TOO_FEW_NODES = 94
    NODE_REFUSED = 95
    COORDINATOR_LOST = 96
    INTERNAL = 97


EXIT_CODE_MEANING: dict[ExitCode, str] = {
    ExitCode.OK: "the workload finished on all ranks",
    ExitCode.FAILED: "the workload failed and no restart was left (or none was asked for)",
    ExitCode.USAGE: "bad flags, environment, YAML or allocation shape; nothing was started",
    ExitCode.NO_RESTART: "do not restart or requeue: another try would end the same way",
    ExitCode.TOO_FEW_NODES: "fewer than MIN healthy nodes until the join timeout ran out",
    ExitCode.NODE_REFUSED: "the coordinator does not take this node (excluded, replaced, or not of this job)",
    ExitCode.COORDINATOR_LOST: "no coordinator could be reached within the join timeout",
    ExitCode.INTERNAL: "a defect of nvrx_slurm itself; please report it with the event log",
}


def signal_exit_code(signum: int) -> int:
    """Exit code of a job ended by signal `signum` (1..64): 128 + signum, as shells report it."""
    return 128 + int(signum)


class NvrxError(Exception):
    """Base of all errors of this package; `exit_code` is what a program that dies of it exits with."""

    exit_code: int = ExitCode.FAILED


class UsageError(NvrxError):
    """Input from a person or a file is wrong: one sentence that says what, where, and what to do."""

    exit_code = ExitCode.USAGE


class ProtocolError(NvrxError):
    """A peer sent something that no peer of this version sends (too long, wrong type, wrong order)."""

    exit_code = ExitCode.INTERNAL


class AuthError(NvrxError):
    """A peer could not prove that it belongs to this job."""

    exit_code = ExitCode.NODE_REFUSED


class UnknownTransition(NvrxError):
    """A state machine got an event that its table has no row for: a defect, never ignored."""

    exit_code = ExitCode.INTERNAL
