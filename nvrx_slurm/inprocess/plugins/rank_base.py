"""Base classes of rank assignments, and what they share."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from nvrx_slurm.inprocess.exception import InternalError, RankDiscarded
from nvrx_slurm.inprocess.state import State
from nvrx_slurm.inprocess.store.leader import Leadership


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


def leadership_of(ctx: RankAssignmentCtx, name: str, place: int, timeout: timedelta) -> Leadership:
    """This rank's part in a computation by one rank for all; see `Leadership` for `name`, `place`, `timeout`."""
    return Leadership(
        store=ctx.store,
        name=name,
        place=place,
        iteration=ctx.state.iteration,
        rank=ctx.state.rank,
        world_size=ctx.state.world_size,
        terminated=ctx.terminated_ranks,
        timeout=timeout,
    )
