"""The monitor process's part in the store: heartbeats, the neighbour's heartbeats, and the word of the dead.

Runs in a thread of the monitor process, so that a store that does not answer delays no local decision.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from nvrx_slurm.core.inprocess.rollcall import Outcome
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
from nvrx_slurm.inprocess.meeting.barriers import ENTRY, Round, latest
from nvrx_slurm.inprocess.meeting.store import StoreLost, StoreView

logger = logging.getLogger(__name__)

_SUSPICIOUS = 3  # heartbeat intervals of silence after which the others are looked at too
_MAX_PENDING = 4096


@dataclass(frozen=True)
class Times:
    """Seconds."""

    interval_s: float
    timeout_s: float


class Heartbeats:
    """Who is silent, by this process's own clock: heartbeats are numbers, and only whether they change matters.

    The next member after this rank is watched. When it has been silent for a few intervals all others are looked at
    too, so that the loss of a whole host is found at once and not one neighbour after the other.
    """

    def __init__(self, call: StoreView, me: int, world_size: int, times: Times) -> None:
        self._call, self._me, self._world_size, self._times = call, me, world_size, times
        self._sequence = 0
        self._seen: dict[int, tuple[bytes | None, float]] = {}  # watched rank -> last value, since when
        self._looked_s = time.monotonic()
        self._began = False

    def beat(self) -> None:
        """This rank's own."""
        self._sequence += 1
        self._call.set(f"hb/{self._me}", str(self._sequence))

    def begin(self) -> None:
        """From here on silence counts: until all have come some may not have been started."""
        self._began = True

    def silent(self, gone: Collection[int]) -> dict[int, float]:
        """Members that have been silent for the timeout, and for how many seconds; to be called every interval."""
        now_s, interval_s = time.monotonic(), self._times.interval_s
        if now_s - self._looked_s > 2 * interval_s + 1.0:  # we did not look: nobody else is to blame
            self._seen = {rank: (value, now_s) for rank, (value, _) in self._seen.items()}
        self._looked_s = now_s
        if not self._began:
            return {}
        neighbour = next((r for r in self._others() if r not in gone), None)
        if neighbour is None:
            return {}
        self._seen = {rank: seen for rank, seen in self._seen.items() if rank not in gone}
        self._look({neighbour, *self._seen}, now_s)
        suspicious_s = min(_SUSPICIOUS * interval_s, self._times.timeout_s / 2)
        if len(self._seen) == 1 and now_s - self._seen[neighbour][1] > suspicious_s:
            self._look({rank for rank in self._others() if rank not in gone}, now_s)
        elif len(self._seen) > 1:
            alive = [r for r, (_, since_s) in self._seen.items() if since_s == now_s and r != neighbour]
            for rank in alive:
                del self._seen[rank]
        return {r: now_s - since_s for r, (_, since_s) in self._seen.items() if now_s - since_s > self._times.timeout_s}

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


