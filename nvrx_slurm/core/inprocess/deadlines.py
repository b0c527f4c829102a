"""When a rank of the in-process wrapper is interrupted or killed, by what its shared page says."""

from __future__ import annotations

from enum import Enum, auto

from nvrx_slurm.declared import Record


class Action(Enum):
    """What follows from a limit."""

    NONE = auto()
    INTERRUPT = auto()  # the function is stopped on all ranks
    KILL = auto()  # this rank's process is killed


class Observation(Record):
    """What the page says at one moment, in monotonic seconds of this host.

    `progress_s`: the last sign of progress, None = hang protection is off. `soft`: the soft timeout applies.
    `restart_s`: the start of the way to the next iteration, None = the rank is not on it. `resumed_s`: no limit runs
    before it, since the observer itself was stopped until then (0 = never).
    """

    progress_s: float | None
    soft: bool
    restart_s: float | None
    resumed_s: float = 0.0


class Deadlines(Record):
    """The limits of one rank in seconds, each > 0: soft timeout, hard timeout, and the way to the next iteration."""

    soft_s: float
    hard_s: float
    restart_s: float

    def judge(self, seen: Observation, now_s: float) -> tuple[Action, float, str]:
        """What to do at `now_s`, when to judge again (monotonic seconds), and the sentence that explains it."""
        running = (
            (Action.KILL, self.hard_s, seen.progress_s, "no progress"),
            (Action.KILL, self.restart_s, seen.restart_s, "not ready for the next iteration"),
            (Action.INTERRUPT, self.soft_s, seen.progress_s if seen.soft else None, "no progress"),
        )
        due_s = []
        for action, limit_s, since_s, missing in running:
            # it may begin to run just after this
            began_s = now_s if since_s is None else max(since_s, seen.resumed_s)
            if now_s - began_s >= limit_s:
                return action, now_s, f"{missing} for {now_s - began_s:.1f} s"
            due_s.append(began_s + limit_s)
        return Action.NONE, min(due_s), "no limit is reached"
