"""Tree: rank assignment by failure domains (hosts, racks, the whole job), with spares close to the loss.

In the first iteration one rank collects the keys of all ranks (see `Leadership`). From then on each rank computes the
places of all ranks by itself (`core.inprocess.tree`): all ranks have the same keys and learn of the same deaths.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Flag, auto
from typing import Any

from nvrx_slurm.core.inprocess import renumbering
from nvrx_slurm.core.inprocess.tree import (
    DEAD,
    Level,
    Places,
    Topology,
    TopologyError,
    healthy,
    killed_by,
)
from nvrx_slurm.inprocess.checks import check_whole
from nvrx_slurm.inprocess.exception import InternalError, RankDiscarded
from nvrx_slurm.inprocess.plugins.rank_assignment import (
    Leadership,
    RankAssignment,
    RankAssignmentCtx,
    check_key,
    key_of,
    refuse_terminated,
    text_of,
)
from nvrx_slurm.inprocess.state import Mode, State

# in the first iteration a wait for other ranks lasts at most twice as long
_TIMEOUT = timedelta(seconds=60)


class LayerFlag(Flag):
    """Searches that the branches of a layer allow."""

    RESERVE = auto()  # take a spare rank of the branch, else of the branch around it
    BACKFILL = auto()  # move an active rank of the branch into a gap


@dataclass(frozen=True)
class Layer:
    """Bounds for every branch of one layer; the key names the branch that a rank belongs to.

    A branch with fewer than `min_ranks` (>= 0) healthy ranks is terminated. It never has more than `max_ranks` (>= 1;
    None: no limit) active ranks. `key_or_fn`: a str, or a function of the State. Raises TypeError or ValueError.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: str | Callable[[State], Any] = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        check_key("key_or_fn of a Layer", self.key_or_fn)
        check_whole("min_ranks of a Layer", self.min_ranks, 0)
        if self.max_ranks is not None:
            check_whole("max_ranks of a Layer", self.max_ranks, 1)
            if self.min_ranks > self.max_ranks:
                raise ValueError(
                    f"a Layer's min_ranks={self.min_ranks} is more than its max_ranks={self.max_ranks}"
                )

    def level(self) -> Level:
        """The bounds and flags, without the key."""
        flag = self.flag or LayerFlag(0)
        return Level(
            self.min_ranks, self.max_ranks, LayerFlag.RESERVE in flag, LayerFlag.BACKFILL in flag
        )


class Tree(RankAssignment):
    """Activate and number ranks along a tree of failure domains; `layers` go from the whole job to the smallest domain.

    The key of the first layer must be the same for all ranks. Keys are evaluated once, in the first iteration. `rank`
    is the position among all healthy ranks in depth-first order. `world_size_filter(n)` returns how many of `n` ranks
    may be active; every rank calls it and has to get the same answer. The other ranks become spares.

    Cannot be composed (the wrapper refuses it). All ranks raise InternalError with the same text if a key function
    raises, if the keys make no tree, or for an impossible answer of the filter. A rank raises RankDiscarded when it is
    terminated or its branch has too few ranks left.
    """

    composable = False

    def __init__(
        self,
        layers: Sequence[Layer],
        world_size_filter: Callable[[int], int] | None = None,
    ) -> None:
        self.layers = list(layers)
        if not self.layers or not all(isinstance(layer, Layer) for layer in self.layers):
            raise TypeError(f"Tree needs a list of at least one Layer, not {layers!r}")
        self.world_size_filter = world_size_filter
        self._topology: Topology | None = None
        self._leaf = 0  # the leaf of this rank
        self._places: Places = []

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """The rank's own place. A state with mode INITIALIZED begins a new world."""
        refuse_terminated(ctx)
        try:
            first = ctx.state.mode is Mode.INITIALIZED
            self._places = places = (
                self._first_places(ctx) if first else self._next_places(ctx.terminated_ranks)
            )
        except TopologyError as error:
            raise InternalError(f"Tree: {error}") from error
        left = healthy(places)
        place = places[self._leaf]
        if place < DEAD:
            level = killed_by(place)
            raise RankDiscarded(
                f"a branch of layer {level} has fewer than min_ranks={self.layers[level].min_ranks} healthy ranks "
                f"left: rank {ctx.state.rank} is one of them and leaves"
            )
        active = place >= 0
        state = replace(
            ctx.state,
            rank=left.index(self._leaf),
            world_size=len(left),
            active_rank=place if active else None,
            active_world_size=sum(map((0).__le__, places)),
            mode=Mode.ACTIVE if active else Mode.INACTIVE,
        )
        return replace(ctx, state=state, terminated_ranks=set())

    def _first_places(self, ctx: RankAssignmentCtx) -> Places:
        leadership = Leadership(ctx, "Tree", 0, _TIMEOUT)
        leadership.give(
            lambda: json.dumps([key_of(layer.key_or_fn, ctx.state) for layer in self.layers])
        )
        keys = _unpacked(leadership.decide(lambda: _packed(leadership.healthy, leadership.given())))
        depths = {len(path) for path in keys.values()}
        if depths != {len(self.layers)}:
            raise TopologyError(
                f"ranks have trees of {sorted(depths)} layers; give all ranks the same layers"
            )
        self._topology = Topology([layer.level() for layer in self.layers], keys)
        self._leaf = self._topology.slots.index(ctx.state.rank)
        return self._topology.first_places(self.world_size_filter)

    def _next_places(self, terminated: Collection[int]) -> Places:
        assert self._topology is not None
        alive = healthy(self._places)
        died = [alive[rank] for rank in terminated]
        return self._topology.next_places(self._places, died, self.world_size_filter)


def _packed(healthy_ranks: Sequence[int], given: Sequence[bytes]) -> str:
    """The keys of all ranks, for all ranks: few bytes, since 10,000 of them read it at once."""
    by_path: dict[str, list[int]] = {}
    for rank, one in zip(healthy_ranks, given, strict=True):
        by_path.setdefault(text_of(one), []).append(rank)
    text = json.dumps({path: renumbering.to_runs(members) for path, members in by_path.items()})
    return base64.b85encode(zlib.compress(text.encode())).decode()


def _unpacked(text: str) -> dict[int, list[str]]:
    """The keys by rank."""
    by_path = json.loads(zlib.decompress(base64.b85decode(text)))
    keys: dict[int, list[str]] = {}
    for path, runs in by_path.items():
        keys.update(dict.fromkeys(renumbering.from_runs(runs), json.loads(path)))
    return keys
