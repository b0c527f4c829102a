"""Tree: rank assignment by failure domains, with spares near to where they are needed.

The leader of an iteration computes all ranks' places (`core.inprocess.tree`) and writes one small record per rank, those of 16
neighbours as one value. What it needs is in the store: all keys, from the first iteration, and the records of the last
one. A leader keeps both in memory, so only a new leader reads them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Flag, auto
from itertools import accumulate
from typing import Any

from nvrx_slurm.core.inprocess.tree import DEAD, Level, Places, Topology, TopologyError, healthy, killed_by
from nvrx_slurm.inprocess.checks import check_time, check_whole
from nvrx_slurm.inprocess.exception import InternalError, RankDiscarded
from nvrx_slurm.inprocess.meeting.leader import Leadership, read_many, text_of, write_many
from nvrx_slurm.inprocess.plugins.rank_base import (
    RankAssignment,
    RankAssignmentCtx,
    check_key,
    key_of,
    refuse_terminated,
)
from nvrx_slurm.inprocess.state import Mode, State

_NEIGHBOURS = 16  # slots whose records are one value: fewer requests for the leader, still few bytes for each rank
_RECORD = struct.Struct("<ii")  # place, rank
_KEPT = 8  # assignments whose records are in the store: as often one may be taken back in a row, and then some
_NAME = "Tree"


class LayerFlag(Flag):
    """What a search may do at the branches of a layer."""

    RESERVE = auto()  # look for a spare rank in the branch, and go on to the branch around it
    BACKFILL = auto()  # move an active rank within the branch into a gap


@dataclass(frozen=True)
class Layer:
    """Bounds of every branch of one layer; the key says which branch a rank belongs to.

    A branch with fewer than `min_ranks` (>= 0) healthy ranks is terminated; it never has more than `max_ranks` (>= 1,
    None: no limit) active ones. Raises TypeError or ValueError for other values.
    """

    min_ranks: int = 1
    max_ranks: int | None = None
    key_or_fn: str | Callable[[State], Any] = ""
    flag: LayerFlag | None = None

    def __post_init__(self) -> None:
        check_whole("min_ranks of a Layer", self.min_ranks, 0)
        if self.max_ranks is not None:
            check_whole("max_ranks of a Layer", self.max_ranks, 1)
        if self.max_ranks is not None and self.min_ranks > self.max_ranks:
            raise ValueError(f"a Layer's min_ranks={self.min_ranks} is more than its max_ranks={self.max_ranks}")
        check_key("key_or_fn of a Layer", self.key_or_fn)
        if self.flag is not None and not isinstance(self.flag, LayerFlag):
            raise TypeError(f"flag of a Layer must be a LayerFlag, not {self.flag!r}")

    def level(self) -> Level:
        """The numbers without the key."""
        flag = self.flag or LayerFlag(0)
        return Level(self.min_ranks, self.max_ranks, LayerFlag.RESERVE in flag, LayerFlag.BACKFILL in flag)


class Tree(RankAssignment):
    """Activates and numbers ranks along a tree of failure domains; `layers` go from the whole job to the smallest.

    The first layer's key must be the same for all ranks. Keys are evaluated once, in the first iteration; `rank` is the
    position among all healthy ranks in depth-first order. `world_size_filter` takes the number of ranks that could be
    active and returns how many shall be; it is called on one rank. Ranks beyond that are spares, and come back when it
    allows. Waits for other ranks last at most twice `timeout`.

    Not composable. All ranks raise InternalError with the same sentence if a key function or the filter raises, or if
    the keys make no tree; a rank raises RankDiscarded when it is terminated or its branch has too few ranks left.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        world_size_filter: Callable[[int], int] | None = None,
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self.layers = list(layers) if isinstance(layers, Iterable) else []
        if not self.layers or not all(isinstance(layer, Layer) for layer in self.layers):
            raise TypeError(f"Tree needs a list of at least one Layer, not {layers!r}")
        if world_size_filter is not None and not callable(world_size_filter):
            raise TypeError(f"world_size_filter must be a function of a number of ranks, not {world_size_filter!r}")
        check_time("timeout of a Tree", timeout)
        self.world_size_filter = world_size_filter
        self.timeout = timeout
        self._world: _World | None = None

    def check_composition(self, members: list[Any]) -> None:
        """Always alone."""
        if len(members) > 1:
            raise TypeError("Tree assigns and activates ranks by itself; it cannot be composed with anything else")

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """The rank's own place.

        A state whose mode is INITIALIZED begins a new world. A state from before the last assignment takes that back:
        the same numbers as then, with more terminated ranks, in a later iteration.
        """
        refuse_terminated(ctx)
        world, leadership = self._join(ctx)
        try:
            state = world.assign(leadership, ctx.state)
        finally:
            if not world.history:
                self._world = None  # it never began
        return replace(ctx, state=state, terminated_ranks=set())

    def give_keys(self, ctx: RankAssignmentCtx) -> None:
        """Before the first call, if one likes: what it does first, without a wait for anybody."""
        world, leadership = self._join(ctx)
        world.give_keys(leadership, ctx.state)

    def _join(self, ctx: RankAssignmentCtx) -> tuple[_World, Leadership]:
        state = ctx.state
        leadership = Leadership(
            store=ctx.store,
            name=_NAME,
            place=0,
            iteration=state.iteration,
            rank=state.rank,
            world_size=state.world_size,
            terminated=ctx.terminated_ranks,
            timeout=self.timeout,
        )
        world = self._world
        begun = world is not None and (world.iteration != state.iteration or bool(world.history))
        if world is None or (begun and state.mode is Mode.INITIALIZED):
            world = self._world = _World(self, leadership)
        return world, leadership

    def keys_of(self, state: State) -> str:
        """The rank's keys, outermost first, as text."""
        return json.dumps([key_of(layer.key_or_fn, state) for layer in self.layers])


