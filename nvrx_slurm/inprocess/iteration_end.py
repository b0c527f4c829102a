"""The end of an iteration in the monitor thread: wait for it, call `abort`, stop the function."""

from __future__ import annotations

import logging
import time

import torch.distributed as dist

from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.exception import RankDiscarded
from nvrx_slurm.inprocess.meeting.barriers import Iteration
from nvrx_slurm.inprocess.meeting.view import StoreLost
from nvrx_slurm.inprocess.plugins.abort import cut_again
from nvrx_slurm.inprocess.state import FrozenState
from nvrx_slurm.inprocess.watch.page import STOPPING, Page
from nvrx_slurm.inprocess.watch.stopping import Stopper

logger = logging.getLogger(__name__)

_UNWIND_S = 0.2  # for a function whose collective `abort` has ended: longest clean-up that is not interrupted


class IterationEnd:
    """Used by the monitor thread."""

    def __init__(self, arguments: Arguments, page: Page) -> None:
        self._arguments, self._page = arguments, page

    def wait(self, this: Iteration, state: FrozenState, stopper: Stopper) -> bool:
        """Until the iteration ends; True if the function has returned on all active ranks.

        After a fault, also of the store, it calls `abort` and stops the function. Raises StoreLost and RankDiscarded.
        """
        lost: StoreLost | RankDiscarded | None = None
        try:
            if this.await_end():
                return True
        except (StoreLost, RankDiscarded) as error:
            lost = error
        self._page.words[STOPPING] = time.monotonic_ns()
        wait_s = self._arguments.seconds("last_call_wait")
        if lost is None and wait_s:  # a sleep of 0 s would hand the GIL to a function that computes
            time.sleep(wait_s)
        self._stop_function(state, stopper)
        if lost is not None:
            raise lost
        return False

    def _stop_function(self, state: FrozenState, stopper: Stopper) -> None:
        """`abort`, and an exception in the function."""
        stopper.begin()
        was_initialized = dist.is_initialized()
        breaks = self._arguments.abort is not None and was_initialized  # a collective, so the function may end
        self._abort(state)
        stopper.stop(self._arguments.seconds("soft_timeout"), _UNWIND_S if breaks else 0.0, cut_again)
        if dist.is_initialized() and not was_initialized:  # `init_process_group` has ended between the two
            self._abort(state)

    def _abort(self, state: FrozenState) -> None:
        if self._arguments.abort is not None:
            try:
                self._arguments.abort(state)
            except Exception:
                logger.exception("abort failed")
