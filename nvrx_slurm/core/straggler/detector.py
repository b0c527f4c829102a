"""Which ranks are slow, by how long each rank waits for the others. Pure.

In synchronous training all ranks have the same step time: victims wait, and the culprit waits least. So the work of a
rank is its time from the end of one wait to the end of the next, without the wait. A rank is slow if its work is at
least 10 % and 5 robust deviations above the median of its peers, in 3 of the last 4 windows, and costs 1 % of the time.
Sources: TraceML (the culprit waits least), Greyhound (10 %), reference 5.2.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from statistics import median_low

from nvrx_slurm.declared import Record

EXCESS, SHARE, DEVIATIONS = 0.10, 0.01, 5.0
_PERSISTENT, _OF = 3, 4  # windows
_POOLED = (3, 4, 6)  # windows whose mean is judged: noise from window to window is not slowness
_FEWEST_PEERS = 4
_FEWEST_WAITS = 3
_ALIKE = 1.1  # peers wait about equally often
_SIGMA = 1.4826  # standard deviations in a median absolute deviation of normal noise
_HISTORY = 24  # windows that a job is compared with


class Reading(Record):
    """What a rank has counted in this life. Seconds of its node's clock."""

    waits: int  # waiting sections that have ended
    waited_s: float  # in them, and in sections that save, load or prepare
    until_s: float  # when the last of them ended


class Where(str, Enum):
    """What is slow."""

    RANK = "rank"
    NODE = "node"
    SWITCH = "switch"
    STAGE = "imbalance"  # the work is uneven: it is no node's fault
    ALL = "all"


class Seat(Record):
    """A node and its ranks in a cycle. `switch`: what it shares with its neighbours; None = not known."""

    host: str
    ranks: tuple[int, ...]
    switch: object = None


class Slowness(Record):
    """What is slow in a window. `excess`: work above the peers' median, as a share of that; of the slowest."""

    where: Where
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    excess: float
    share: float  # share of the job's time that is lost by it