class Link(threading.Thread):
    """Sends heartbeats, watches, and sees to it that the dead are counted at the barrier.

    `on_lost` is called once if the store is lost, `on_gone` when the others have declared this rank gone; `over` is set
    when there is nothing left to do here: this rank is out of the world, or everybody has finished.
    """

    def __init__(
        self,
        make_view: Callable[[], StoreView],
        me: int,
        world_size: int,
        times: Times,
        on_lost: Callable[[], Any],
        on_gone: Callable[[], Any],
    ) -> None:
        super().__init__(name="nvrx-link", daemon=True)
        self._make_view, self._me, self._world_size = make_view, me, world_size
        self._times, self._on_lost, self._on_gone = times, on_lost, on_gone
        self._asks: queue.Queue[Callable[[], None]] = queue.Queue(_MAX_PENDING)
        self._dead: dict[int, InterruptionRecord] = {}
        self._marked: set[tuple[int, int]] = set()  # (round, rank)
        self._gone: frozenset[int] = frozenset()
        self._finished = False
        self.lost = False
        self.passes = 0  # how often the store has answered all that was asked of it
        self.over = threading.Event()
        self.stays = False  # also after this rank is gone: somebody has to coordinate

    # --- asked by other threads ---------------------------------------------------------------------------------------

    def interrupt(self, number: int, record: InterruptionRecord) -> None:
        """Note a fault of round `number`."""
        self._ask(lambda: self._round_of(number).interrupt(record))

    def declare(self, records: Collection[InterruptionRecord]) -> None:
        """These ranks are gone; their word is said for them from now on."""
        mine = {record.rank: record for record in records if 0 <= record.rank < self._world_size}
        self._ask(lambda: self._dead.update({rank: mine[rank] for rank in mine.keys() - self._dead.keys()}))

    def give_up(self, why: str) -> None:
        """The store is lost; also from another thread, while this one waits for it."""
        if self.lost:
            return
        self.lost = True
        logger.warning("the store cannot be used: %s", why)
        self._on_lost()
        self.over.set()

    def _ask(self, what: Callable[[], None]) -> None:
        try:
            self._asks.put_nowait(what)
        except queue.Full:
            logger.error("too much to tell the store: something is dropped")

    # --- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until `over`."""
        try:
            self._call = self._make_view()
            self.passes += 1  # from here on silence counts
            self._this = Round(self._call, ENTRY)
            self._heartbeats = Heartbeats(self._call, self._me, self._world_size, self._times)
            self._loop()
        except Exception as error:
            if not isinstance(error, StoreLost):
                logger.exception("the link to the store failed")
            self.give_up(str(error))
        self.over.set()

    def _round_of(self, number: int) -> Round:
        return self._this if number == self._this.number else Round(self._call, number)

    def _loop(self) -> None:
        next_s = time.monotonic()
        while not self._is_over():
            now_s = time.monotonic()
            if now_s >= next_s:
                next_s = now_s + self._times.interval_s
                self._tick()
            self._follow()
            self.passes += 1
            if self._mark():
                self._follow()
                continue
            try:
                what = self._asks.get(timeout=self._patience_s(next_s))
            except queue.Empty:
                continue
            what()

    def _patience_s(self, next_s: float) -> float:
        if self._me in self._dead and not self.stays:
            return 0.002  # the verdict is about to come, and this process to end
        return max(0.0, next_s - time.monotonic())

    def _is_over(self) -> bool:
        return self._finished or (self._me in self._gone and not self.stays)

    def _tick(self) -> None:
        if self._me not in self._dead:
            self._heartbeats.beat()
        for rank, seconds in self._heartbeats.silent(self._gone | self._dead.keys()).items():
            text = f"no heartbeat for {seconds:.1f} s"
            logger.warning("rank %d: %s", rank, text)
            self._dead[rank] = InterruptionRecord(rank, Interruption.UNRESPONSIVE, text)

    def _follow(self) -> None:
        """Be in the round that all others are in."""
        known = latest(self._call)
        if known is not None and known[0] >= self._this.number:
            self._gone = known[1].gone
            self._finished = known[1].outcome is not Outcome.NEXT
            if self._me in self._gone:
                self._on_gone()
            if self._this.number == ENTRY:
                self._heartbeats.begin()
            self._this = Round(self._call, known[0] + 1)

    def _mark(self) -> bool:
        """Say the word of all dead in this round; whether there was one to say."""
        todo = [rank for rank in self._dead if rank not in self._gone and (self._this.number, rank) not in self._marked]
        for rank in todo:
            logger.info("iteration %d: rank %d is gone: %s", self._this.number, rank, self._dead[rank].text)
            if not self._this.says_gone(rank):  # else it is no new fault: discarded, or it has said so itself
                self._this.interrupt(self._dead[rank])
            self._this.bury(rank)
            self._marked.add((self._this.number, rank))
        return bool(todo)
