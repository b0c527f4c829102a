"""Whether the loss that ranks report is wrong: not finite, far above what it was, or not the same on all ranks. Pure.

A loss far above its median comes back by itself, as a rule: after a spike, or a change of the learning rate. It counts
as wrong only if it stays up. A falling loss is below its median, which makes this less sensitive.
"""

from __future__ import annotations

from collections import Counter, deque
from math import isfinite
from statistics import median
from typing import NamedTuple

_WINDOW = 128  # reports that the median is of
# above the median: so many robust deviations, and such a part of the median itself
_DEVIATIONS, _SHARE = 8.0, 0.5
_MAD = 1.4826  # median absolute deviations of a normal distribution are one standard deviation
_STAYS = 64  # reports in a row above half of the peak
_OVERFLOWS = 16  # not finite in a row: with loss scaling some gradients are
_AGAIN = 16  # reports after which the median is computed anew
_LEARN = 100  # iterations with equal bits, before other bits count: a loss may not be all-reduced
_MOST_OPEN = 256  # iterations that not all ranks have reported


class LossReport(NamedTuple):
    """One call of `RankMonitorClient.report`."""

    iteration: int
    loss: float | None
    grad_norm: float | None
    bits: int  # of the loss


class LossJudge:
    """Judges the reports of one rank, in their order."""

    def __init__(self) -> None:
        self._usual, self._age = deque[float](maxlen=_WINDOW), 0
        self._median = self._limit = self._peak = 0.0
        self._high = self._overflows = 0
        self._said = False  # that it is not finite

    def judge(self, report: LossReport) -> str:
        """What is wrong, "" = nothing new."""
        loss, grad_norm = report.loss, report.grad_norm
        finite = loss is None or isfinite(loss)
        said, self._said = self._said, not finite
        self._overflows = 0 if grad_norm is None or isfinite(grad_norm) else self._overflows + 1
        at = f"at iteration {report.iteration}"
        if not finite:
            return "" if said else f"the loss is {loss} {at}"
        if self._overflows == _OVERFLOWS:
            return f"the norm of the gradients is not finite in {_OVERFLOWS} reports, {at}"
        if loss is None or not self._stays_up(loss):
            return ""
        return f"the loss is {loss:.6g} {at}, and was {self._median:.6g}: it stays up"

    def _stays_up(self, loss: float) -> bool:
        usual, above = self._usual, loss - self._median
        if len(usual) < _WINDOW or above <= self._limit:
            usual.append(loss)
            self._age, self._high = self._age + 1, 0
            if len(usual) == _WINDOW and self._age >= _AGAIN:
                self._age, self._median = 0, median(usual)
                spread = _MAD * median(abs(one - self._median) for one in usual)
                self._limit = max(_DEVIATIONS * spread, _SHARE * abs(self._median))
            return False
        if not self._high or above < self._peak / 2:  # it begins, or falls
            self._high, self._peak = 0, above
        self._high, self._peak = self._high + 1, max(self._peak, above)
        if self._high < _STAYS:
            return False
        usual.clear()
        self._high = 0
        return True


class Agreement:
    """Compares the losses that ranks report for the same iteration. Ranks are numbers."""

    def __init__(self) -> None:
        self._open: dict[int, dict[int, int]] = {}  # iteration -> bits by rank
        self._equal = 0  # iterations in a row

    @property
    def learned(self) -> bool:
        """Whether the loss is the same on all ranks, so that one of them can stand for all."""
        return self._equal >= _LEARN

    def judge(self, rank: int, report: LossReport, ranks: int) -> str:
        """`ranks`: how many report a loss. Which ranks are different; "" = none, or it is not known yet."""
        told = self._open.setdefault(report.iteration, {})
        told[rank] = report.bits
        if len(told) < ranks or ranks < 2:
            while len(self._open) > _MOST_OPEN:
                del self._open[next(iter(self._open))]
            return ""
        del self._open[report.iteration]
        ((usual, most), *others), learned = Counter(told.values()).most_common(), self.learned
        self._equal = 0 if others else self._equal + 1
        if not others or not learned:
            return ""
        odd = [
            str(rank)
            for rank, bits in sorted(told.items())
            if bits != usual or 2 * most <= len(told)
        ]
        return f"the loss of iteration {report.iteration} has other bits on rank {', '.join(odd)} of {len(told)} ranks"
