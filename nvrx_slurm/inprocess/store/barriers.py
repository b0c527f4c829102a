"""What ranks tell each other in one iteration, and the barrier at its end, as keys in the store.

| key | set by | meaning |
|---|---|---|
| `records`, `record/<n>` | the observer of a fault | how many there were, and the first ones |
| `completed` | active ranks | how many have returned from the function |
| `end`, then `ended` | the first to know | how the iteration ended, decided once; `ended` wakes all waiters |
| `assign/...` | all ranks | what rank assignment needs (`Leadership`) |
| `start` | rank 0 | where `init_process_group` shall meet |
| `out/<initial rank>` | it, or an observer of its end | its arrival, or that it is gone (`core.inprocess.barrier`) |
| `go`, then `went` | a barrier server | the result, decided once; `went` wakes all waiters |
| `latest` (of the call) | a barrier server | the number of the last iteration that has a result, and the result |

Each rank does a constant number of operations. Arriving at the barrier is setting a key. Doing it twice, or again for a
rank that died in the middle of it, changes nothing. One barrier server, in the monitor process of rank 0, waits for all
these keys at once. If it has died, a rank that waits too long does the same work: the first result counts, and any
other one would be equal.

Any process may die between any two writes, so their order matters, and later writers write all of them again:

- `record/<n>` before the mark of a rank: the last `out` key gives the result, which names the cause.
- `end` before `ended`, `go` before `went`, `went` before `latest`: a waiter that wakes up reads the former at once, and
  a `get` of a missing key would block. compare_set makes the first value of `end` and `go` the only one.
- `end`, then `start` (if the iteration has not begun yet), then `ended`: ranks that wait for a lost rank 0 wake up. A
  `start` that rank 0 publishes later is harmless: the ranks that follow it find `ended`.
- CLOSED (no new call may use this server) before the last `go`: after it ranks return and may call again.
- Only `out` keys are deleted, two iterations later. A rank that was suspended meanwhile reads in `go` that it is gone.
- A rank that leaves writes its mark into its current iteration. If it has arrived at that barrier already, this
  may be too late, so its monitor process repeats the mark in every iteration until a result contains it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from nvrx_slurm.core.inprocess.barrier import (
    Arrival,
    BarrierResult,
    Outcome,
    Status,
    barrier_result,
)
from nvrx_slurm.core.inprocess.renumbering import to_runs
from nvrx_slurm.inprocess.attribution import OUTRIGHT, Interruption, InterruptionRecord
from nvrx_slurm.inprocess.guard.launcher import note_restart
from nvrx_slurm.inprocess.store.stores import CLOSED, StoreLost, StoreView

if TYPE_CHECKING:
    from nvrx_slurm.inprocess.environment import CallFacts

logger = logging.getLogger(__name__)

ALL_LEFT = "all_left"
_LAST_READ_S = 5.0
ENTRY = -1  # number of the initial barrier, before iteration 0
COMPLETED = b"completed"
INTERRUPTED = b"interrupted"
NO_START = b"-"  # instead of an address: the iteration is over before it began
# longest single wait for an event that may rightly never come; the wait is then repeated
FOREVER_S = 86400.0
_LATEST = "latest"
_MAX_RECORDS = 64
_ASSIGN_WAIT_S = 2.0
_WAIT_S = (0.5, 10.0)  # shortest and longest time between two checks for missing ranks
_GONE_MARK = str(Arrival(Status.TERMINATED))


class Iteration:
    """One iteration's keys. Used by one thread at a time."""

    def __init__(self, call: StoreView, number: int) -> None:
        self.call = call
        self.number = number
        self.keys = call.under(str(number))

    # --- how it ends --------------------------------------------------------------------------------------------------

    def interrupt(self, record: InterruptionRecord) -> None:
        """Note a fault; the iteration ends now on all ranks, unless it has ended already."""
        place = self.keys.add("records", 1)
        if place <= _MAX_RECORDS:
            self.keys.set(f"record/{place}", str(record))
        self._end(INTERRUPTED)

    def returned(self, active_world_size: int) -> None:
        """The function has returned on one more of the active ranks; with the last one the iteration ends."""
        if self.keys.add("completed", 1) >= active_world_size:
            self._end(COMPLETED)

    def _end(self, how: bytes) -> None:
        if self.keys.check(["ended"]):
            return
        self.keys.compare_set("end", "", how)
        if how == INTERRUPTED and not self.keys.check(["start"]):
            self.keys.set("start", NO_START)
        self.keys.set("ended", "1")

    def await_end(self) -> bool:
        """Wait for the end of the iteration; whether the function has returned on all active ranks."""
        while not self.keys.wait_once(["ended"], FOREVER_S):
            pass
        return self.keys.get("end") == COMPLETED

    def is_interrupted(self) -> bool:
        """Whether the iteration has ended, by a fault."""
        return self.keys.check(["ended"]) and self.keys.get("end") == INTERRUPTED

    def cause(self) -> InterruptionRecord | None:
        """The record that explains the interruption: the first one, but a dead or hung rank before one that raised.

        Peers of a dead rank raise from their collectives, which can be recorded sooner than the death.
        """
        places = range(1, min(self.keys.add("records", 0), _MAX_RECORDS) + 1)
        texts = [
            text for place in places if (text := read(self.keys, f"record/{place}")) is not None
        ]
        records = [InterruptionRecord.from_str(text.decode()) for text in texts]
        outright = [record for record in records if record.interruption in OUTRIGHT]
        return next(iter(outright or records), None)

    # --- where the function's process group meets ---------------------------------------------------------------------

    def publish_start(self, address: str, port: int) -> None:
        """On the new rank 0."""
        self.keys.set("start", f"{port} {address}")

    def await_start(self, timeout_s: float) -> tuple[str, int] | None:
        """Address and port, or None if the iteration is over already. Raises TimeoutError after `timeout_s` seconds."""
        if not self.keys.came(["start"], timeout_s):
            raise TimeoutError(f"the new rank 0 did not say within {timeout_s:g} s where to meet")
        value = self.keys.get("start")
        if value == NO_START:
            return None
        port, _, address = value.decode().partition(" ")
        return address, int(port)

    # --- the barrier --------------------------------------------------------------------------------------------------

    def arrive(self, initial_rank: int, arrival: Arrival) -> bool:
        """Write a rank's own arrival; False if it has the mark of a rank that is gone already."""
        key = f"out/{initial_rank}"
        if self.keys.check([key]):
            return False
        self.keys.set(key, str(arrival))
        return True

    def mark_gone(self, initial_rank: int) -> None:
        """Report a rank as gone; before the result is decided this replaces the rank's own arrival."""
        self.keys.set(f"out/{initial_rank}", _GONE_MARK)

    def is_marked_gone(self, initial_rank: int) -> bool:
        """Whether the rank is known to be gone, so that its end is no new fault."""
        return read(self.keys, f"out/{initial_rank}") == _GONE_MARK.encode()

    def await_result(self, timeout_s: float) -> BarrierResult | None:
        """The result, or None if there is none in time."""
        if not self.keys.came(["went"], timeout_s):
            return None
        return BarrierResult.from_text(self.keys.get("go").decode())

    def has_result(self) -> bool:
        """Whether all members have arrived or are gone."""
        return self.keys.check(["went"])

    def delete_keys(self, members: Collection[int]) -> None:
        """Those of the ranks; all members have read the result."""
        for rank in members:
            self.keys.delete_key(f"out/{rank}")


