"""Renews the lease of this node's ranks while a coordinator with a quorum is heard. See `monitor.lease`.

A member renews it by the answers to its beats, from the time at which it sent the beat. A coordinator renews its own
by the time at which a quorum was here, at least. A node that cannot renew it kills its ranks when it is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvrx_slurm.core.election.events import LEADER_SHARE, LEASE_SHARE
from nvrx_slurm.monitor.lease import Lease


class LeaseKeeper:
    """The lease of one node. `length_s`: keepalive interval and timeout, after which a member counts as lost.

    `on_over(leads)` is called when it is over, and again while it is; `leads`: this node leads.
    """

    def __init__(self, lease: Lease, length_s: float, on_over: Callable[[bool], None]) -> None:
        self._lease = lease
        self._length_s = LEASE_SHARE * length_s
        # A member may leave half of MEMBER_SHARE after its last beat, which may have been heard here.
        self._earlier_s = (LEASE_SHARE - LEADER_SHARE) * length_s
        self._every_s = length_s / 8
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._quorum_heard: Callable[[], float | None] | None = None
        self._follows = False
        self._timer: asyncio.TimerHandle | None = None
        lease.until_s = self._loop.time()

    def follow(self) -> None:
        """Another node leads, and has just said so."""
        self._quorum_heard, self._follows = None, True
        self._renew(self._loop.time())

    def heard(self, sent_s: float) -> None:
        """The coordinator has answered the beat that was sent at `sent_s`."""
        if self._follows:
            self._renew(sent_s)

    def lead(self, quorum_heard: Callable[[], float | None]) -> None:
        """This node stands or leads; `quorum_heard()`: when a quorum was heard last, None before it is elected."""
        self._quorum_heard, self._follows = quorum_heard, False
        self.check()

    def close(self) -> None:
        """No timer runs any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _renew(self, heard_s: float) -> None:
        until_s = heard_s + self._length_s
        if until_s > (self._lease.until_s or 0.0):
            self._lease.until_s = until_s
            self._set_timer()

    def _set_timer(self) -> None:
        self.close()
        due = self._lease.until_s or 0.0
        if self._quorum_heard is not None:  # first a quarter before the end, then more often
            due = min(due, max(due - self._length_s / 4, self._loop.time() + self._every_s))
        self._timer = self._loop.call_at(due, self.check)

    def check(self) -> None:
        """Renew the own lease of a coordinator; tell when the lease is over."""
        heard_s = self._quorum_heard() if self._quorum_heard is not None else None
        if heard_s is not None:
            self._renew(heard_s - self._earlier_s)
        if not self._lease.over:
            self._set_timer()
            return
        if heard_s is None and self._quorum_heard is not None:  # stands: elected later
            self._timer = self._loop.call_later(self._every_s, self.check)
        self._on_over(heard_s is not None)
