"""A server where the process group of an interrupted iteration was to meet, in the place of rank 0's.

`init_process_group` on the other ranks connects to rank 0's store, and torch tries that until its own timeout: nothing
from outside ends it but a server that answers. If rank 0 fails, dies or hangs before it has made one, its monitor
process, which outlives it, does. A rank that gets through is back in Python, where it is stopped.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from nvrx_slurm.errors import UsageError
from nvrx_slurm.inprocess.exception import RankDiscarded
from nvrx_slurm.inprocess.meeting.barriers import Round, latest
from nvrx_slurm.inprocess.meeting.store import StoreLost, StoreView, serve
from nvrx_slurm.inprocess.watch.progress import OwnTime
from nvrx_slurm.system import connections

logger = logging.getLogger(__name__)

_GRACE_S = 0.4  # a restart that is over by then needs none, and torch pauses for longer
_LOOK_S = 0.1
_STAY_S = 1.0  # about as long a connection is left to a client: to get through, and not to wait for keys


class Meeting(NamedTuple):
    """Where a round's process group meets, at the rank of this process."""

    number: int
    port: int
    address: str

    def __str__(self) -> str:
        return f"{self.number} {self.port} {self.address}"

    @classmethod
    def parse(cls, text: str) -> Meeting:
        """What `str` made."""
        number, port, address = text.split(" ", 2)
        return cls(int(number), int(port), address)


class StandIn(threading.Thread):
    """Serves after the end of a round, from `wait_s` on (rank 0 may be about to do it until its abort) until the round
    has a verdict, at most for `bound_s` seconds, whenever nobody else does. `idle` is set while nothing is to be done.
    """

    def __init__(self, make_view: Callable[[], StoreView], wait_s: float, bound_s: float) -> None:
        super().__init__(name="nvrx-stand-in", daemon=True)
        self._make_view, self._wait_s, self._bound_s = make_view, wait_s + _GRACE_S, bound_s
        self._meetings: queue.SimpleQueue[Meeting] = queue.SimpleQueue()
        self._lock = threading.Lock()  # for both of them
        self.idle = threading.Event()
        self.idle.set()

    def expect(self, meeting: Meeting) -> None:
        """From another thread: this rank is the first one of another round."""
        with self._lock:
            self.idle.clear()
            self._meetings.put(meeting)
        if self.ident is None:
            self.start()

    def run(self) -> None:
        """Until the store is lost."""
        try:
            call = self._make_view()
            while True:
                meeting = self._meetings.get()
                try:
                    self._follow(call, meeting)
                except (RuntimeError, OSError, UsageError, RankDiscarded) as error:
                    logger.warning("iteration %d: nobody serves at port %d: %s", meeting.number, meeting.port, error)
                with self._lock:
                    if self._meetings.empty():
                        self.idle.set()
        except StoreLost as error:
            logger.warning("stand-in: %s", error)
        finally:
            self.idle.set()

    def _follow(self, call: StoreView, meeting: Meeting) -> None:
        this = Round(call, meeting.number)
        if _is_over(this) or this.await_end():
            return
        server: dist.Store | None = None
        known: set[connections.Socket] = set()
        waited, cut_s = OwnTime(_LOOK_S), 0.0
        while not _is_over(this) and (seconds := waited.seconds()) < self._bound_s:
            if server is None:
                server = _serve(meeting) if seconds >= self._wait_s else None
            elif seconds - cut_s >= _STAY_S:
                here = connections.at_port(meeting.port)
                connections.cut(here & known)
                known, cut_s = here, seconds
            time.sleep(_LOOK_S)


def _is_over(this: Round) -> bool:
    known = latest(this.call)
    return known is not None and known[0] >= this.number


def _serve(meeting: Meeting) -> dist.Store | None:
    server = serve(meeting.address, meeting.port)
    if server is not None:
        logger.info("iteration %d: who waits for rank 0 at port %d is let go", meeting.number, meeting.port)
    return server
