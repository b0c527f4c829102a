"""Restart or give up, and which fault was the first: decisions with the sentence that explains them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nvrx_slurm.errors import ExitCode
from nvrx_slurm.types import FaultKind, RankFault

_SIGABRT = 6  # how C++ ends on an uncaught exception, e.g. gloo or NCCL when a peer is gone


@dataclass(frozen=True, slots=True)
class Decision:
    """`restart`, or end the job with `code`; `why` is one sentence either way."""

    restart: bool
    code: int
    why: str


def decide(used: int, max_restarts: int, cause: RankFault) -> Decision:
    """Whether the job may start another cycle after `cause`, with `used` of `max_restarts` (both per job) spent."""
    if used < max_restarts:
        return Decision(True, ExitCode.OK, f"{headline(cause)}; restart {used + 1} of {max_restarts}")
    left = "no restart was allowed (--max-restarts=0)" if max_restarts == 0 else f"all {max_restarts} restarts are used"
    return Decision(False, ExitCode.FAILED, f"{headline(cause)}; {left}")


def first_cause(faults: Sequence[RankFault]) -> RankFault | None:
    """The fault that most likely caused the others, from faults in order of arrival at the coordinator.

    That is the first to arrive; but a lost node, a hang or a rank killed from outside makes its peers fail with
    connection errors that can be reported sooner, so those win over ranks that exited, or aborted, by themselves.
    """
    outright = [f for f in faults if not _by_itself(f)]
    return next(iter(outright or faults), None)


def _by_itself(fault: RankFault) -> bool:
    aborted = fault.kind is FaultKind.SIGNAL and fault.exit_code == -_SIGABRT
    return fault.kind is FaultKind.EXIT or aborted


def headline(fault: RankFault) -> str:
    """One line without the traceback: who, where, what."""
    where = f"node {fault.infra_rank} ({fault.host})"
    if fault.kind is FaultKind.NODE_LOST and not fault.host:  # no single node is to blame
        return fault.message
    if fault.kind is FaultKind.NODE_LOST:
        return f"{where} was lost: {fault.message}"
    who = f"rank {fault.rank} (local rank {fault.local_rank}, pid {fault.pid}) on {where}"
    if fault.kind is FaultKind.EXIT:
        return f"{who} exited with code {fault.exit_code}" + (f": {fault.message}" if fault.message else "")
    if fault.kind is FaultKind.SIGNAL:
        return f"{who} was killed by {fault.message or f'signal {-fault.exit_code}'}"
    if fault.kind is FaultKind.HANG:
        return f"{who} hung: {fault.message}"
    if fault.kind is FaultKind.SPAWN:
        return f"{who} could not be started: {fault.message}"
    return f"{who} does not end: {fault.message}"


def report(fault: RankFault) -> str:
    """The first-cause report, several lines: headline, log file, traceback."""
    lines = [f"first cause: {headline(fault)}"]
    if fault.log:
        lines.append(f"  log: {fault.log}")
    lines += ["  | " + line for line in fault.traceback.rstrip().splitlines()]
    return "\n".join(lines)
