"""Rank assignment: the rank of this process in the next iteration, and whether it is active.

A rank assignment takes and returns a `RankAssignmentCtx`. Most need only the set of terminated ranks; each rank then
computes its own answer. `FilterCountGroupedByKey` and `Tree` (in `rank_tree`) need the keys of all ranks: one rank
computes for all (see `leader`).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import compress
from typing import Any

from nvrx_slurm.core.inprocess import ranks
from nvrx_slurm.inprocess.checks import check_time, check_whole
from nvrx_slurm.inprocess.exception import InternalError, RankDiscarded, RestartAbort
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.state import Mode, State
from nvrx_slurm.inprocess.store.leader import MOST, Leadership, text_of


@dataclass
class RankAssignmentCtx:
    """Input and output of a rank assignment.

    `terminated_ranks`: those of 0..`state.world_size`-1 that are gone or unfit, in the numbering of `state.rank`; the
    same set on all ranks. `store`: the store of this iteration (`leader` lists the methods used); delete the keys that
    you write there. `state.iteration`: the iteration that is about to begin.
    """

    state: State
    store: Any
    terminated_ranks: set[int]


class RankAssignment(ABC):
    """Base of all values of the wrapper's `rank_assignment`.

    A subclass that does not do one of the following sets its flag to False; where no member of a composition does it,
    the wrapper adds the default: `activates` (default `ActivateAllRanks`), `renumbers` (default `ShiftRanks`).
    """

    activates = True  # may make ranks active or inactive
    renumbers = True  # may remove terminated ranks from the numbering

    @abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """The context with a new state; raises RankDiscarded if there is no place for this rank."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def check_composition(self, members: list[Any]) -> None:
        """Called by `Compose` with all its members from left to right; raises if this one cannot be among them."""
        if sum(member is self for member in members) > 1:
            raise ValueError(f"{self!r} is in one composition twice; make two of it")

    def check_result(self, value: Any) -> None:
        """Raises InternalError unless `value` is a usable result; `Compose` calls it for each member."""
        if not isinstance(value, RankAssignmentCtx) or not isinstance(value.state, State):
            raise InternalError(f"{self!r} returned {value!r}, not a RankAssignmentCtx")


class RankFilter(RankAssignment):
    """Base of assignments that only decide which healthy ranks are active; list them left of the renumbering."""

    renumbers = False


def refuse_terminated(ctx: RankAssignmentCtx) -> None:
    """Raises RankDiscarded on a terminated rank."""
    if ctx.state.rank in ctx.terminated_ranks:
        raise RankDiscarded(f"rank {ctx.state.rank} of iteration {ctx.state.iteration} was terminated or filtered out")


def check_key(name: str, key_or_fn: object) -> None:
    """Raises TypeError unless it is a str or a function."""
    if not isinstance(key_or_fn, str) and not callable(key_or_fn):
        raise TypeError(f"{name} must be a text or a function of the State, not {key_or_fn!r}")


def key_of(key_or_fn: str | Callable[[State], Any], state: State) -> str:
    """The rank's key as text. A function that needs two arguments gets rank and world size, as in older NVRx."""
    if not callable(key_or_fn):
        return key_or_fn
    needed = key_or_fn.__code__.co_argcount - len(key_or_fn.__defaults__ or ()) if inspect.isfunction(key_or_fn) else 1
    given: tuple[Any, ...] = (state.rank, state.world_size) if needed > 1 else (state,)
    return str(key_or_fn(*given))


# --- activation -------------------------------------------------------------------------------------------------------


class ActivateAllRanks(RankFilter):
    """Activate all healthy ranks. Raises ValueError when composed with another filter."""

    def check_composition(self, members: list[Any]) -> None:
        """Raises ValueError beside another RankFilter."""
        super().check_composition(members)
        for other in members:
            if other is not self and isinstance(other, RankFilter):
                raise ValueError(
                    f"{self!r} cannot be combined with {other!r}: both decide which ranks are active; leave one out"
                )

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Active, with the same number."""
        return _active_below(ctx, ctx.state.world_size)


class _Limit(RankFilter):
    """Keep the lowest of the ranks that were to be active."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, vars(self).values()))})"

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Active or inactive."""
        size = ctx.state.world_size
        if ctx.state.active_world_size is not None:
            size = min(size, ctx.state.active_world_size)
        return _active_below(ctx, self.limited(size))

    @abstractmethod
    def limited(self, size: int) -> int:
        """How many of `size` ranks stay active."""


class MaxActiveWorldSize(_Limit):
    """Keep at most `max_active_world_size` ranks active (int >= 1; None: no limit), the lowest ones."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        if max_active_world_size is not None:
            check_whole("max_active_world_size", max_active_world_size, 1)
        self.max_active_world_size = max_active_world_size

    def limited(self, size: int) -> int:
        """The smaller number."""
        return size if self.max_active_world_size is None else min(size, self.max_active_world_size)


class ActiveWorldSizeDivisibleBy(_Limit):
    """Keep the largest multiple of `divisor` (int >= 1) of ranks active, the lowest ones."""

    def __init__(self, divisor: int = 1) -> None:
        check_whole("divisor", divisor, 1)
        self.divisor = divisor

    def limited(self, size: int) -> int:
        """The largest multiple that is not greater than `size`."""
        return size - size % self.divisor


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
    """Give all healthy ranks new numbers. Filters to the left then decide anew which ranks are active."""

    activates = False

    def check_composition(self, members: list[Any]) -> None:
        """Raises ValueError for a filter to the right: it would run before the new numbers are known."""
        super().check_composition(members)
        for other in members[members.index(self) :]:
            if isinstance(other, RankFilter):
                raise ValueError(
                    f"list {other!r} left of {self!r}: the rightmost member is called first, and which ranks are "
                    "active is decided after they have their new numbers"
                )

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """The state with the new rank and world size; raises RankDiscarded on a terminated rank."""
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
        """The new number of the healthy rank `rank`."""


