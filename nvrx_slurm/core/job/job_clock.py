"""When the allocation ends, and what to do before that: warn, stop. Times in monotonic seconds."""

from __future__ import annotations

from enum import Enum

from nvrx_slurm.core.machine import earliest

_ANSWER_S = 15.0  # after this time without an answer, what was known before holds


class Due(Enum):
    """What is to be done."""

    NOTHING = 0
    ASK = 1  # how much time is left: an administrator may have changed it
    WARN = 2
    STOP = 3


class JobClock:
    """Asks for the time left at the start, and again shortly before a warning or a stop; then warns or stops."""

    def __init__(self, limited: bool, warn_before_s: float, stop_before_s: float, now: float) -> None:
        self._warn_before_s, self._stop_before_s = warn_before_s, stop_before_s
        self._end_at: float | None = None
        self._ask_at: float | None = now if limited else None
        self._answer_by: float | None = None
        self._act_at: float | None = None
        self._last_time = False  # the question under way is the last one before acting
        self._warned = warn_before_s <= 0.0

    @property
    def known(self) -> bool:
        """Whether the time left was ever known."""
        return self._end_at is not None

    def deadline(self) -> float | None:
        """When `look` is due (monotonic seconds), or None."""
        return earliest(self._ask_at, self._answer_by, self._act_at)

    def look(self, now: float) -> Due:
        """What is due at `now`."""
        if self._answer_by is not None and now >= self._answer_by:
            return self.answer(None, now)
        if self._ask_at is not None and now >= self._ask_at:
            self._ask_at, self._answer_by = None, now + _ANSWER_S
            self._last_time = self._is_near(now)
            return Due.ASK
        if self._act_at is not None and now >= self._act_at:
            self._act_at = None
            return self._act(now)
        return Due.NOTHING

    def answer(self, left_s: float | None, now: float) -> Due:
        """`left_s` seconds are left; None = no answer: what was known before holds."""
        self._answer_by = self._ask_at = self._act_at = None
        if left_s is not None:
            self._end_at = now + left_s
        if self._end_at is None:
            return Due.NOTHING
        due = self._due_at(self._end_at)
        if due is None or now >= due:
            return self._act(now)
        if self._last_time and self._is_near(now):
            self._act_at = due
        else:
            self._ask_at = max(now, due - _ANSWER_S)
        return Due.NOTHING

    def _is_near(self, now: float) -> bool:
        """Whether there is no time to ask more than once."""
        due = self._due_at(self._end_at) if self._end_at is not None else None
        return due is not None and due - now <= 2 * _ANSWER_S

    def _due_at(self, end_at: float) -> float | None:
        """When to warn, or once that is done, to stop."""
        before_s = self._stop_before_s if self._warned else max(self._warn_before_s, self._stop_before_s)
        return end_at - before_s if before_s > 0.0 else None

    def _act(self, now: float) -> Due:
        assert self._end_at is not None
        if self._stop_before_s > 0.0 and now >= self._end_at - self._stop_before_s:
            return Due.STOP
        if self._warned or now < self._end_at - self._warn_before_s:
            return Due.NOTHING
        self._warned = True
        if self._stop_before_s > 0.0:
            self._ask_at = max(now, self._end_at - self._stop_before_s - _ANSWER_S)
        return Due.WARN
