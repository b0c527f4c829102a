"""Gives the result of every barrier: a thread in the monitor process of the lowest rank that is left."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable

from nvrx_slurm.core.inprocess.rollcall import BarrierResult, Outcome
from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.meeting.barriers import ENTRY, Iteration, publish, serve_barrier
from nvrx_slurm.inprocess.meeting.view import StoreLost, StoreView

logger = logging.getLogger(__name__)

CLOSED = "nvrx_inprocess_closed"  # without a prefix: a server that is about to end accepts no new call
ALL_LEFT = "all_left"
SERVES = "serves"  # "1" if the monitor process of rank 0 runs the store's server, set when it has made the store
_GOODBYE_S = 5.0


class BarrierServer(threading.Thread):
    """Serves barrier after barrier until all ranks have finished or none is left; then `over` is set.

    If it fails, all ranks end and are told why.
    """

    def __init__(
        self, make_view: Callable[[], StoreView], world_size: int, gone: frozenset[int], arguments: Arguments
    ) -> None:
        super().__init__(name="nvrx-barriers", daemon=True)
        self._make_view, self._world_size, self._gone = make_view, world_size, gone
        self._barrier_s = arguments.seconds("barrier_timeout")
        self._overdue_s = arguments.overdue_s
        self.over = threading.Event()

    def run(self) -> None:
        """See the class."""
        try:
            self._serve(self._make_view())
        except StoreLost as error:
            logger.warning("barrier server: %s", error)
        except Exception:
            logger.exception("the barrier server failed")
        self.over.set()

    def _serve(self, call: StoreView) -> None:
        number, result = ENTRY - 1, BarrierResult(Outcome.NEXT, gone=self._gone)
        while result.outcome is Outcome.NEXT:
            gone, number = result.gone, number + 1
            result = self._result(Iteration(call, number), gone)
            logger.info("iteration %d: %s %s", number, result.outcome.name, result.why)
            if result.outcome is Outcome.NEXT and number - 1 > ENTRY:
                members = [rank for rank in range(self._world_size) if rank not in gone]
                Iteration(call, number - 1).delete_keys(members)
        if result.outcome is not Outcome.EMPTY:  # some rank has to read it
            call.came([ALL_LEFT], _GOODBYE_S)

    def _result(self, this: Iteration, gone: frozenset[int]) -> BarrierResult:
        overdue_s = self._barrier_s if this.number == ENTRY else self._overdue_s
        try:
            return serve_barrier(this, self._world_size, gone, overdue_s, lambda: _close(this.call))
        except StoreLost:
            raise
        except Exception:
            logger.exception("iteration %d: the barrier server failed", this.number)
            why = f"the barrier server failed:\n{traceback.format_exc()}"
            _close(this.call)
            return publish(this, BarrierResult(Outcome.REFUSED, gone=gone, why=why))


def _close(call: StoreView) -> None:
    """Only a server of ours ends with the call; any other store remains for the next one."""
    if call.check([SERVES]) and call.get(SERVES) == b"1":
        call.store.set(CLOSED, "1")
