"""The monitor process's part in the store: heartbeats, missing heartbeats, and marks of dead ranks.

It runs in a thread of the monitor process, so that a store that does not answer delays no local decision.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Collection

import torch.distributed as dist

from nvrx_slurm.core.inprocess.barrier import Outcome
from nvrx_slurm.core.rank.watch import LATE_S
from nvrx_slurm.errors import UsageError
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
from nvrx_slurm.inprocess.environment import CallFacts
from nvrx_slurm.inprocess.guard.call_page import GONE, LOST
from nvrx_slurm.inprocess.store.barriers import ENTRY, Iteration, latest
from nvrx_slurm.inprocess.store.stores import StoreLost, StoreView, serve

logger = logging.getLogger(__name__)

# a restart that is over by then needs no fallback server, and torch pauses for longer
_GRACE_S = 0.4
_SUSPICIOUS = 3  # heartbeat intervals of silence after which the other ranks are watched too


class Heartbeats:
    """The silent ranks, by this process's own clock: heartbeats are numbers, and only their changes matter.

    The next member after this rank is watched. When it has been silent for a few intervals all other ranks are watched
    too, so that the loss of a whole host is found at once and not one neighbour after the other.
    """

    def __init__(
        self, call: StoreView, me: int, world_size: int, interval_s: float, timeout_s: float
    ) -> None:
        self._call = call
        self._me = me
        self._world_size = world_size
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._sequence = 0
        self._seen: dict[int, tuple[bytes | None, float]] = {}  # rank -> its last value, since when
        self._checked_s = time.monotonic()
        self._suspicious = False

    def beat(self) -> None:
        """Send this rank's own heartbeat."""
        self._sequence += 1
        self._call.set(f"hb/{self._me}", str(self._sequence))

    def silent(self, gone: Collection[int]) -> dict[int, float]:
        """Members that have been silent for the timeout, and for how many seconds; to be called every interval."""
        now_s = time.monotonic()
        # this process was suspended, as others may be
        if now_s - self._checked_s > 2 * self._interval_s + LATE_S:
            self._seen.clear()
        self._checked_s = now_s
        members = [rank for rank in self._others() if rank not in gone]
        watched = members if self._suspicious else members[:1]
        if not watched:
            return {}
        self._read(watched, now_s)
        silent_s = {rank: now_s - self._seen[rank][1] for rank in watched}
        before = self._suspicious
        limit_s = min(_SUSPICIOUS * self._interval_s, self._timeout_s / 2)
        self._suspicious = silent_s[watched[0]] > limit_s
        if self._suspicious and not before:
            self._read(members[1:], now_s)
        return {rank: seconds for rank, seconds in silent_s.items() if seconds > self._timeout_s}

    def _others(self) -> list[int]:
        return [(self._me + step) % self._world_size for step in range(1, self._world_size)]

    def _read(self, ranks: Collection[int], now_s: float) -> None:
        """Read the heartbeats in one request: a request per rank would take seconds in a large job."""
        keys = {rank: f"hb/{rank}" for rank in sorted(ranks)}
        new = [rank for rank in keys if self._seen.get(rank, (None, 0.0))[0] is None]
        if new and not self._call.check([keys[rank] for rank in new]):
            for rank in new:
                if not self._call.check([keys[rank]]):  # it has never sent one
                    del keys[rank]
        values: dict[int, bytes | None] = dict.fromkeys(ranks)
        found = self._call.multi_get(list(keys.values()))
        values.update(zip(keys, found, strict=True))
        for rank, value in values.items():
            if rank not in self._seen or self._seen[rank][0] != value:
                self._seen[rank] = (value, now_s)


class FallbackServer:
    """A server at the address where the process group of an interrupted iteration was to meet, instead of rank 0's.

    `init_process_group` on the other ranks connects to rank 0's store. torch repeats that until its own timeout (10 to
    30 minutes), and only a server that accepts the connection ends it. If rank 0 fails before it has made its store,
    its monitor process serves there instead. A rank whose connection succeeds returns to Python, where it is stopped.
    Without this all other ranks would be killed after the hard timeout (decision 013).

    For an iteration whose rank 0 is this one: serves from `wait_s` seconds after its end, unless another process
    does. Rank 0 itself may do so until its abort. The server lasts as long as this object.
    """

    def __init__(self, this: Iteration, address: str, port: int, wait_s: float) -> None:
        self.number = this.number
        self._this = this
        self._address = address
        self._port = port
        self._wait_s = wait_s + _GRACE_S
        self._from_s = 0.0  # 0.0: the iteration goes on
        self._server: dist.Store | None = None

    def check(self) -> None:
        """Serve if the time for that has come; to be called about once per second."""
        if not self._from_s and self._this.is_interrupted():
            self._from_s = time.monotonic() + self._wait_s
        if self._server is not None or not self._from_s or time.monotonic() < self._from_s:
            return
        try:
            self._server = serve(self._address, self._port)
        except (RuntimeError, OSError, UsageError) as error:
            logger.warning("iteration %d: no server at port %d: %s", self.number, self._port, error)
            self._from_s = math.inf
        if self._server is not None:
            logger.info(
                "iteration %d: a fallback server listens at port %d", self.number, self._port
            )


