"""Which rank a rank has in the next iteration, and whether it is active: what users compose.

A rank assignment takes and returns a `RankAssignmentCtx`. Most need nothing but the set of terminated ranks, and every
rank computes its own answer. `FilterCountGroupedByKey` and `Tree` (in `rank_tree`) need all ranks' keys: there one
rank computes for all (see `leader`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import compress
from typing import Any

from nvrx_slurm.core.inprocess import ranks
from nvrx_slurm.inprocess.checks import check_time, check_whole
from nvrx_slurm.inprocess.exception import InternalError, RankDiscarded, RestartAbort
from nvrx_slurm.inprocess.meeting.leader import MOST, Leadership, text_of
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.plugins.rank_base import (
    RankAssignment,
    RankAssignmentCtx,
    RankFilter,
    check_key,
    key_of,
    refuse_terminated,
)
from nvrx_slurm.inprocess.plugins.rank_tree import Layer, LayerFlag, Tree
from nvrx_slurm.inprocess.state import Mode, State

__all__ = [
    "ActivateAllRanks",
    "ActiveWorldSizeDivisibleBy",
    "FillGaps",
    "FilterCountGroupedByKey",
    "FilterGroupedByKey",
    "Layer",
    "LayerFlag",
    "MaxActiveWorldSize",
    "RankAssignment",
    "RankAssignmentCtx",
    "RankDiscarded",
    "RankFilter",
    "ShiftRanks",
    "Tree",
    "assign",
    "with_defaults",
]


# --- activation -------------------------------------------------------------------------------------------------------


class ActivateAllRanks(RankFilter):
    """All healthy ranks are active. Raises ValueError when composed with anything else that activates ranks."""

    def check_composition(self, members: list[Any]) -> None:
        """Alone among the filters."""
        super().check_composition(members)
        for other in members:
            if other is not self and isinstance(other, RankFilter):
                raise ValueError(
                    f"{self!r} cannot be combined with {other!r}: both decide which ranks are active; leave one out"
                )

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Active, with the same number."""
        return _active_below(ctx, ctx.state.world_size)


class MaxActiveWorldSize(RankFilter):
    """At most `max_active_world_size` (>= 1; None: no limit) of the ranks that were to be active, the lowest ones."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        if max_active_world_size is not None:
            check_whole("max_active_world_size", max_active_world_size, 1)
        self.max_active_world_size = max_active_world_size

    def __repr__(self) -> str:
        return f"MaxActiveWorldSize({self.max_active_world_size})"

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Active or inactive."""
        size, limit = _active_so_far(ctx.state), self.max_active_world_size
        return _active_below(ctx, size if limit is None else min(size, limit))


class ActiveWorldSizeDivisibleBy(RankFilter):
    """As many of the ranks that were to be active, the lowest ones, as a multiple of `divisor` (>= 1) allows."""

    def __init__(self, divisor: int = 1) -> None:
        check_whole("divisor", divisor, 1)
        self.divisor = divisor

    def __repr__(self) -> str:
        return f"ActiveWorldSizeDivisibleBy({self.divisor})"

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Active or inactive."""
        return _active_below(ctx, ranks.divisible(_active_so_far(ctx.state), self.divisor))


def _active_so_far(state: State) -> int:
    size = state.world_size if state.active_world_size is None else state.active_world_size
    return min(size, state.world_size)


def _active_below(ctx: RankAssignmentCtx, size: int) -> RankAssignmentCtx:
    active = ctx.state.rank < size
    state = replace(
        ctx.state,
        mode=Mode.ACTIVE if active else Mode.INACTIVE,
        active_rank=ctx.state.rank if active else None,
        active_world_size=size,
    )
    return replace(ctx, state=state)


# --- renumbering ------------------------------------------------------------------------------------------------------


class _Renumbering(RankAssignment):
    """New numbers for all healthy ranks; whatever was active is to be decided anew."""

    activates = False

    def check_composition(self, members: list[Any]) -> None:
        """Filters to the right would be called before the ranks they number are known."""
        super().check_composition(members)
        for other in members[members.index(self) :]:
            if isinstance(other, RankFilter):
                raise ValueError(
                    f"list {other!r} left of {self!r}: the rightmost member is called first, and which ranks are "
                    "active is decided after they have their new numbers"
                )

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """The rank's new number among fewer; raises RankDiscarded on a terminated rank."""
        state, terminated = ctx.state, ctx.terminated_ranks
        refuse_terminated(ctx)
        state = replace(
            state,
            rank=self.new_rank(state.rank, state.world_size, terminated),
            world_size=state.world_size - len(terminated),
            active_rank=None,
            active_world_size=None,
            mode=Mode.INITIALIZED,
        )
        return replace(ctx, state=state, terminated_ranks=set())

    @abstractmethod
    def new_rank(self, rank: int, world_size: int, terminated: set[int]) -> int:
        """Of a healthy rank."""


