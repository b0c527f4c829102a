"""What a coordinator learns of earlier terms from the agents that register; it has no other memory of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from nvrx_slurm.core.job.assignment import Assignment, Slot
from nvrx_slurm.core.job.members import PREPARING, READY
from nvrx_slurm.types import Doing, History, Plan, Register


class Inherited:
    """The last cycle that anybody has seen a plan of, and who has a place in it. O(1) per message."""

    def __init__(self) -> None:
        self.last_cycle = -1
        self.plan: Plan | None = None  # of that cycle, from somebody who was active in it
        self.places: dict[int, str] = {}  # group rank -> node_id, of that cycle only
        self.running: set[str] = set()  # those of them who still run it, or are done with it
        self._slots: dict[str, tuple[int, Slot]] = {}  # group rank and slot of everybody in `running`
        self._succeeded: set[str] = set()
        self._early = False
        self._broken: set[str] = set()  # runs on with a fault (min-healthy)

    def learn(self, plan: Plan) -> list[str]:
        """Note a plan that an agent has seen; returns the runners of a cycle that turns out not to be the last one."""
        if plan.cycle <= self.last_cycle:
            return []
        self.last_cycle = plan.cycle
        overtaken = sorted(self.running)
        self.forget()
        return overtaken

    def claim(self, message: Register) -> bool:
        """Take down whose place an agent has in the last cycle; False if it is of another cycle, or somebody else's."""
        plan, node_id = message.plan, message.node.node_id
        if plan is None or not plan.active or plan.cycle != self.last_cycle:
            return False
        if self.places.setdefault(plan.group_rank, node_id) != node_id:
            return False
        self.plan = plan
        if message.doing not in (Doing.RUNNING, Doing.SUCCEEDED):
            return True
        self.running.add(node_id)
        self._slots[node_id] = plan.group_rank, Slot(node_id, plan.rank_offset, message.node.nproc)
        if message.doing is Doing.SUCCEEDED:
            self.finished(node_id, message.early)
        elif message.faults:
            self.failed(node_id)
        return True

    def finished(self, node_id: str, early: bool) -> None:
        """This agent is done with the last cycle."""
        if node_id in self.running:
            self._succeeded.add(node_id)
            self._early = self._early or early

    def failed(self, node_id: str) -> None:
        """This agent runs on with a fault."""
        if node_id in self.running:
            self._broken.add(node_id)

    def stopped(self, node_id: str) -> None:
        """This agent does not run the last cycle (any more), but keeps its place for the next one."""
        self.running.discard(node_id)
        self._succeeded.discard(node_id)
        self._broken.discard(node_id)

    def complete(self, sizes: Collection[int]) -> bool:
        """Whether all of the last cycle is here and goes on, and it is of a size that we would plan."""
        return self.plan is not None and len(self.running) == self.plan.active_nodes and len(self.running) in sizes

    @property
    def good(self) -> int:
        """Nodes of the last cycle that are here and run without a fault or are done."""
        return len(self.running - self._broken)

    def assignment(self, term: int, history: History) -> Assignment:
        """That cycle, carried on in `term`. Who is not here has no slot in it."""
        assert self.plan is not None
        shared = replace(self.plan, term=term, history=history, group_rank=-1, rank_offset=-1)
        assignment = Assignment(shared, dict(self._slots[node_id] for node_id in self.running))
        assignment.places = dict(self.places)  # also of those who run nothing any more
        group_ranks = {node_id: self._slots[node_id][0] for node_id in self.running}
        assignment.succeeded = {group_ranks[node_id] for node_id in self._succeeded}
        assignment.broken = {group_ranks[node_id] for node_id in self._broken}
        assignment.early = self._early
        return assignment

    def forget(self) -> None:
        """That cycle is over, or carried on."""
        self.plan, self.places, self._early = None, {}, False
        self.running, self._succeeded, self._broken = set(), set(), set()
        self._slots = {}


def is_busy(message: Register) -> bool:
    """Whether the agent that registers has workers, or had them until they were all done."""
    idle = message.doing in (Doing.IDLE, Doing.PREPARING)
    return message.plan is not None and message.plan.active and not idle


def busy_cycle(message: Register) -> int:
    """The cycle of which it may still run workers, PREPARING or READY."""
    if message.doing is Doing.PREPARING:
        return PREPARING
    return message.plan.cycle if is_busy(message) and message.plan is not None else READY
