"""Gives the verdict of every barrier; a thread in the monitor process of the first rank that is left."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable

from nvrx_slurm.core.inprocess.rollcall import Outcome, Verdict
from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.meeting.barriers import ENTRY, Round, coordinate, latest, publish
from nvrx_slurm.inprocess.meeting.store import StoreLost, StoreView

logger = logging.getLogger(__name__)

CLOSED = "nvrx_inprocess_closed"  # without a prefix: a server that is about to end takes no new call
ALL_LEFT = "all_left"
SERVES = "serves"  # "1" if the monitor process of rank 0 runs the store's server, set when it has made the store
_GOODBYE_S = 5.0


class Coordinator(threading.Thread):
    """Round after round until all have finished or nobody is left; then `over` is set.

    It goes on where an earlier one stopped. If it fails, no rank may wait for it: all end, and are told why.
    """

    def __init__(
        self, make_view: Callable[[], StoreView], world_size: int, gone: frozenset[int], arguments: Arguments
    ) -> None:
        super().__init__(name="nvrx-coordinator", daemon=True)
        self._make_view, self._world_size, self._gone = make_view, world_size, gone
        self._barrier_s = arguments.seconds("barrier_timeout")
        self._slack_s = overdue_slack_s(arguments)
        self.over = threading.Event()

    def run(self) -> None:
        """See the class."""
        try:
            self._rounds(self._make_view())
        except StoreLost as error:
            logger.warning("coordinator: %s", error)
        except Exception:
            logger.exception("the coordinator failed")
        self.over.set()

    def _rounds(self, call: StoreView) -> None:
        number, verdict = latest(call) or (ENTRY - 1, Verdict(Outcome.NEXT, gone=self._gone))
        while verdict.outcome is Outcome.NEXT:
            gone, number = verdict.gone, number + 1
            verdict = self._verdict(Round(call, number), gone)
            logger.info("iteration %d: %s %s", number, verdict.outcome.name, verdict.why)
            if verdict.outcome is Outcome.NEXT and number - 1 > ENTRY:
                members = [rank for rank in range(self._world_size) if rank not in gone]
                Round(call, number - 1).forget(members)
        if verdict.outcome is not Outcome.EMPTY:  # somebody has to read it
            call.came([ALL_LEFT], _GOODBYE_S)

    def _verdict(self, this: Round, gone: frozenset[int]) -> Verdict:
        overdue_s = self._barrier_s + (self._slack_s if this.number != ENTRY else 0.0)
        try:
            return coordinate(this, self._world_size, gone, overdue_s, lambda: _close(this.call))
        except StoreLost:
            raise
        except Exception:
            logger.exception("iteration %d: the coordinator failed", this.number)
            why = f"the coordinator of the barriers failed:\n{traceback.format_exc()}"
            _close(this.call)
            return publish(this, Verdict(Outcome.REFUSED, gone=gone, why=why))


def _close(call: StoreView) -> None:
    """Only a server of ours ends with the call; any other store is there for the next one."""
    if call.check([SERVES]) and call.get(SERVES) == b"1":
        call.store.set(CLOSED, "1")


def overdue_slack_s(arguments: Arguments) -> float:
    """How much longer than the barrier's timeout a rank may be missing: until its own monitor has killed it."""
    names = ("last_call_wait", "termination_grace_time", "heartbeat_timeout")
    return sum(arguments.seconds(name) for name in names)