class ShiftRanks(_Renumbering):
    """Healthy ranks keep their order and close up to the left."""

    def new_rank(self, rank: int, world_size: int, terminated: set[int]) -> int:
        """Less by the number of terminated ranks below."""
        return ranks.shifted(rank, terminated)


class FillGaps(_Renumbering):
    """Healthy ranks below the new world size keep their number; those above take the gaps, in order."""

    def new_rank(self, rank: int, world_size: int, terminated: set[int]) -> int:
        """The rank itself or a gap."""
        return ranks.filled(rank, world_size, terminated)


# --- filtering by groups ----------------------------------------------------------------------------------------------


class FilterCountGroupedByKey(RankAssignment):
    """Terminates all ranks of each group whose number of healthy ranks does not meet `condition`.

    A group is all healthy ranks with the same key: `key_or_fn` itself, or what it returns for the rank's state, as
    text. List it right of what takes the discarded ranks out (`ShiftRanks`, `FillGaps`). `condition` is called once per
    group, on one rank. A wait for other ranks lasts at most twice `timeout`.

    If a key function or the condition raises, every rank raises InternalError with the same sentence; if the condition
    discards everybody, every rank raises RankDiscarded.
    """

    activates = False
    renumbers = False

    def __init__(
        self,
        key_or_fn: str | Callable[[State], Any],
        condition: Callable[[int], bool],
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        check_key("key_or_fn", key_or_fn)
        if not callable(condition):
            raise TypeError(f"condition must be a function of a number of ranks, not {condition!r}")
        check_time("timeout of a FilterCountGroupedByKey", timeout)
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout
        self._place = 0  # the same on all ranks, and another for each filter of a composition

    def check_composition(self, members: list[Any]) -> None:
        """Once in a composition, and not with too many others of its kind."""
        super().check_composition(members)
        filters = [member for member in members if isinstance(member, FilterCountGroupedByKey)]
        if len(filters) > MOST:
            raise ValueError(f"a composition may have {MOST} filters by groups, not {len(filters)}")
        self._place = filters.index(self)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """The context with more terminated ranks."""
        if ctx.state.rank in ctx.terminated_ranks:
            return ctx
        leadership = self.leadership(ctx)
        leadership.give(lambda: key_of(self.key_or_fn, ctx.state))
        discarded = leadership.decide(lambda: ranks.to_runs(self._discarded(*leadership.given())))
        return replace(ctx, terminated_ranks=ctx.terminated_ranks | ranks.from_runs(discarded))

    def leadership(self, ctx: RankAssignmentCtx) -> Leadership:
        """What this rank has to do with the others."""
        return Leadership(
            store=ctx.store,
            name=f"FilterCountGroupedByKey {self._place}",
            place=self._place,
            iteration=ctx.state.iteration,
            rank=ctx.state.rank,
            world_size=ctx.state.world_size,
            terminated=ctx.terminated_ranks,
            timeout=self.timeout,
        )

    def _discarded(self, healthy: list[int], keys: list[bytes]) -> list[int]:
        failing = ranks.failing_keys(keys, self.condition)
        discarded = list(compress(healthy, map(failing.__contains__, keys)))
        if len(discarded) == len(healthy):
            some = ", ".join(f"{text_of(key)!r} with {count}" for key, count in list(failing.items())[:3])
            more = f" and {len(failing) - 3} more" if len(failing) > 3 else ""
            raise RankDiscarded(f"no group of ranks meets the condition, so no rank is left: {some}{more}")
        return discarded


FilterGroupedByKey = FilterCountGroupedByKey


# --- what the wrapper calls -------------------------------------------------------------------------------------------


def with_defaults(assignment: RankAssignment) -> RankAssignment:
    """`assignment`, with what it leaves out: `ShiftRanks`, right of all filters, if nothing in it renumbers ranks, and
    `ActivateAllRanks`, leftmost, if nothing activates them.

    Raises TypeError for what is no rank assignment, ValueError for a filter by groups with nobody to act on it.
    """
    if not isinstance(assignment, RankAssignment):
        raise TypeError(f"rank_assignment must be a RankAssignment or a Compose of them, not {assignment!r}")
    given = _members(assignment)
    members = list(given)
    if not any(member.renumbers for member in members):
        place = max((n for n, member in enumerate(members, start=1) if isinstance(member, RankFilter)), default=0)
        members.insert(place, ShiftRanks())
    for place, member in enumerate(members):
        if isinstance(member, FilterCountGroupedByKey) and not any(left.renumbers for left in members[:place]):
            raise ValueError(f"list ShiftRanks() or FillGaps() left of {member!r}, to take the filtered ranks out")
    if not any(member.activates for member in members):
        members.insert(0, ActivateAllRanks())
    if len(members) == len(given):
        return assignment
    composed = Compose(*members)
    assert isinstance(composed, RankAssignment)
    return composed


def _members(assignment: RankAssignment) -> list[RankAssignment]:
    return assignment.members() if isinstance(assignment, Compose) else [assignment]  # type: ignore[return-value]


def assign(assignment: RankAssignment, ctx: RankAssignmentCtx) -> State:
    """The state of this rank in the iteration `ctx.state.iteration`: ACTIVE or INACTIVE, complete and consistent.

    The assignment sees a state without active ranks, but with the last iteration's mode (INITIALIZED: there was none).
    An assignment that could not be finished, for a rank was lost meanwhile, is taken back by calling this again with
    the state from before, more terminated ranks and a higher iteration. Raises what it raises, InternalError if
    its result is not usable, and RestartAbort if no rank is active.
    """
    before = replace(ctx.state, active_rank=None, active_world_size=None)
    result = assignment(RankAssignmentCtx(before, ctx.store, set(ctx.terminated_ranks)))
    assignment.check_result(result)
    state = result.state
    if result.terminated_ranks and state.world_size >= before.world_size:
        raise InternalError(
            f"{assignment!r} left {len(result.terminated_ranks)} terminated ranks in the world of {state.world_size}; "
            "compose it with ShiftRanks() or FillGaps()"
        )
    if state.mode is Mode.TERMINATED:
        raise RankDiscarded(f"{assignment!r} terminated rank {before.rank}")
    if state.mode is Mode.INITIALIZED or state.active_world_size is None:
        raise InternalError(f"{assignment!r} activated nobody; compose it with ActivateAllRanks() or another filter")
    _check(assignment, state)
    if state.active_world_size == 0:
        raise RestartAbort(f"{assignment!r} leaves no rank active of {state.world_size} healthy ranks")
    return state


def _check(assignment: RankAssignment, state: State) -> None:
    size = state.active_world_size or 0
    numbers_fit = 0 <= state.rank < state.world_size and 0 <= size <= state.world_size
    if state.mode is Mode.ACTIVE:
        numbers_fit = numbers_fit and state.active_rank is not None and 0 <= state.active_rank < size
    else:
        numbers_fit = numbers_fit and state.active_rank is None
    if not numbers_fit:
        raise InternalError(f"{assignment!r} returned ranks that do not fit together: {state!r}")
