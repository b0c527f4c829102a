"""Heartbeats of ranks in the store, and the ranks whose heartbeats are missing."""

from __future__ import annotations

import time
from collections.abc import Collection

from nvrx_slurm.core.rank.watch import LATE_S
from nvrx_slurm.inprocess.meeting.view import StoreView

_SUSPICIOUS = 3  # heartbeat intervals of silence after which the other ranks are looked at too


class Heartbeats:
    """The silent ranks, by this process's own clock: heartbeats are numbers, and only their changes matter.

    The next member after this rank is watched. When it has been silent for a few intervals all other ranks are looked
    at too, so that the loss of a whole host is found at once and not one neighbour after the other.
    """

    def __init__(self, call: StoreView, me: int, world_size: int, interval_s: float, timeout_s: float) -> None:
        self._call, self._me, self._world_size = call, me, world_size
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._sequence = 0
        self._seen: dict[int, tuple[bytes | None, float]] = {}  # watched rank -> last value, since when
        self._looked_s = time.monotonic()
        self._began = False

    def beat(self) -> None:
        """Send this rank's own heartbeat."""
        self._sequence += 1
        self._call.set(f"hb/{self._me}", str(self._sequence))

    def begin(self) -> None:
        """Silence counts from here on: before, some ranks may not have been started yet."""
        self._began = True

    def silent(self, gone: Collection[int]) -> dict[int, float]:
        """Members that have been silent for the timeout, and for how many seconds; to be called every interval."""
        now_s = time.monotonic()
        if now_s - self._looked_s > 2 * self._interval_s + LATE_S:  # this process was suspended, as others may be
            self._seen.clear()
        self._looked_s = now_s
        if not self._began:
            return {}
        neighbour = next((r for r in self._others() if r not in gone), None)
        if neighbour is None:
            return {}
        self._seen = {rank: seen for rank, seen in self._seen.items() if rank not in gone}
        self._look({neighbour, *self._seen}, now_s)
        suspicious_s = min(_SUSPICIOUS * self._interval_s, self._timeout_s / 2)
        if len(self._seen) == 1 and now_s - self._seen[neighbour][1] > suspicious_s:
            self._look({rank for rank in self._others() if rank not in gone}, now_s)
        elif len(self._seen) > 1:
            alive = [r for r, (_, since_s) in self._seen.items() if since_s == now_s and r != neighbour]
            for rank in alive:
                del self._seen[rank]
        return {r: now_s - since_s for r, (_, since_s) in self._seen.items() if now_s - since_s > self._timeout_s}

    def _others(self) -> list[int]:
        return [(self._me + step) % self._world_size for step in range(1, self._world_size)]

    def _look(self, ranks: Collection[int], now_s: float) -> None:
        keys = {rank: f"hb/{rank}" for rank in sorted(ranks)}
        new = {rank for rank in keys if self._seen.get(rank, (None, 0.0))[0] is None}
        if new and not self._call.check([keys[rank] for rank in new]):  # some have never sent one
            keys = {rank: key for rank, key in keys.items() if rank not in new or self._call.check([key])}
        values: dict[int, bytes | None] = dict.fromkeys(ranks)
        values.update(zip(keys, self._call.multi_get(list(keys.values())), strict=True))
        for rank, value in values.items():
            if rank not in self._seen or self._seen[rank][0] != value:
                self._seen[rank] = (value, now_s)
