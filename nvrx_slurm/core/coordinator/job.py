"""Where the job is: its last plan, and what is known of earlier ones. Only the methods here write these fields."""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator.assignment import Assignment, Slot
from nvrx_slurm.core.coordinator.inherited import Inherited


class JobState:
    """The term, the last cycle and its plan. Times are monotonic seconds."""

    def __init__(self, term: int, now: float) -> None:
        self.term = term
        self.started_at = now  # when its cycle began
        self.inherited = Inherited()  # what agents tell of earlier terms
        self.assignment = Assignment()  # of the last plan
        self.before: Assignment | None = (
            None  # of the cycle before, where this coordinator planned it
        )
        self.cycle = -1  # the last one that was planned, in any term; -1 = none
        self.fresh = True  # nothing has been planned, carried on or given up in this term

    def raised(self, term: int) -> None:
        """This node stands for a later term."""
        self.term = term

    def learn(self, plan: t.Plan) -> list[str]:
        """Note a plan of an earlier term; returns the runners of a cycle that turns out not to be the last one."""
        overtaken = self.inherited.learn(plan)
        if self.fresh:
            self.cycle = max(self.cycle, self.inherited.last_cycle)
        return overtaken

    @property
    def next_cycle(self) -> int:
        """The number of the cycle that is planned next."""
        return max(self.cycle, self.inherited.last_cycle) + 1

    def planned(self, assignment: Assignment) -> None:
        """The next cycle has this plan."""
        self.cycle = self.next_cycle
        self.fresh = False
        self.before = self.assignment
        self.assignment = assignment

    def carry_on(self, history: t.History) -> None:
        """The cycle of an earlier term goes on."""
        self.fresh = False
        self.assignment = self.inherited.assignment(self.term, history)
        self.inherited.forget()

    def give_up(self) -> None:
        """The cycle of an earlier term has failed."""
        slots = {g: Slot(node_id, 0, 0) for g, node_id in self.inherited.places.items()}
        self.fresh = False
        self.assignment = Assignment(None, slots)
        self.inherited.forget()

    def began(self, now: float) -> None:
        """A cycle runs."""
        self.started_at = now