class Detector:
    """Judges the ranks of one cycle, at `seats`, in windows of `window_s` seconds. `now` is the coordinator's clock."""

    def __init__(self, seats: Sequence[Seat], window_s: float, now: float) -> None:
        self.seats, self._window_s, self._closed_at = seats, window_s, now
        self._of = {rank: seat for seat in seats for rank in seat.ranks}
        self._last: dict[int, Reading] = {}
        self._base: dict[int, Reading] = {}
        self._news: set[int] = set()  # ranks that have told since the last window
        self._excess: dict[int, deque[float]] = {}
        self._periods: deque[float] = deque(maxlen=_HISTORY)  # of the median rank
        self._work_share = 1.0
        self.windows = 0

    def told(self, readings: Mapping[int, Reading], now: float) -> bool:
        """Ranks have told; whether a window is over: `close` it then. It ends when all ranks have told, or late."""
        known = {rank: reading for rank, reading in readings.items() if rank in self._of}
        self._last.update(known)
        self._news.update(known)
        took_s = now - self._closed_at
        return took_s >= self._window_s and (
            len(self._news) >= len(self._base) or took_s >= 2 * self._window_s
        )

    def close(self, now: float) -> Slowness | None:
        """End the window; None: nothing is slow. O(ranks)."""
        self._closed_at = now
        self._news.clear()
        spans = {
            rank: span
            for rank, at in self._last.items()
            if (span := _span(self._base.get(rank), at))
        }
        self._base = dict(self._last)
        found: dict[int, float] = {}
        for peers in _peers(spans):
            middle = median_low([spans[rank][1] for rank in peers])
            found.update({rank: spans[rank][1] / middle - 1.0 for rank in peers if middle > 0.0})
        for rank in self._last:
            self._excess.setdefault(rank, deque(maxlen=_POOLED[-1])).append(
                found.get(rank, math.nan)
            )
        if not found:
            return None
        self.windows += 1
        period_s = median_low([spans[rank][2] for rank in found])
        self._work_share = median_low([spans[rank][1] for rank in found]) / period_s
        self._periods.append(period_s)
        slow = self._slow()
        if slow:
            return self._located(slow)
        return self._all_together()

    def _slow(self) -> dict[int, float]:
        """Slow ranks, each with its mean excess."""
        often = [
            rank
            for rank, seen in self._excess.items()
            if sum(one >= EXCESS for one in list(seen)[-_OF:]) >= _PERSISTENT
        ]
        slow: dict[int, float] = {}
        for most in _POOLED if often else ():
            means = {
                r: m
                for r, seen in self._excess.items()
                if (m := _mean(list(seen)[-most:], most)) is not None
            }
            if len(means) < _FEWEST_PEERS:
                continue
            middle, needed = median_low(means.values()), _needed(len(means))
            deviation = _SIGMA * median_low([abs(mean - middle) for mean in means.values()])
            for rank in often:
                excess = means.get(rank, 0.0)
                if (
                    excess >= max(EXCESS, middle + needed * deviation)
                    and excess * self._work_share >= SHARE
                ):
                    slow[rank] = excess
        return slow

    def _located(self, slow: Mapping[int, float]) -> Slowness:
        where, ranks, excess = self._where(set(slow)), tuple(sorted(slow)), max(slow.values())
        hosts = tuple(dict.fromkeys(self._of[rank].host for rank in ranks))
        return Slowness(where, ranks, hosts, excess, excess * self._work_share)

    def _where(self, ranks: set[int]) -> Where:
        touched = [seat for seat in self.seats if not ranks.isdisjoint(seat.ranks)]
        whole = all(ranks.issuperset(seat.ranks) for seat in touched)
        if len(ranks) == 1 and len(touched[0].ranks) > 1:
            return Where.RANK
        if 3 * len(ranks) > len(self._of):
            return Where.STAGE  # too many to be the exception
        if len(touched) == 1:
            return Where.NODE if 2 * len(ranks) > len(touched[0].ranks) else Where.RANK
        shared = {seat.switch for seat in touched}
        if whole and None not in shared and len(shared) == 1:
            same = [seat for seat in self.seats if seat.switch in shared]
            return Where.SWITCH if len(same) == len(touched) else Where.STAGE
        alike = {
            tuple(rank - seat.ranks[0] for rank in seat.ranks if rank in ranks) for seat in touched
        }
        return Where.STAGE if len(touched) > 2 or (whole and len(alike) == 1) else Where.RANK

    def _all_together(self) -> Slowness | None:
        """The whole job against its own past."""
        past, now = list(self._periods)[:-_OF], list(self._periods)[-_OF:]
        if len(past) < 2 * _OF:
            return None
        middle = median_low(past)
        deviation = _SIGMA * median_low([abs(one - middle) for one in past])
        limit_s = max((1.0 + EXCESS) * middle, middle + DEVIATIONS * deviation)
        if sum(one >= limit_s for one in now) < _OF:
            return None
        excess = median_low(now) / middle - 1.0
        return Slowness(Where.ALL, (), (), excess, excess / (1.0 + excess))


def _span(since: Reading | None, until: Reading) -> tuple[int, float, float] | None:
    """Waits, and work and period (s) of each; None: the readings make no sense. A rank can write anything."""
    if since is None:
        return None
    waits, took_s, waited_s = (
        until.waits - since.waits,
        until.until_s - since.until_s,
        until.waited_s - since.waited_s,
    )
    if waits < _FEWEST_WAITS or not 0.0 <= waited_s < took_s:
        return None
    return waits, (took_s - waited_s) / waits, took_s / waits


def _peers(spans: Mapping[int, tuple[int, float, float]]) -> list[list[int]]:
    """Groups of ranks that wait about equally often: those of a pipeline stage, as a rule. Small groups say nothing."""
    groups: list[list[int]] = []
    first = 0
    for rank in sorted(spans, key=lambda rank: spans[rank][0]):
        waits = spans[rank][0]
        if not groups or waits > first * _ALIKE + 2:
            groups.append([])
            first = waits
        groups[-1].append(rank)
    return [group for group in groups if len(group) >= _FEWEST_PEERS]


def _mean(values: Sequence[float], most: int) -> float | None:
    known = [one for one in values if not math.isnan(one)]
    return sum(known) / len(known) if len(values) == most and len(known) >= _PERSISTENT else None


def _needed(ranks: int) -> float:
    """Deviations that count: the largest of many is far out by chance, about sqrt(2 ln n)."""
    return max(DEVIATIONS, 2.0 + math.sqrt(2.0 * math.log(ranks)))
