"""Virtual time: what is due next happens next. Nothing sleeps, and equal seeds give equal runs."""

import heapq
import itertools


class Clock:
    """A heap of (when, what). `now` is virtual seconds."""

    def __init__(self):
        self.now = 0.0
        self._due = []
        self._order = itertools.count()  # first scheduled, first served at equal times

    def at(self, when, do, *args):
        heapq.heappush(self._due, (when if when > self.now else self.now, next(self._order), do, args))

    def after(self, delay_s, do, *args):
        self.at(self.now + delay_s, do, *args)

    def step(self):
        """Let the next thing happen; False when nothing is due any more."""
        if not self._due:
            return False
        self.now, _, do, args = heapq.heappop(self._due)
        do(*args)
        return True
