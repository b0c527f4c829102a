"""Calls of the user's plug-ins: rank assignment, while ranks may be lost; the others, with a check of their results."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.attribution import describe
from nvrx_slurm.inprocess.exception import HealthCheckError, InternalError, RankDiscarded, RestartError
from nvrx_slurm.inprocess.plugins.rank_assignment import RankAssignment, RankAssignmentCtx, assign
from nvrx_slurm.inprocess.state import FrozenState, State
from nvrx_slurm.inprocess.store.barriers import Iteration
from nvrx_slurm.inprocess.store.view import StoreLost, StoreView

_WAIT_S = 2.0


class RankLost(Exception):
    """A rank was lost while ranks were being assigned."""


class _AssigningView(StoreView):
    """The store of a rank assignment: a wait for other ranks ends when one is lost."""

    def __init__(self, this: Iteration) -> None:
        stable = this.call.under("stable")
        keys = this.keys.under("assign", stable)
        super().__init__(keys.store, keys.prefix, stable)
        self._ended = this.keys

    def came(self, keys: Sequence[str], timeout_s: float) -> bool:
        """See `StoreView`; raises RankLost."""
        deadline_s, wait_s = time.monotonic() + timeout_s, min(_WAIT_S, timeout_s)
        while not self.wait_once(keys, wait_s):
            if self._ended.check(["ended"]):
                raise RankLost("a rank was lost during the rank assignment")
            if time.monotonic() >= deadline_s:
                return False
        return True


def assign_ranks(
    assignment: RankAssignment, this: Iteration, before: State, terminated: Collection[int]
) -> State | Exception:
    """The new state of this rank, or the error by which it noticed that another rank was lost meanwhile.

    Raises any other exception of the assignment.
    """
    state = replace(before, iteration=this.number, fn_exception=None)
    try:
        return assign(assignment, RankAssignmentCtx(state, _AssigningView(this), set(terminated)))
    except (RestartError, TimeoutError, RankLost) as error:
        if isinstance(error, (RankDiscarded, StoreLost)) or not this.keys.check(["end"]):
            raise
        return error


def call_plugin(arguments: Arguments, name: str, state: FrozenState) -> None:
    """Call the plug-in in that argument, if there is one.

    A health check fails with HealthCheckError. Raises InternalError if a plug-in returns neither a state nor None.
    """
    plugin = getattr(arguments, name)
    try:
        result = plugin and plugin(state)
    except Exception as error:
        if isinstance(error, HealthCheckError) or not name.endswith("health_check"):
            raise
        raise HealthCheckError(describe(error)) from error
    if result is not None and not isinstance(result, (FrozenState, State)):
        raise InternalError(f"{name}: {plugin!r} returned {result!r}; it has to return the state it was given")
