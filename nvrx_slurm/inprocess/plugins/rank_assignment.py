"""Rank assignment: the rank of this process in the next iteration, and whether it is active.

A rank assignment takes and returns a `RankAssignmentCtx`. Most need only the set of terminated ranks; each rank then
computes its own answer. `FilterCountGroupedByKey` and `Tree` (in `rank_tree`) need the keys of all ranks: one rank
computes for all (see `Leadership`).
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import compress
from typing import Any

from nvrx_slurm.core.inprocess import renumbering
from nvrx_slurm.inprocess.attribution import describe, message
from nvrx_slurm.inprocess.checks import check_time, check_whole
from nvrx_slurm.inprocess.exception import InternalError, RankDiscarded, RestartAbort, RestartError, TimeoutError
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.state import Mode, State
from nvrx_slurm.inprocess.store.barriers import RankLost
from nvrx_slurm.inprocess.store.stores import StoreView


@dataclass
class RankAssignmentCtx:
    """Input and output of a rank assignment.

    `terminated_ranks`: those of 0..`state.world_size`-1 that are gone or unfit, in the numbering of `state.rank`; the
    same set on all ranks. `store`: the store of this iteration (`Leadership` lists the methods used).
    `state.iteration`: the iteration that is about to begin.
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
    composable = True

    @abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """The context with a new state; raises RankDiscarded if there is no place for this rank."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


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
    needed = 1
    if inspect.isfunction(key_or_fn):
        needed = key_or_fn.__code__.co_argcount - len(key_or_fn.__defaults__ or ())
    if needed > 1:
        older: Callable[[int, int], str] = key_or_fn  # type: ignore[assignment]
        return str(older(state.rank, state.world_size))
    return str(key_or_fn(state))


# --- activation -------------------------------------------------------------------------------------------------------


class ActivateAllRanks(RankFilter):
    """Activate all healthy ranks. The wrapper refuses it beside another filter."""

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
    new_rank: Callable[[int, int, set[int]], int]  # of a healthy rank, by world size and terminated ranks

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """The state with the new rank and world size; raises RankDiscarded on a terminated rank."""
        state = ctx.state
        terminated = ctx.terminated_ranks
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


class ShiftRanks(_Renumbering):
    """Healthy ranks keep their order and close the gaps to the left."""

    new_rank = staticmethod(renumbering.shifted)


class FillGaps(_Renumbering):
    """Healthy ranks below the new world size keep their number; the others take the gaps, in order."""

    new_rank = staticmethod(renumbering.filled)


# --- one rank computes for all ----------------------------------------------------------------------------------------

_DONE, _FAILED, _DISCARDED, _LOST = b"=", b"!", b"-", b"?"  # first byte of a rank's value and of the decision


_ERRORS: dict[bytes, type[Exception]] = {_FAILED: InternalError, _DISCARDED: RankDiscarded, _LOST: RankLost}


class Leadership:
    """One computation in one iteration, as seen by one healthy rank; see `RankAssignmentCtx` for `ctx`.

    The lowest healthy rank, the leader, computes and publishes; every rank reads the decision. The wrapper's store ends
    a wait for others when a rank is lost, also the leader: ranks are then assigned again. `ctx.store` needs the methods
    `set`, `get`, `add`, `check`, `compare_set`, `multi_get` and `wait` of torch's stores. Keys that outlive the
    iteration go to its attribute `stable`, if it has one.

    `name` and `place` tell computations in the same iteration apart. A wait for other ranks lasts at most twice
    `timeout`.
    """

    def __init__(self, ctx: Any, name: str, place: int, timeout: timedelta) -> None:
        self.store = ctx.store if isinstance(ctx.store, StoreView) else StoreView(ctx.store)
        self._stable = getattr(ctx.store, "stable", self.store)  # its keys outlive the iteration
        self.name, self.place, self.timeout_s = name, place, timeout.total_seconds()
        self.iteration = ctx.state.iteration
        self.rank = ctx.state.rank
        self._size = ctx.state.world_size
        self._terminated = ctx.terminated_ranks

    @functools.cached_property
    def healthy(self) -> list[int]:
        """The ranks that take part."""
        return [rank for rank in range(self._size) if rank not in self._terminated]

    def _given_keys(self, ranks: Sequence[int]) -> list[str]:
        """Keys in the stable store, one per rank."""
        return [f"given/{self.place}/{rank}" for rank in ranks]

    def _key(self, what: str) -> str:
        return f"{self.place}/{self.iteration}/{what}"

    # --- from every rank to the leader -------------------------------------------------------------------------------

    def give(self, make: Callable[[], str]) -> None:
        """Give `make()` to the leader. If it raises, that is the decision, and raised here."""
        value = _FAILED
        try:
            value = _DONE + make().encode()
        except BaseException as error:
            self._settle(_FAILED, f"rank {self.rank}: {describe(error)}", error)
        finally:
            self._hand_in(value)  # no rank shall wait for it

    def _hand_in(self, value: bytes) -> None:
        self._stable.set(self._given_keys([self.rank])[0], value)
        if self.store.add(self._key("count"), 1) == self._size - len(self._terminated):
            self.store.set(self._key("all"), b"1")

    def given(self) -> list[bytes]:
        """The values of the healthy ranks (see `text_of`), as soon as all have given one.

        Raises InternalError if the `make` of one raised, TimeoutError if one gave nothing.
        """
        if not self.store.came([self._key("all")], self.timeout_s):
            came = self.store.add(self._key("count"), 0)
            raise TimeoutError(f"only {came} of {len(self.healthy)} ranks took part within {self.timeout_s:g} s")
        values = list(self._stable.multi_get(self._given_keys(self.healthy)))
        if _FAILED in values:
            raise InternalError("one rank could give nothing")  # its own decision says why
        return values

    # --- from the leader to every rank -------------------------------------------------------------------------------

    def decide(self, compute: Callable[[], str]) -> str:
        """Return the leader's `compute()` on every rank.

        If it raises, every rank raises RankDiscarded (if it raised that) or InternalError, with the same sentence. If a
        rank is lost meanwhile, every rank raises RankLost, or none. Raises TimeoutError without a decision in time.
        """
        try:
            if self.rank == self.healthy[0]:
                return self._computed(compute)
            if self.store.came([self._key("decided")], 2 * self.timeout_s):
                return self._read(self.store.get(self._key("decided")))
        except RankLost as error:
            return self._settle(_LOST, message(error), error)
        raise TimeoutError(
            f"{self.name}: rank {self.healthy[0]}, which computes the rank assignment for all, gave none within "
            f"{2 * self.timeout_s:g} s"
        )

    def _computed(self, compute: Callable[[], str]) -> str:
        try:
            text = compute()
        except RankLost:
            raise
        except RestartError as error:
            return self._settle(_DISCARDED if isinstance(error, RankDiscarded) else _FAILED, message(error), error)
        except BaseException as error:
            return self._settle(_FAILED, f"rank {self.rank}, computing for all: {describe(error)}", error)
        return self._settle(_DONE, text)

    def _settle(self, kind: bytes, text: str, error: BaseException | None = None) -> str:
        """Make this the decision, unless there is one; the text of the one that counts. Raises what it says.

        Before torch 2.9 `compare_set` wakes no waiter.
        """
        decision = bytes(self.store.compare_set(self._key("decision"), "", kind + text.encode()))
        self.store.set(self._key("decided"), decision)
        if error is not None and not isinstance(error, Exception):
            raise error  # RestartAbort or an interrupt, which takes precedence
        return self._read(decision, error)

    def _read(self, decision: bytes, cause: BaseException | None = None) -> str:
        kind, text = bytes(decision[:1]), bytes(decision[1:]).decode()
        if kind != _DONE:
            raise _ERRORS[kind](f"{self.name}: {text}") from cause
        return text


def text_of(given: bytes) -> str:
    """The return value of a rank's `make`."""
    return given[1:].decode()


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
        self.place = 0  # number of this filter in its composition; the same on all ranks

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """The context with more terminated ranks."""
        if ctx.state.rank in ctx.terminated_ranks:
            return ctx
        name = f"FilterCountGroupedByKey {self.place}"
        leadership = Leadership(ctx, name, self.place, self.timeout)
        leadership.give(lambda: key_of(self.key_or_fn, ctx.state))
        discarded = leadership.decide(
            lambda: renumbering.to_runs(self._discarded(leadership.healthy, leadership.given()))
        )
        return replace(ctx, terminated_ranks=ctx.terminated_ranks | renumbering.from_runs(discarded))

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

    Raises ValueError for members that cannot work together, or not in this order.
    """
    members: list[Any] = list(assignment.members()) if isinstance(assignment, Compose) else [assignment]
    count = len(members)
    if not any(member.renumbers for member in members):
        filters = [n for n, member in enumerate(members) if isinstance(member, RankFilter)]
        last = max(filters, default=-1)
        members.insert(last + 1, ShiftRanks())
    if not any(member.activates for member in members):
        members.insert(0, ActivateAllRanks())
    _check_members(members)
    if len(members) == count:
        return assignment
    composed = Compose(*members)
    assert isinstance(composed, RankAssignment)
    return composed


def _check_members(members: list[Any]) -> None:
    """The rightmost member is called first: filters by groups, what renumbers, then the other filters."""
    by_group = [member for member in members if isinstance(member, FilterCountGroupedByKey)]
    for place, member in enumerate(by_group):
        member.place = place
    filters = [member for member in members if isinstance(member, RankFilter)]
    renumbers = [member.renumbers for member in members]
    if len(members) > 1 and not all(member.composable for member in members):
        raise ValueError("Tree assigns and activates ranks by itself; it cannot be composed with anything else")
    if len(filters) > 1 and any(isinstance(member, ActivateAllRanks) for member in filters):
        raise ValueError(
            "ActivateAllRanks() cannot be combined with another filter: both decide which ranks are active"
        )
    for place, member in enumerate(members):
        if isinstance(member, RankFilter) and any(isinstance(left, _Renumbering) for left in members[:place]):
            raise ValueError(f"list {member!r} left of ShiftRanks() or FillGaps(): filters need the new numbers")
        if member in by_group and not any(renumbers[:place]):
            raise ValueError(f"list ShiftRanks() or FillGaps() left of {member!r}, to take the filtered ranks out")


def assign(assignment: RankAssignment, ctx: RankAssignmentCtx) -> State:
    """The state of this rank in the iteration `ctx.state.iteration`: ACTIVE or INACTIVE, complete and consistent.

    The assignment gets a state without active ranks, with the mode of the last iteration (INITIALIZED: the first one).
    A rank that it does not deactivate is active, as in NVRx. To undo an assignment after the loss of another rank, call
    this again with the state from before, more terminated ranks and a higher iteration.

    Raises what the assignment raises, InternalError for an unusable result, RestartAbort if no rank is active.
    """
    before = replace(ctx.state, active_rank=None, active_world_size=None)
    result = assignment(RankAssignmentCtx(before, ctx.store, set(ctx.terminated_ranks)))
    if not isinstance(result, RankAssignmentCtx) or not isinstance(result.state, State):
        raise InternalError(f"{assignment!r} returned {result!r}, not a RankAssignmentCtx")
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
