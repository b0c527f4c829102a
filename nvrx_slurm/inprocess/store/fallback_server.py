"""A server at the address where the process group of an interrupted iteration was to meet, instead of rank 0's.

`init_process_group` on the other ranks connects to rank 0's store. torch repeats that until its own timeout (10 to 30
minutes), and only a server that accepts the connection ends it. If rank 0 fails, dies, hangs or is stopped before it
has made its store, its monitor process serves there instead. A rank whose connection succeeds returns to Python, where
it is stopped. Without this all other ranks would be killed after the hard timeout.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from nvrx_slurm.errors import UsageError
from nvrx_slurm.inprocess.exception import RankDiscarded
from nvrx_slurm.inprocess.store.barriers import Iteration, latest
from nvrx_slurm.inprocess.store.stores import serve
from nvrx_slurm.inprocess.store.view import StoreLost, StoreView

logger = logging.getLogger(__name__)

_GRACE_S = 0.4  # a restart that is over by then needs no server, and torch pauses for longer
_PAUSE_S = 0.1


class FallbackServer(threading.Thread):
    """Serves from `wait_s` seconds after the end of an iteration (rank 0 may still do it until its abort) until the
    barrier has a result, at most for `bound_s` seconds, if no other process does. `idle` is set while it has no work.
    """

    def __init__(self, make_view: Callable[[], StoreView], wait_s: float, bound_s: float) -> None:
        super().__init__(name="nvrx-fallback-server", daemon=True)
        self._make_view, self._wait_s, self._bound_s = make_view, wait_s + _GRACE_S, bound_s
        self._endpoints: queue.SimpleQueue[tuple[int, str, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # for `_endpoints` and `idle` together
        self.idle = threading.Event()
        self.idle.set()

    def expect(self, number: int, address: str, port: int) -> None:
        """From another thread: this rank is rank 0 of iteration `number`, and its process group meets here."""
        with self._lock:
            self.idle.clear()
            self._endpoints.put((number, address, port))
        if self.ident is None:
            self.start()

    def run(self) -> None:
        """Until the store is lost."""
        try:
            call = self._make_view()
            while True:
                number, address, port = self._endpoints.get()
                try:
                    self._follow(Iteration(call, number), address, port)
                except (RuntimeError, OSError, UsageError, RankDiscarded) as error:
                    logger.warning("iteration %d: no server at port %d: %s", number, port, error)
                with self._lock:
                    if self._endpoints.empty():
                        self.idle.set()
        except StoreLost as error:
            logger.warning("fallback server: %s", error)
        finally:
            self.idle.set()

    def _follow(self, this: Iteration, address: str, port: int) -> None:
        if _is_over(this) or this.await_end():
            return
        server: dist.Store | None = None
        ended_s = time.monotonic()
        while not _is_over(this) and time.monotonic() - ended_s < self._bound_s:
            if server is None and time.monotonic() - ended_s >= self._wait_s:
                server = serve(address, port)
                if server is not None:
                    logger.info("iteration %d: a fallback server listens at port %d", this.number, port)
            time.sleep(_PAUSE_S)


def _is_over(this: Iteration) -> bool:
    known = latest(this.call)
    return known is not None and known[0] >= this.number
