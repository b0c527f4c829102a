"""Which node has which group rank in a cycle, and what has become of it there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator.members import Member
from nvrx_slurm.declared import Record, replace


class Slot(Record):
    """One group rank: its node and its global ranks `first_rank` .. `first_rank + nproc - 1`."""

    node_id: str
    first_rank: int
    nproc: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its global ranks."""
        return tuple(range(self.first_rank, self.first_rank + self.nproc))


class Assignment:
    """`slots` by group rank; `shared` is the plan as a spare gets it (None: nothing was planned yet)."""

    def __init__(
        self,
        shared: t.Plan | None = None,
        slots: Mapping[int, Slot] | None = None,
        memory: Mapping[str, t.MemoryPlan] | None = None,
    ) -> None:
        self.shared = shared
        self.memory = memory or {}  # where checkpoints in memory go and come from, by node_id
        self.slots = dict(slots or {})
        # kept by the next plan where possible
        self.places = {g: slot.node_id for g, slot in self.slots.items()}
        self.group_ranks = {slot.node_id: g for g, slot in self.slots.items()}
        self.succeeded: set[int] = set()  # group ranks whose workers all ended with 0
        self.early = False  # some of them because they were warned
        self.broken: set[int] = set()  # group ranks with a fault (min-healthy goes on without them)
        # those of them that are out for good: their ranks were declared dead
        self.gone: set[int] = set()

    @classmethod
    def plan(
        cls,
        active: Sequence[tuple[t.Node, int]],
        term: int,
        cycle: int,
        history: t.History,
        max_restarts: int,
        forked: bool,
        memory: Mapping[str, t.MemoryPlan] | None = None,
    ) -> Assignment:
        """The plan of a new cycle: `active` nodes (at least one) in the order of their group ranks, with the ports that
        they offer."""
        slots: dict[int, Slot] = {}
        world_size = 0
        for group_rank, (node, _) in enumerate(active):
            slots[group_rank] = Slot(node.node_id, world_size, node.nproc)
            world_size += node.nproc
        first, port = active[0]
        addr = first.addr or first.host
        nodes = len(active)
        plan = t.Plan(
            term, cycle, history, max_restarts, nodes, world_size, addr, port, forked=forked
        )
        return cls(plan, slots, memory)

    def amend(self, **changes: Any) -> None:
        """The plan says this, too."""
        assert self.shared is not None
        self.shared = replace(self.shared, **changes)

    def carried_on(self, plan: t.Plan, places: dict[int, str]) -> Assignment:
        """The same under a plan of a new term; a node without a slot keeps its place."""
        self.shared = plan
        self.places = places
        return self

    def add(self, group_rank: int, slot: Slot) -> None:
        """Give a node a slot; it loses the one that it had."""
        self.remove(slot.node_id)
        self.slots[group_rank], self.places[group_rank] = slot, slot.node_id
        self.group_ranks[slot.node_id] = group_rank

    def remove(self, node_id: str) -> None:
        """Take the slot of a node, if it has one."""
        group_rank = self.group_ranks.pop(node_id, None)
        if group_rank is not None:
            del self.slots[group_rank], self.places[group_rank]
            self.succeeded.discard(group_rank)
            self.broken.discard(group_rank)

    def failed(self, group_rank: int, gone: bool = False) -> None:
        """This group rank has a fault; `gone`: its ranks are declared dead."""
        self.broken.add(group_rank)
        if gone:
            self.gone.add(group_rank)
            self.succeeded.discard(group_rank)

    def done(self, group_rank: int, early: bool) -> None:
        """All workers of this group rank have ended with 0; `early`: some because they were warned."""
        self.succeeded.add(group_rank)
        self.early = self.early or early

    def node_of(self, rank: int) -> str:
        """The node_id that has a global rank; "" = none."""
        return next((slot.node_id for slot in self.slots.values() if rank in slot.ranks), "")

    def ends(self, members: Mapping[str, Member]) -> tuple[tuple[int, t.Node], ...]:
        """The first and the last global rank, each with its node, as far as these are members."""
        slots = sorted(self.slots.values(), key=lambda slot: slot.first_rank)[
            :: max(1, len(self.slots) - 1)
        ]
        ranks = {
            rank: slot.node_id
            for slot in slots
            for rank in (slot.first_rank, slot.first_rank + slot.nproc - 1)
        }
        here = [
            (rank, members[node_id].node)
            for rank, node_id in sorted(ranks.items())
            if node_id in members
        ]
        return tuple(here[:: max(1, len(here) - 1)])

    def __len__(self) -> int:
        """Active nodes."""
        return len(self.slots)

    @property
    def planned(self) -> int:
        """Active nodes that the plan speaks of; more than `len` where a new term has not seen all of them."""
        return self.shared.active_nodes if self.shared is not None else 0

    @property
    def healthy(self) -> int:
        """Active nodes that run without a fault."""
        return len(self.slots.keys() - self.broken - self.succeeded)

    @property
    def good(self) -> int:
        """Active nodes that run without a fault or are done."""
        return len(self.slots) - len(self.broken)

    def plan_for(self, node_id: str) -> t.Plan:
        """The plan from the point of view of one member."""
        assert self.shared is not None
        group_rank = self.group_ranks.get(node_id)
        if group_rank is None:
            return self.shared
        return replace(
            self.shared,
            group_rank=group_rank,
            rank_offset=self.slots[group_rank].first_rank,
            memory=self.memory.get(node_id),
        )