class RankLost(Exception):
    """A rank was lost while ranks were being assigned. All ranks raise it, or none: see `Leadership`."""


class AssigningView(StoreView):
    """The store of a rank assignment: a wait for other ranks ends when one is lost."""

    def __init__(self, this: Iteration) -> None:
        super().__init__(this.keys.store, f"{this.keys.prefix}assign/")
        self.stable = this.call  # its keys outlive the iteration
        self._ended = this.keys

    def wait_once(self, keys: Sequence[str], timeout_s: float) -> bool:
        """See `StoreView`; waits for a part of the time only, and raises RankLost."""
        came = super().wait_once(keys, min(timeout_s, _ASSIGN_WAIT_S))
        if not came and self._ended.check(["ended"]):
            raise RankLost("a rank was lost during the rank assignment")
        return came


def serve_barrier(
    this: Iteration, world_size: int, gone: Collection[int], overdue_s: float, closes: bool
) -> BarrierResult:
    """Wait until all members of the iteration have arrived, and publish the result.

    Members are the initial ranks 0..`world_size`-1 without `gone`. A member that does not arrive within `overdue_s`
    seconds after the end of the iteration is declared gone; at the initial barrier the result is REFUSED instead.
    `closes`: no new call may use the store's server from the last result on.
    """
    members = [rank for rank in range(world_size) if rank not in gone]
    keys = [f"out/{rank}" for rank in members]
    wait_s = min(max(overdue_s / 10, _WAIT_S[0]), overdue_s, _WAIT_S[1])
    has_ended = this.number == ENTRY or this.keys.check(["ended"])
    ended_s = time.monotonic() if has_ended else None
    while not this.keys.wait_once(keys, wait_s):
        if ended_s is None and this.keys.check(["ended"]):
            ended_s = time.monotonic()
        if this.has_result():
            break
        if ended_s is not None and time.monotonic() - ended_s > overdue_s:
            missing = [
                rank for rank, key in zip(members, keys, strict=True) if not this.keys.check([key])
            ]
            if this.number == ENTRY:
                if closes:
                    this.call.store.set(CLOSED, "1")
                why = f"ranks {to_runs(missing)} did not call the wrapped function within {overdue_s:g} s"
                return publish(
                    this,
                    BarrierResult(Outcome.REFUSED, gone=frozenset(missing).union(gone), why=why),
                )
            _declare_overdue(this, missing, overdue_s)
    if this.has_result():
        return _announced(this)
    texts = this.keys.multi_get(keys)
    arrivals = {
        rank: Arrival.parse(text.decode()) for rank, text in zip(members, texts, strict=True)
    }
    cause = this.cause()
    why = cause.sentence() if cause else ""
    result = barrier_result(arrivals, gone, why)
    if closes and result.outcome is not Outcome.NEXT:
        this.call.store.set(CLOSED, "1")
    return publish(this, result)


