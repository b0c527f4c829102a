"""What every rank assignment is made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nvrx_slurm.inprocess.exception import InternalError, RankDiscarded
from nvrx_slurm.inprocess.state import State


@dataclass
class RankAssignmentCtx:
    """What a rank assignment works on.

    `terminated_ranks` are those of 0..`state.world_size`-1 that are gone or unfit, in the numbering of `state.rank`;
    the same set on all ranks. `store` is the iteration's (see `leader` for what is needed of it); what an assignment of
    your own writes there it has to delete. `state.iteration` is the iteration that is about to begin.
    """

    state: State
    store: Any
    terminated_ranks: set[int]


class RankAssignment(ABC):
    """Base of everything that may be the wrapper's `rank_assignment`.

    A subclass of your own that does less than both of these says so, and what nobody in a composition does is done by
    default: `activates = False` (by `ActivateAllRanks`), `renumbers = False` (by `ShiftRanks`).
    """

    activates = True  # may make ranks active or inactive
    renumbers = True  # may take away the numbers of terminated ranks

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
        """Raises InternalError for what is nothing to go on with; `Compose` calls it for each of its members."""
        if not isinstance(value, RankAssignmentCtx) or not isinstance(value.state, State):
            raise InternalError(f"{self!r} returned {value!r}, not a RankAssignmentCtx")


class RankFilter(RankAssignment):
    """Base of what only decides which of the healthy ranks are active; list it left of what renumbers ranks."""

    renumbers = False


def refuse_terminated(ctx: RankAssignmentCtx) -> None:
    """Raises RankDiscarded on a rank that is terminated."""
    if ctx.state.rank in ctx.terminated_ranks:
        raise RankDiscarded(f"rank {ctx.state.rank} of iteration {ctx.state.iteration} was terminated or filtered out")


def check_key(name: str, key_or_fn: object) -> None:
    """Raises TypeError unless it is a text or a function."""
    if not isinstance(key_or_fn, str) and not callable(key_or_fn):
        raise TypeError(f"{name} must be a text or a function of the State, not {key_or_fn!r}")


def key_of(key_or_fn: str | Callable[[State], Any], state: State) -> str:
    """The rank's key as text."""
    return str(key_or_fn(state)) if callable(key_or_fn) else key_or_fn
