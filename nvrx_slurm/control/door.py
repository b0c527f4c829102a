"""Which connections may begin the handshake, and which have to go: pure, so that strangers cannot be a surprise.

At most `places` handshakes run at once, and fewer per address. A failed handshake keeps its place for a second, so at
most `places` per second can fail, and no address gets all places.
All other connections wait unread, which costs a few hundred bytes. Of the waiting addresses the one with the fewest
places is next, and of its connections the newest: an agent does not queue behind a thousand idle strangers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from itertools import islice, takewhile
from typing import Generic, TypeVar

Guest = TypeVar("Guest", bound=Hashable)
HANDSHAKE_TIMEOUT_S = 10.0  # from the connection to the registration
_PATIENCE_S = 2.0  # for a guest that has a place while others wait
_PENALTY_S = 1.0  # for which a failed handshake keeps its place
PLACES, _PLACES_EACH = 128, 96  # in all, and for one address


class Door(Generic[Guest]):
    """Connections without a proof. All times are monotonic seconds."""

    def __init__(self, most: int) -> None:
        """`most`: connections without a proof at a time; beyond, the oldest of the busiest address goes."""
        self._most = most
        self._arrived: dict[Guest, tuple[str, float]] = {}  # all, oldest first
        self._waiting: dict[str, dict[Guest, None]] = {}  # by address, oldest first
        self._inside: dict[Guest, float] = {}  # since when, oldest first
        self._taken: Counter[str] = Counter()  # places by address
        self._failed: deque[tuple[float, str]] = deque()  # until when whose place stays taken

    def arrive(self, guest: Guest, address: str, now: float) -> list[Guest]:
        """A connection was accepted. Returns those that have to make room for it."""
        self._arrived[guest] = address, now
        self._waiting.setdefault(address, {})[guest] = None
        if len(self._arrived) <= self._most:
            return []
        busiest = max(self._waiting.values(), key=len)
        return [next(iter(busiest))]

    def guests(self) -> list[Guest]:
        """All connections without a proof."""
        return list(self._arrived)

    def leave(self, guest: Guest, proved: bool, now: float) -> None:
        """A connection has registered or has ended. One that is not here is ignored."""
        address, _ = self._arrived.pop(guest, ("", 0.0))
        waiting = self._waiting.get(address, {})
        if guest in waiting:
            del waiting[guest]
            if not waiting:
                del self._waiting[address]
        elif self._inside.pop(guest, None) is not None:
            if proved:
                self._taken[address] -= 1
            else:
                self._failed.append((now + _PENALTY_S, address))

    def late(self, now: float) -> list[Guest]:
        """Connections whose time is over: to be closed, and then to `leave`."""
        gone = [g for g, _ in takewhile(lambda item: item[1][1] + HANDSHAKE_TIMEOUT_S <= now, self._arrived.items())]
        if self._waiting:
            gone += [g for g, _ in takewhile(lambda item: item[1] + _PATIENCE_S <= now, self._inside.items())]
        return list(dict.fromkeys(gone))

    def admit(self, now: float) -> list[Guest]:
        """Connections that get a place now."""
        while self._failed and self._failed[0][0] <= now:
            self._taken[self._failed.popleft()[1]] -= 1
        self._taken += Counter()  # forget addresses without a place
        admitted = []
        while self._waiting and self._taken.total() < PLACES:
            address = min(self._waiting, key=lambda one: self._taken[one])
            if self._taken[address] >= _PLACES_EACH:
                break
            guest, _ = self._waiting[address].popitem()
            if not self._waiting[address]:
                del self._waiting[address]
            self._taken[address] += 1
            self._inside[guest] = now
            admitted.append(guest)
        return admitted

    def deadline(self) -> float | None:
        """When `late` or `admit` will have something new, or None."""
        oldest = next(iter(self._arrived.values()), None)
        times = [] if oldest is None else [oldest[1] + HANDSHAKE_TIMEOUT_S]
        if self._waiting:
            times += [self._failed[0][0]] if self._failed else []
            times += [since + _PATIENCE_S for since in islice(self._inside.values(), 1)]
        return min(times, default=None)