def _declare_overdue(this: Iteration, missing: list[int], overdue_s: float) -> None:
    for rank in missing:
        text = f"did not come to the iteration barrier within {overdue_s:g} s"
        this.interrupt(InterruptionRecord(rank, Interruption.UNRESPONSIVE, text))
        this.mark_gone(rank)


def publish(this: Iteration, result: BarrierResult) -> BarrierResult:
    """Make this the result of the barrier, unless there is one; returns the one that counts."""
    this.keys.compare_set("go", "", result.to_text().encode(errors="backslashreplace"))
    this.keys.set("went", "1")
    return _announced(this)


def _announced(this: Iteration) -> BarrierResult:
    """The result; `latest` contains it from here on, even if its author died before it could write that."""
    result = BarrierResult.from_text(this.keys.get("go").decode())
    this.call.set(_LATEST, f"{this.number}\n{result.to_text()}")
    return result


def latest(call: StoreView) -> tuple[int, BarrierResult] | None:
    """Number and result of the last iteration that has a result."""
    known = read(call, _LATEST)
    if known is None:
        return None
    number, _, text = known.decode().partition("\n")
    return int(number), BarrierResult.from_text(text)


def read(keys: StoreView, key: str) -> bytes | None:
    """Its value, or None if it does not exist yet; such a key is never deleted."""
    return keys.get(key) if keys.check([key]) else None


def serve_barriers(make_view: Callable[[], StoreView], me: CallFacts, closes: bool) -> None:
    """Serve barrier after barrier until all ranks have finished or none is left.

    If it fails, the ranks serve the barrier themselves (see `runner`). `closes`: the store's server is ours and
    ends with the call; any other one remains for the next call.
    """
    try:
        _serve(make_view(), me, closes)
    except StoreLost as error:
        logger.warning("barrier server: %s", error)
    except Exception:
        logger.exception("the barrier server failed")


def _serve(call: StoreView, me: CallFacts, closes: bool) -> None:
    number = ENTRY
    gone: frozenset[int] = frozenset()
    overdue_s = me.arguments.barrier_timeout.total_seconds()  # at the initial barrier
    while True:
        result = serve_barrier(Iteration(call, number), me.world_size, gone, overdue_s, closes)
        logger.info("iteration %d: %s %s", number, result.outcome.name, result.why)
        if result.outcome is not Outcome.NEXT:
            break
        if number > ENTRY:
            note_restart(number, result.why)
        if number > ENTRY + 1:
            members = [rank for rank in range(me.world_size) if rank not in gone]
            Iteration(call, number - 1).delete_keys(members)
        number += 1
        gone = result.gone
        overdue_s = me.arguments.overdue_s
    if result.outcome is not Outcome.EMPTY:  # some rank has to read it
        call.came([ALL_LEFT], _LAST_READ_S)
