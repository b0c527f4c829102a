"""When the allocation ends, and what to do before that: warn, stop. Times in monotonic seconds."""

from __future__ import annotations

from enum import Enum

_ANSWER_S = 15.0  # after this time without an answer, what was known before holds

_ASK, _ANSWER, _ACT = "ask", "answer", "act"  # the steps


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
        self._at: float | None = now if limited else None  # when the next step is due
        self._next = _ASK
        self._warned = warn_before_s <= 0.0

    @property
    def known(self) -> bool:
        """Whether the time left was ever known."""
        return self._end_at is not None

    def deadline(self) -> float | None:
        """When `look` is due (monotonic seconds), or None."""
        return self._at

    def look(self, now: float) -> Due:
        """The action that is due at `now`."""
        if self._at is None or now < self._at:
            return Due.NOTHING
        if self._next == _ASK:
            self._at, self._next = now + _ANSWER_S, _ANSWER
            return Due.ASK
        if self._next == _ANSWER:
            return self.answer(None, now)
        self._at = None
        return self._act(now)

    def answer(self, left_s: float | None, now: float) -> Due:
        """`left_s` seconds are left; None = no answer: the time that was known before holds."""
        self._at = None
        self._end_at = self._end_at if left_s is None else now + left_s
        before_s = self._stop_before_s if self._warned else max(self._warn_before_s, self._stop_before_s)
        if self._end_at is None or before_s <= 0.0:
            return Due.NOTHING
        due = self._end_at - before_s
        if now >= due:
            return self._act(now)
        ask_again = due - now > 2 * _ANSWER_S
        self._at, self._next = (due - _ANSWER_S, _ASK) if ask_again else (due, _ACT)
        return Due.NOTHING

    def _act(self, now: float) -> Due:
        assert self._end_at is not None
        if self._stop_before_s > 0.0 and now >= self._end_at - self._stop_before_s:
            return Due.STOP
        if self._warned or now < self._end_at - self._warn_before_s:
            return Due.NOTHING
        self._warned = True
        if self._stop_before_s > 0.0:
            self._at, self._next = max(now, self._end_at - self._stop_before_s - _ANSWER_S), _ASK
        return Due.WARN
