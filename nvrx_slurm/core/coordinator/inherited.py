"""What agents of an older term run, as a new coordinator hears of it."""

from __future__ import annotations

from collections.abc import Collection

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator.assignment import Assignment, Slot
from nvrx_slurm.declared import replace


class Inherited:
    """The last cycle of which any agent has a plan, and the agents with a group rank in it. O(1) per message."""

    def __init__(self) -> None:
        self.last_cycle = -1
        self.plan: t.Plan | None = None  # of that cycle, from an agent that was active in it
        self.places: dict[int, str] = {}  # group rank -> node_id, of that cycle only
        self.running = Assignment()  # of the agents that still run it, or are done with it

    def learn(self, plan: t.Plan) -> list[str]:
        """Note a plan that an agent has seen; returns the runners of a cycle that turns out not to be the last one."""
        if plan.cycle <= self.last_cycle:
            return []
        self.last_cycle = plan.cycle
        overtaken = sorted(self.running.places.values())
        self.forget()
        return overtaken

    def place(self, message: t.Register) -> t.Plan | None:
        """Note an agent's group rank in the last cycle; its plan, or None if it has none or another agent has it."""
        plan = message.plan
        mine = message.node.node_id
        if plan is None or not plan.active or plan.cycle != self.last_cycle:
            return None
        holder = self.places.setdefault(plan.group_rank, mine)
        return plan if holder == mine else None

    def claim(self, message: t.Register) -> bool:
        """The same for an agent that may run on; whether it has that group rank."""
        plan = self.place(message)
        node = message.node
        if plan is None:
            return False
        self.plan = plan
        if message.doing not in (t.Activity.RUNNING, t.Activity.SUCCEEDED):
            return True
        slot = Slot(node.node_id, plan.rank_offset, node.nproc)
        self.running.add(plan.group_rank, slot)
        if message.doing is t.Activity.SUCCEEDED:
            self.finished(node.node_id, message.early)
        elif message.faults:
            self.running.failed(plan.group_rank)
        return True

    def failed(self, node_id: str) -> None:
        """This agent has a fault in the last cycle."""
        self.running.failed(self.running.group_ranks[node_id])

    def without(self, node_id: str) -> None:
        """This agent does not run the last cycle, or not any more."""
        self.running.remove(node_id)

    def finished(self, node_id: str, early: bool) -> None:
        """This agent is done with the last cycle."""
        group_rank = self.running.group_ranks.get(node_id)
        if group_rank is not None:
            self.running.done(group_rank, early)

    def complete(self, sizes: Collection[int]) -> bool:
        """Whether all of the last cycle is here and goes on, and it is of a size that we would plan."""
        return (
            self.plan is not None
            and len(self.running) == self.plan.active_nodes
            and len(self.running) in sizes
        )

    def assignment(self, term: int, history: t.History) -> Assignment:
        """That cycle, carried on in `term`. A node that is not here has no slot in it, but keeps its place."""
        assert self.plan is not None
        plan = replace(self.plan, term=term, history=history, group_rank=-1, rank_offset=-1)
        return self.running.carried_on(plan, self.places)

    def forget(self) -> None:
        """That cycle is over, or carried on."""
        self.plan = None
        self.places = {}
        self.running = Assignment()
