"""Tree: rank assignment by failure domains (hosts, racks, the whole job), with spares close to the loss.

The leader of an iteration computes the places of all ranks (`core.inprocess.tree`) and writes one record per rank, 16
neighbours in one value. Its input is in the store: the keys of all ranks, from the first iteration, and the records of
the last one. A leader keeps both in memory; only a new leader reads them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import Flag, auto
from itertools import accumulate
from typing import Any

from nvrx_slurm.core.inprocess.tree import DEAD, Level, Places, Topology, TopologyError, healthy, killed_by
from nvrx_slurm.inprocess.checks import check_time, check_whole
from nvrx_slurm.inprocess.exception import InternalError, RankDiscarded
from nvrx_slurm.inprocess.plugins.rank_assignment import (
    RankAssignment,
    RankAssignmentCtx,
    check_key,
    key_of,
    leadership_of,
    refuse_terminated,
)
from nvrx_slurm.inprocess.state import Mode, State
from nvrx_slurm.inprocess.store.leader import Leadership, text_of

_NEIGHBOURS = 16  # slots with their records in one value: few requests for the leader, few bytes for each rank
_RECORD = struct.Struct("<ii")  # place, rank
_KEPT = 8  # assignments whose records stay in the store: more than are ever undone in a row
_NAME = "Tree"


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
                raise ValueError(f"a Layer's min_ranks={self.min_ranks} is more than its max_ranks={self.max_ranks}")

    def level(self) -> Level:
        """The bounds and flags, without the key."""
        flag = self.flag or LayerFlag(0)
        return Level(self.min_ranks, self.max_ranks, LayerFlag.RESERVE in flag, LayerFlag.BACKFILL in flag)


class Tree(RankAssignment):
    """Activate and number ranks along a tree of failure domains; `layers` go from the whole job to the smallest domain.

    The key of the first layer must be the same for all ranks. Keys are evaluated once, in the first iteration. `rank`
    is the position among all healthy ranks in depth-first order. `world_size_filter(n)` returns how many of `n` ranks
    may be active; one rank calls it. The other ranks become spares. Waits for other ranks last at most twice `timeout`.

    Cannot be composed. All ranks raise InternalError with the same text if a key function or the filter raises, or if
    the keys make no tree. A rank raises RankDiscarded when it is terminated or its branch has too few ranks left.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        world_size_filter: Callable[[int], int] | None = None,
        timeout: timedelta = timedelta(seconds=60),
    ) -> None:
        self.layers = list(layers)
        if not self.layers or not all(isinstance(layer, Layer) for layer in self.layers):
            raise TypeError(f"Tree needs a list of at least one Layer, not {layers!r}")
        check_time("timeout of a Tree", timeout)
        self.world_size_filter = world_size_filter
        self.timeout = timeout
        self._world: _World | None = None

    def check_composition(self, members: list[Any]) -> None:
        """Raises TypeError unless it is alone."""
        if len(members) > 1:
            raise TypeError("Tree assigns and activates ranks by itself; it cannot be composed with anything else")

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """The rank's own place.

        A state with mode INITIALIZED begins a new world. A state from before the last assignment undoes that one: the
        same numbers as then, with more terminated ranks, in a later iteration.
        """
        refuse_terminated(ctx)
        world, leadership = self._join(ctx)
        try:
            state = world.assign(leadership, ctx.state)
        finally:
            if not world.history:
                self._world = None  # its first assignment failed
        return replace(ctx, state=state, terminated_ranks=set())

    def give_keys(self, ctx: RankAssignmentCtx) -> None:
        """Hand in this rank's keys before the first call; does not wait for other ranks. Optional."""
        world, leadership = self._join(ctx)
        world.give_keys(leadership, ctx.state)

    def _join(self, ctx: RankAssignmentCtx) -> tuple[_World, Leadership]:
        leadership = leadership_of(ctx, _NAME, 0, self.timeout)
        world = self._world
        begun = world is not None and (world.iteration != ctx.state.iteration or bool(world.history))
        if world is None or (begun and ctx.state.mode is Mode.INITIALIZED):
            world = self._world = _World(self, leadership)
        return world, leadership

    def keys_of(self, state: State) -> str:
        """The rank's keys, outermost first, as JSON."""
        return json.dumps([key_of(layer.key_or_fn, state) for layer in self.layers])


class _World:
    """One rank's knowledge of the tree, from the first iteration on."""

    def __init__(self, tree: Tree, first: Leadership) -> None:
        self.tree = tree
        self.slot, self.slots, self.gone = first.rank, first.world_size, frozenset(first.terminated)
        self.iteration = first.iteration
        self.given = False
        # The last assignments, newest last: prefix of its records in the stable store, and its world size.
        self.history: list[tuple[str, int]] = []
        # On a leader only: the tree, and the last places with the prefix of their records.
        self.topology: Topology | None = None
        self.places: tuple[str, Places] = ("", [])

    def give_keys(self, leadership: Leadership, state: State) -> None:
        """Hand in this rank's keys, once."""
        if not self.given:
            self.given = True
            leadership.give(lambda: self.tree.keys_of(state))

    def assign(self, leadership: Leadership, state: State) -> State:
        """The next state of this rank. The leader computes the records of all ranks first."""
        if not self.history:
            self.give_keys(leadership, state)
        # Undo assignments to another world size. With no deaths in between both number the ranks alike.
        while self.history and self.history[-1][1] != leadership.world_size:
            self.history.pop()
            if not self.history:
                raise InternalError(f"Tree knows of no assignment to {leadership.world_size} ranks")
        base = self.history[-1][0] if self.history else ""
        # Slow ranks may still read older records, so each rank and iteration writes to a prefix of its own.
        mine = f"{_NAME}/records/{leadership.iteration % _KEPT}/{self.slot}"
        records, *sizes = leadership.decide(lambda: self._compute(leadership, base, mine)).rsplit(" ", 2)
        world_size, active_world_size = map(int, sizes)
        self.history = [*self.history[2 - _KEPT :], (records, world_size)]
        block, index = divmod(self.slot, _NEIGHBOURS)
        values = bytes(leadership.stable.get(f"{records}/{block}"))
        place, rank = _RECORD.unpack_from(values, index * _RECORD.size)
        if place < DEAD:
            level = killed_by(place)
            raise RankDiscarded(
                f"a branch of layer {level} has fewer than min_ranks={self.tree.layers[level].min_ranks} healthy ranks "
                f"left: rank {state.rank} is one of them and leaves"
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

    # --- on the leader -----------------------------------------------------------------------------------------------

    def _compute(self, leadership: Leadership, base: str, mine: str) -> str:
        """Write the records of all ranks; returns their prefix, the world size and the active world size."""
        try:
            topology = self.topology or self._build(leadership)
            if not base:
                places = topology.first_places(self.tree.world_size_filter)
            else:
                known, last = self.places
                last = last if known == base else self._last_places(topology, leadership, base)
                ranks = healthy(last)
                died = [ranks[rank] for rank in leadership.terminated]
                places = topology.next_places(last, died, self.tree.world_size_filter)
        except TopologyError as error:
            raise InternalError(str(error)) from error
        records = self._records(topology, places, mine)
        leadership.stable.multi_set(list(records), list(records.values()))
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
        values = b"".join(leadership.stable.multi_get([f"{base}/{block}" for block in blocks]))
        by_slot = [place for place, _ in _RECORD.iter_unpack(values)]
        return [by_slot[slot] for slot in topology.slots]
