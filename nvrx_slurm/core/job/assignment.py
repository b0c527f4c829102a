"""The assignment of one cycle: group rank and ranks of each node, and which are done or broken. O(1) per message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nvrx_slurm.core.job.members import Member
from nvrx_slurm.types import History, Plan


@dataclass(frozen=True, slots=True)
class Slot:
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

    def __init__(self, shared: Plan | None = None, slots: Mapping[int, Slot] | None = None) -> None:
        self.shared = shared
        self.slots = dict(slots or {})
        self.places = {g: slot.node_id for g, slot in self.slots.items()}  # kept by the next plan where possible
        self._group_rank = {slot.node_id: g for g, slot in self.slots.items()}
        self.succeeded: set[int] = set()  # group ranks whose workers all ended with 0
        self.early = False  # some of them because they were warned
        self.broken: set[int] = set()  # group ranks with a fault (min-healthy goes on without them)
        self.gone: set[int] = set()  # those of them that are out for good: their ranks were declared dead

    @classmethod
    def plan(cls, active: Sequence[Member], term: int, cycle: int, history: History, max_restarts: int) -> Assignment:
        """The plan of a new cycle: `active` (at least one) in the order of their group ranks."""
        slots: dict[int, Slot] = {}
        world_size = 0
        for group_rank, member in enumerate(active):
            slots[group_rank] = Slot(member.node.node_id, world_size, member.node.nproc)
            world_size += member.node.nproc
        first = active[0]
        addr = first.node.addr or first.node.host
        return cls(Plan(term, cycle, history, max_restarts, len(active), world_size, addr, first.port), slots)

    def add(self, group_rank: int, slot: Slot) -> None:
        """Give a node a slot; it loses the one that it had."""
        self.remove(slot.node_id)
        self.slots[group_rank], self.places[group_rank] = slot, slot.node_id
        self._group_rank[slot.node_id] = group_rank

    def remove(self, node_id: str) -> None:
        """Take the slot of a node, if it has one."""
        group_rank = self._group_rank.pop(node_id, None)
        if group_rank is not None:
            del self.slots[group_rank], self.places[group_rank]
            self.succeeded.discard(group_rank)
            self.broken.discard(group_rank)

    def group_rank(self, node_id: str) -> int | None:
        """The group rank of a node, or None."""
        return self._group_rank.get(node_id)

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

    def plan_for(self, node_id: str) -> Plan:
        """The plan from the point of view of one member."""
        assert self.shared is not None
        group_rank = self._group_rank.get(node_id)
        if group_rank is None:
            return self.shared
        return replace(self.shared, group_rank=group_rank, rank_offset=self.slots[group_rank].first_rank)