class _World:
    """What one rank knows of the tree from the first iteration on."""

    def __init__(self, tree: Tree, first: Leadership) -> None:
        self.tree = tree
        self.slot, self.slots, self.gone = first.rank, first.world_size, frozenset(first.terminated)
        self.iteration = first.iteration
        self.given = False
        # Assignments, the last one last: where the records are (a prefix of keys in the stable store), its world size.
        self.history: list[tuple[str, int]] = []
        # Of a leader, which need not read them; the places with where their records are.
        self.topology: Topology | None = None
        self.places: tuple[str, Places] = ("", [])

    def give_keys(self, leadership: Leadership, state: State) -> None:
        """In the first iteration, once: this rank's keys, for the leader."""
        if not self.given:
            self.given = True
            leadership.give(lambda: self.tree.keys_of(state))

    def assign(self, leadership: Leadership, state: State) -> State:
        """The next state; on the leader, after all others' have been computed."""
        if not self.history:
            self.give_keys(leadership, state)
        base = self._base(leadership.world_size) if self.history else ""
        # What is being written, by whomever, is nothing that anybody may still read.
        mine = f"{_NAME}/records/{leadership.iteration % _KEPT}/{self.slot}"
        verdict = leadership.decide(lambda: self._compute(leadership, base, mine))
        records, world_size, active_world_size = _parse(verdict)
        self.history = [*self.history[2 - _KEPT :], (records, world_size)]
        block, index = divmod(self.slot, _NEIGHBOURS)
        values = bytes(leadership.stable.get(f"{records}/{block}"))
        place, rank = _RECORD.unpack_from(values, index * _RECORD.size)
        return self._read(state, place, rank, world_size, active_world_size)

    def _base(self, world_size: int) -> str:
        """The last assignment that is not taken back. With no deaths in between both number the ranks alike."""
        while self.history and self.history[-1][1] != world_size:
            self.history.pop()
        if not self.history:
            raise InternalError(f"Tree knows of no assignment to {world_size} ranks")
        return self.history[-1][0]

    def _read(self, state: State, place: int, rank: int, world_size: int, active_world_size: int) -> State:
        if place <= DEAD:
            level = killed_by(place)
            if level is None:
                raise InternalError(f"rank {state.rank} is healthy, but rank assignment takes it for dead")
            layer = self.tree.layers[level]
            raise RankDiscarded(
                f"a branch of layer {level} has fewer than min_ranks={layer.min_ranks} healthy ranks left: "
                f"rank {state.rank} is one of them and leaves"
            )
        active = place >= 0
        return replace(
            state,
            rank=rank,
            world_size=world_size,
            active_rank=place if active else None,
            active_world_size=active_world_size,
            mode=Mode.ACTIVE if active else Mode.INACTIVE,
        )

    # --- the leader's work -------------------------------------------------------------------------------------------

    def _compute(self, leadership: Leadership, base: str, mine: str) -> str:
        """Writes the records of all ranks and returns where, and what is the same for all."""
        try:
            topology = self.topology or self._build(leadership)
            if not base:
                places = topology.first_places(self.tree.world_size_filter)
            else:
                known, last = self.places
                last = last if known == base else self._last_places(topology, leadership, base)
                places = self._next(topology, last, leadership)
        except TopologyError as error:
            raise InternalError(str(error)) from error
        write_many(leadership.stable, self._records(topology, places, mine))
        self.topology, self.places = topology, (mine, places)
        return f"{mine} {len(healthy(places))} {sum(place >= 0 for place in places)}"

    def _build(self, leadership: Leadership) -> Topology:
        first = replace(leadership, world_size=self.slots, terminated=self.gone)  # as the keys were given
        slots, given = first.given(wait=not self.history)
        parsed: dict[bytes, list[str]] = {one: json.loads(text_of(one)) for one in set(given)}
        depths = {len(keys) for keys in parsed.values()}
        if depths != {len(self.tree.layers)}:
            raise TopologyError(f"ranks have trees of {sorted(depths)} layers; give all ranks the same layers")
        keys = dict(zip(slots, map(parsed.__getitem__, given), strict=True))
        return Topology([layer.level() for layer in self.tree.layers], keys)

    def _records(self, topology: Topology, places: Places, where: str) -> dict[str, bytes]:
        ranks = accumulate(map(DEAD.__lt__, places), initial=0)
        numbers = [DEAD, 0] * self.slots
        for slot, place, rank in zip(topology.slots, places, ranks, strict=False):
            numbers[2 * slot], numbers[2 * slot + 1] = place, rank
        data = struct.pack(f"<{len(numbers)}i", *numbers)
        size = _NEIGHBOURS * _RECORD.size
        return {f"{where}/{block}": data[start : start + size] for block, start in enumerate(range(0, len(data), size))}

    def _last_places(self, topology: Topology, leadership: Leadership, base: str) -> Places:
        blocks = range(-(-self.slots // _NEIGHBOURS))
        values = b"".join(read_many(leadership.stable, [f"{base}/{block}" for block in blocks]))
        by_slot = [place for place, _ in _RECORD.iter_unpack(values)]
        return [by_slot[slot] for slot in topology.slots]

    def _next(self, topology: Topology, last: Places, leadership: Leadership) -> Places:
        ranks = healthy(last)
        if len(ranks) != leadership.world_size:
            raise InternalError(f"the tree has {len(ranks)} healthy ranks, the wrapper {leadership.world_size}")
        died = [ranks[rank] for rank in leadership.terminated]
        return topology.next_places(last, died, self.tree.world_size_filter)


def _parse(verdict: str) -> tuple[str, int, int]:
    records, world_size, active_world_size = verdict.rsplit(" ", 2)
    return records, int(world_size), int(active_world_size)