class StoreLink(threading.Thread):
    """Sends heartbeats, finds missing ones, and writes marks of dead ranks at the barrier.

    It tells its rank on the page when the store is lost, or the others have declared the rank gone. It ends when
    nothing is left to do: the rank is gone, or all ranks have finished. The link of the rank that leads goes on after
    that, since its process serves the barriers.
    """

    def __init__(self, make_view: Callable[[], StoreView], me: CallFacts) -> None:
        super().__init__(name="nvrx-link", daemon=True)
        self._make_view = make_view
        self._me = me.rank
        self._world_size = me.world_size
        self._stays = me.leads
        self._interval_s = me.arguments.heartbeat_interval.total_seconds()
        self._timeout_s = me.arguments.heartbeat_timeout.total_seconds()
        self._words = me.page.words
        # about one per iteration
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._dead: dict[int, InterruptionRecord] = {}
        self._marked: set[tuple[int, int]] = set()  # (iteration, rank)
        self._gone: frozenset[int] = frozenset()
        self._finished = False
        self._last_call_s = me.arguments.last_call_wait.total_seconds()
        self._fallback: FallbackServer | None = None
        self.lost = False
        self.passes = 0  # how often the store has answered all requests

    # --- from other threads -------------------------------------------------------------------------------------------

    def interrupt(self, number: int, kind: Interruption, text: str) -> None:
        """Report a fault of this rank in iteration `number`."""
        logger.warning("iteration %d: %s: %s", number, kind.name, text)
        record = InterruptionRecord(self._me, kind, text)
        self._requests.put(lambda: self._iteration(number).interrupt(record))

    def declare(self, records: Collection[InterruptionRecord]) -> None:
        """Take these ranks for gone; their marks are written in every iteration from now on."""
        mine = {record.rank: record for record in records if 0 <= record.rank < self._world_size}
        self._requests.put(lambda: self._dead.update({**mine, **self._dead}))

    def expect(self, number: int, address: str, port: int) -> None:
        """Expect the process group of iteration `number` to meet at this address: its rank 0 is this rank."""
        self._requests.put(lambda: self._expect(number, address, port))

    def give_up(self, why: str) -> None:
        """Take the store for lost. Another thread may call it while this one waits for the store."""
        if self.lost:
            return
        self.lost = True
        logger.warning("the store cannot be used: %s", why)
        self._words[LOST] = 1

    # --- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """See the class."""
        try:
            self._call = self._make_view()
            self.passes += 1  # from here on silence of the store counts
            self._this = Iteration(self._call, ENTRY)
            self._heartbeats = Heartbeats(
                self._call, self._me, self._world_size, self._interval_s, self._timeout_s
            )
            self._loop()
        except Exception as error:
            if not isinstance(error, StoreLost):
                logger.exception("the link to the store failed")
            self.give_up(str(error))

    def _iteration(self, number: int) -> Iteration:
        return self._this if number == self._this.number else Iteration(self._call, number)

    def _loop(self) -> None:
        next_s = time.monotonic()
        while not (self._finished or (self._me in self._gone and not self._stays)):
            now_s = time.monotonic()
            if now_s >= next_s:
                next_s = now_s + self._interval_s
                self._tick()
            self._follow()
            self.passes += 1
            if self._mark_gones():
                self._follow()
                continue
            # After this rank's mark the result is about to come, and this process is about to end.
            soon = self._me in self._dead and not self._stays
            try:
                what = self._requests.get(
                    timeout=0.002 if soon else max(0.0, next_s - time.monotonic())
                )
            except queue.Empty:
                continue
            what()

    def _expect(self, number: int, address: str, port: int) -> None:
        self._fallback = FallbackServer(self._iteration(number), address, port, self._last_call_s)

    @property
    def serves_a_group(self) -> bool:
        """Whether other ranks may need this process to meet in their process group."""
        return self._fallback is not None

    def _tick(self) -> None:
        if self._fallback is not None:
            self._fallback.check()
        if self._me not in self._dead:
            self._heartbeats.beat()
        if self._this.number == ENTRY:  # some ranks may not have been started yet
            return
        for rank, seconds in self._heartbeats.silent(self._gone | self._dead.keys()).items():
            text = f"no heartbeat for {seconds:.1f} s"
            logger.warning("rank %d: %s", rank, text)
            self._dead[rank] = InterruptionRecord(rank, Interruption.UNRESPONSIVE, text)

    def _follow(self) -> None:
        """Move to the iteration that all ranks are in."""
        known = latest(self._call)
        if known is not None and known[0] >= self._this.number:
            self._gone = known[1].gone
            self._finished = known[1].outcome is not Outcome.NEXT
            if self._me in self._gone:
                self._words[GONE] = 1
            if self._fallback is not None and self._fallback.number <= known[0]:
                self._fallback = None
            self._this = Iteration(self._call, known[0] + 1)

    def _mark_gones(self) -> bool:
        """Write the marks of all dead ranks in this iteration; whether there was one to write."""
        todo = [
            rank
            for rank in self._dead
            if rank not in self._gone and (self._this.number, rank) not in self._marked
        ]
        for rank in todo:
            logger.info(
                "iteration %d: rank %d is gone: %s", self._this.number, rank, self._dead[rank].text
            )
            # else its end is no new fault: it was discarded, or left by itself
            if not self._this.is_marked_gone(rank):
                self._this.interrupt(self._dead[rank])
            self._this.mark_gone(rank)
            self._marked.add((self._this.number, rank))
        return bool(todo)
