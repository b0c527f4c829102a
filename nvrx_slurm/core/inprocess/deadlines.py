"""When a rank of the in-process wrapper is interrupted or killed: `core.rank.watch` applied to its shared page."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from nvrx_slurm.core.rank import watch


class Action(Enum):
    """What follows from a limit."""

    NONE = auto()
    INTERRUPT = auto()  # the function is stopped on all ranks
    KILL = auto()  # this rank's process is killed


@dataclass(frozen=True, slots=True)
class Observation:
    """What the page says at one moment, in monotonic seconds of this host.

    `progress_s`: the last sign of progress, None = hang protection is off. `soft`: the soft timeout applies.
    `restart_s`: the start of the way to the next iteration, None = the rank is not on it. `resumed_s`: no limit runs
    before it, since the observer itself was stopped until then (0 = never).
    """

    progress_s: float | None
    soft: bool
    restart_s: float | None
    resumed_s: float = 0.0


class Deadlines:
    """The limits of one rank in seconds, each > 0: soft timeout, hard timeout, and the way to the next iteration."""

    def __init__(self, soft_s: float, hard_s: float, restart_s: float) -> None:
        limits = (soft_s, hard_s, restart_s)
        self._soft, self._hard, self._restart = (watch.Limits(rank_section_timeouts={"": one}) for one in limits)

    def judge(self, seen: Observation, now_s: float) -> tuple[Action, float, str]:
        """What to do at `now_s`, when to look again (monotonic seconds), and the sentence that explains it."""
        soft_s = seen.progress_s if seen.soft else None
        running = (
            (Action.KILL, self._hard, seen.progress_s, "no progress"),
            (Action.KILL, self._restart, seen.restart_s, "not ready for the next iteration"),
            (Action.INTERRUPT, self._soft, soft_s, "no progress"),
        )
        looks = []
        for action, limits, since_s, missing in running:
            view = watch.View(0.0, initialized_s=0.0, resumed_s=seen.resumed_s, sections=(since_s,))
            verdict = watch.judge(limits, view, now_s)
            if verdict.hung and since_s is not None:
                return action, now_s, f"{missing} for {now_s - max(since_s, seen.resumed_s):.1f} s"
            if verdict.deadline_s is not None:
                looks.append(verdict.deadline_s)
        return Action.NONE, min(looks), "no limit is reached"
