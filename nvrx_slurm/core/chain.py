"""Whether a chain of jobs goes on: jobs that continue each other until the training is done. Pure.

A link is one life of a job: one Slurm restart of it, or one of several jobs that run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from nvrx_slurm.core.words import in_words
from nvrx_slurm.declared import Record
from nvrx_slurm.errors import ExitCode

FINAL = frozenset({ExitCode.OK, ExitCode.USAGE, ExitCode.NO_RESTART})
# exit codes of a job that a signal ended; srun's own errors are 255
_SIGNALS = range(128 + 1, 128 + 64 + 1)


class Next(Enum):
    """What becomes of the chain after a link."""

    CONTINUE = "start the next link"
    END = "start none any more"
    LEAVE = "let Slurm do what it does after a signal: requeue a preempted job, end a cancelled one"


class ChainLimits(Record):
    """`failures` (>= 1) of them within `window_s` seconds (> 0) end the chain; 128 + `warning_signum` is none.

    `no_restart_code` ends it at once, too.
    """

    failures: int
    window_s: float
    warning_signum: int
    no_restart_code: int = ExitCode.NO_RESTART


class Outside(Enum):
    """What ended a job that got a signal."""

    REQUEUED = "it was preempted, or somebody ran scontrol requeue: Slurm starts it again"
    PREEMPTED = "it was preempted"
    TIME_LIMIT = "it reached its time limit"
    SENT = "somebody sent it the signal"
    CANCELLED = "it was cancelled"


class ChainLink(Record):
    """A link that is over: its exit code, when it ended (Unix seconds), whether it was stopped for its time limit, and
    what ended it from outside."""

    code: int
    ended_s: float
    out_of_time: bool = False
    outside: Outside | None = None


class ChainDecision(Record):
    """What to do, and the sentence about it."""

    next: Next
    why: str


def decide(links: Iterable[ChainLink], limits: ChainLimits, now_s: float) -> ChainDecision:
    """What follows the last of `links`, in any order, at `now_s` (Unix seconds). Without links: CONTINUE."""
    ordered = sorted(links, key=lambda link: link.ended_s)
    if not ordered:
        return ChainDecision(Next.CONTINUE, "the first link")
    code = ordered[-1].code
    if code in FINAL or code == limits.no_restart_code:
        return ChainDecision(Next.END, f"code {code} ends the chain")
    if limits.warning_signum > 0 and code == 128 + limits.warning_signum:
        return ChainDecision(Next.CONTINUE, f"stopped early with {code}, work saved")
    if ordered[-1].out_of_time:
        return ChainDecision(
            Next.CONTINUE, "stopped before the time limit; it goes on from the last checkpoint"
        )
    if code in _SIGNALS:
        outside = ordered[-1].outside
        # a notice before the end is not the end: with a GraceTime Slurm counts a job that heeds it as failed
        what = Next.CONTINUE if outside is Outside.PREEMPTED else Next.LEAVE
        return ChainDecision(what, outside.value if outside else f"ended by signal {code - 128}")
    failures = [link for link in ordered if link.code not in FINAL and link.code not in _SIGNALS]
    recent = sum(now_s - link.ended_s < limits.window_s for link in failures)
    if recent >= limits.failures:
        return ChainDecision(
            Next.END,
            f"{recent} failures within {in_words(limits.window_s)} (--chain-failures): given up",
        )
    return ChainDecision(
        Next.CONTINUE,
        f"failure {recent} of at most {limits.failures} within {in_words(limits.window_s)}",
    )


def ended_from_outside(state: str, reason: str, requeued: bool, preempted: bool) -> Outside:
    """What ended a job that got a signal: by its state and reason in Slurm then, and whether Slurm requeues it."""
    if requeued:
        return Outside.REQUEUED
    if preempted or state == "PREEMPTED":
        return Outside.PREEMPTED
    if reason == "TimeLimit":
        return Outside.TIME_LIMIT
    return Outside.SENT if state == "RUNNING" else Outside.CANCELLED