class ShiftRanks(_Renumbering):
    """Healthy ranks keep their order and close the gaps to the left."""

    def new_rank(self, rank: int, world_size: int, terminated: set[int]) -> int:
        """Less by the number of terminated ranks below."""
        return ranks.shifted(rank, terminated)


class FillGaps(_Renumbering):
    """Healthy ranks below the new world size keep their number; the others take the gaps, in order."""

    def new_rank(self, rank: int, world_size: int, terminated: set[int]) -> int:
        """The rank itself or a gap."""
        return ranks.filled(rank, world_size, terminated)


# --- filtering by groups ----------------------------------------------------------------------------------------------


class FilterCountGroupedByKey(RankAssignment):
    """Terminate all ranks of each group whose number of healthy ranks does not meet `condition(count) -> bool`.

    A group is all healthy ranks with the same key, as text: `key_or_fn` itself, or its value for the rank's state.
    List it right of `ShiftRanks` or `FillGaps`, which remove the discarded ranks. One rank calls `condition`, once per
    group. A wait for other ranks lasts at most twice `timeout`.

    If a key function or the condition raises, every rank raises InternalError with the same text. If no group is left,
    every rank raises RankDiscarded.
    """

    activates = False
    renumbers = False

    def __init__(
        self,
        key_or_fn: str | Callable[[State], Any],
        condition: Callable[[int], bool],
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        check_time("timeout of a FilterCountGroupedByKey", timeout)
        check_key("key_or_fn of a FilterCountGroupedByKey", key_or_fn)
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout
        self._place = 0  # number of this filter in its composition; the same on all ranks

    def check_composition(self, members: list[Any]) -> None:
        """Raises ValueError for more than MOST filters of this kind."""
        super().check_composition(members)
        filters = [member for member in members if isinstance(member, FilterCountGroupedByKey)]
        if len(filters) > MOST:
            raise ValueError(f"a composition may have {MOST} filters by groups, not {len(filters)}")
        self._place = filters.index(self)

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """The context with more terminated ranks."""
        if ctx.state.rank in ctx.terminated_ranks:
            return ctx
        name = f"FilterCountGroupedByKey {self._place}"
        leadership = Leadership(ctx, name, self._place, self.timeout)
        leadership.give(lambda: key_of(self.key_or_fn, ctx.state))
        discarded = leadership.decide(lambda: ranks.to_runs(self._discarded(leadership.healthy, leadership.given())))
        return replace(ctx, terminated_ranks=ctx.terminated_ranks | ranks.from_runs(discarded))

    def _discarded(self, healthy: list[int], keys: list[bytes]) -> list[int]:
        failing = {key: count for key, count in Counter(keys).items() if not self.condition(count)}
        discarded = list(compress(healthy, map(failing.__contains__, keys)))
        if len(discarded) == len(healthy):
            some = ", ".join(f"{text_of(key)!r} with {count}" for key, count in list(failing.items())[:3])
            raise RankDiscarded(f"no group of ranks meets the condition, so no rank is left: {some}")
        return discarded


FilterGroupedByKey = FilterCountGroupedByKey


# --- called by the wrapper --------------------------------------------------------------------------------------------


def with_defaults(assignment: RankAssignment) -> RankAssignment:
    """`assignment` with defaults: `ShiftRanks` right of all filters if no member renumbers ranks, and
    `ActivateAllRanks` leftmost if no member activates them.

    Raises ValueError for a filter by groups with no renumbering to its left.
    """
    given: list[Any] = list(assignment.members()) if isinstance(assignment, Compose) else [assignment]
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


def assign(assignment: RankAssignment, ctx: RankAssignmentCtx) -> State:
    """The state of this rank in the iteration `ctx.state.iteration`: ACTIVE or INACTIVE, complete and consistent.

    The assignment gets a state without active ranks, with the mode of the last iteration (INITIALIZED: the first one).
    A rank that it does not deactivate is active, as in NVRx. To undo an assignment after the loss of another rank, call
    this again with the state from before, more terminated ranks and a higher iteration.

    Raises what the assignment raises, InternalError for an unusable result, RestartAbort if no rank is active.
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
    if state.mode is not Mode.INACTIVE:
        active_rank = state.rank if state.active_rank is None else state.active_rank
        size = state.world_size if state.active_world_size is None else state.active_world_size
        state = replace(state, mode=Mode.ACTIVE, active_rank=active_rank, active_world_size=size)
    if not _fits(state):
        raise InternalError(f"{assignment!r} returned ranks that do not fit together: {state!r}")
    if state.active_world_size == 0:
        raise RestartAbort(f"{assignment!r} leaves no rank active of {state.world_size} healthy ranks")
    return state


def _fits(state: State) -> bool:
    size = -1 if state.active_world_size is None else state.active_world_size
    if not (0 <= state.rank < state.world_size and 0 <= size <= state.world_size):
        return False
    if state.active_rank is None:
        return state.mode is Mode.INACTIVE
    return state.mode is Mode.ACTIVE and 0 <= state.active_rank < size
