"""The monitor process's part in the store: heartbeats, missing heartbeats, and tombstones of dead ranks.

It runs in a thread of the monitor process, so that a store that does not answer delays no local decision.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from nvrx_slurm.core.inprocess.rollcall import Outcome
from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
from nvrx_slurm.inprocess.meeting.barriers import ENTRY, Iteration, latest
from nvrx_slurm.inprocess.meeting.view import StoreLost, StoreView
from nvrx_slurm.inprocess.watch.heartbeats import Heartbeats

logger = logging.getLogger(__name__)

_MAX_PENDING = 4096


class StoreLink(threading.Thread):
    """Sends heartbeats, looks for missing ones, and writes tombstones of dead ranks at the barrier.

    `on_lost` is called once if the store is lost, `on_gone` when the others have declared this rank gone. `over` is set
    when nothing is left to do: this rank is gone, or all ranks have finished. `stays`: go on after this rank is gone,
    since this process serves the barriers.
    """

    def __init__(
        self,
        make_view: Callable[[], StoreView],
        me: int,
        world_size: int,
        arguments: Arguments,
        on_lost: Callable[[], Any],
        on_gone: Callable[[], Any],
    ) -> None:
        super().__init__(name="nvrx-link", daemon=True)
        self._make_view, self._me, self._world_size = make_view, me, world_size
        self._interval_s, self._timeout_s = map(arguments.seconds, ("heartbeat_interval", "heartbeat_timeout"))
        self._on_lost, self._on_gone = on_lost, on_gone
        self._requests: queue.Queue[Callable[[], None]] = queue.Queue(_MAX_PENDING)
        self._dead: dict[int, InterruptionRecord] = {}
        self._marked: set[tuple[int, int]] = set()  # (iteration, rank)
        self._gone: frozenset[int] = frozenset()
        self._finished = False
        self.lost = False
        self.passes = 0  # how often the store has answered all requests
        self.over = threading.Event()
        self.stays = False

    # --- from other threads -------------------------------------------------------------------------------------------

    def interrupt(self, number: int, record: InterruptionRecord) -> None:
        """Note a fault of iteration `number`."""
        self._request(lambda: self._iteration(number).interrupt(record))

    def declare(self, records: Collection[InterruptionRecord]) -> None:
        """These ranks are gone; their tombstones are written in every iteration from now on."""
        mine = {record.rank: record for record in records if 0 <= record.rank < self._world_size}
        self._request(lambda: self._dead.update({rank: mine[rank] for rank in mine.keys() - self._dead.keys()}))

    def give_up(self, why: str) -> None:
        """The store is lost; may be called from another thread while this one waits for the store."""
        if self.lost:
            return
        self.lost = True
        logger.warning("the store cannot be used: %s", why)
        self._on_lost()
        self.over.set()

    def _request(self, what: Callable[[], None]) -> None:
        try:
            self._requests.put_nowait(what)
        except queue.Full:
            logger.error("the queue of requests to the store is full: one is dropped")

    # --- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until `over`."""
        try:
            self._call = self._make_view()
            self.passes += 1  # from here on silence of the store counts
            self._this = Iteration(self._call, ENTRY)
            self._heartbeats = Heartbeats(self._call, self._me, self._world_size, self._interval_s, self._timeout_s)
            self._loop()
        except Exception as error:
            if not isinstance(error, StoreLost):
                logger.exception("the link to the store failed")
            self.give_up(str(error))
        self.over.set()

    def _iteration(self, number: int) -> Iteration:
        return self._this if number == self._this.number else Iteration(self._call, number)

    def _loop(self) -> None:
        next_s = time.monotonic()
        while not (self._finished or (self._me in self._gone and not self.stays)):
            now_s = time.monotonic()
            if now_s >= next_s:
                next_s = now_s + self._interval_s
                self._tick()
            self._follow()
            self.passes += 1
            if self._write_tombstones():
                self._follow()
                continue
            # After this rank's tombstone the result is about to come, and this process is about to end.
            soon = self._me in self._dead and not self.stays
            try:
                what = self._requests.get(timeout=0.002 if soon else max(0.0, next_s - time.monotonic()))
            except queue.Empty:
                continue
            what()

    def _tick(self) -> None:
        if self._me not in self._dead:
            self._heartbeats.beat()
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
                self._on_gone()
            if self._this.number == ENTRY:
                self._heartbeats.begin()
            self._this = Iteration(self._call, known[0] + 1)

    def _write_tombstones(self) -> bool:
        """Of all dead ranks in this iteration; whether there was one to write."""
        todo = [rank for rank in self._dead if rank not in self._gone and (self._this.number, rank) not in self._marked]
        for rank in todo:
            logger.info("iteration %d: rank %d is gone: %s", self._this.number, rank, self._dead[rank].text)
            if not self._this.has_tombstone(rank):  # else its end is no new fault: it was discarded, or left by itself
                self._this.interrupt(self._dead[rank])
            self._this.write_tombstone(rank)
            self._marked.add((self._this.number, rank))
        return bool(todo)
