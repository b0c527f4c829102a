"""What one coordinator of the simulation was told, kept apart from what it believes."""

from __future__ import annotations

from dataclasses import dataclass, field

from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.types import Activity, CheckNode, Node, Ready, Stop


@dataclass
class Reign:
    """By its agents, and in its plans."""

    connected: dict[str, Node] = field(default_factory=dict)
    busy: dict[str, int] = field(default_factory=dict)  # node_id -> cycle whose workers it may run, by its own word
    known_cycle: int = -1  # highest that any agent has reported
    newest_plan: int = -1
    carries_on: bool = True  # nothing was stopped in this term
    fresh: bool = True  # nothing was planned or given up in this term
    anew: bool = False  # its voters knew nothing of the job: its term may be an earlier one
    active: dict[int, str] = field(default_factory=dict)  # group rank -> node_id of the last plan, or as reported
    before: dict[int, str] = field(default_factory=dict)  # the same of the plan before

    def hear(self, event):
        if isinstance(event, ev.Joined):
            message = event.message
            self.forget(message.node.node_id)
            self.connected[message.node.node_id] = message.node
            if message.plan is not None and message.plan.cycle > self.known_cycle:
                self.known_cycle = message.plan.cycle
                self.active = self.active if self.newest_plan >= 0 or not self.carries_on else {}
            if message.doing is Activity.PREPARING:
                self.busy[message.node.node_id] = -1
            elif message.plan is not None and message.plan.active:
                self._hear_active(message, message.plan)
        elif isinstance(event, ev.Lost):
            self.forget(event.node_id)
        elif isinstance(event, ev.FromAgent) and isinstance(message := event.message, Ready):
            self._hear_ready(event.node_id, message)

    def tell(self, commands):
        """Nodes that are told to stop or to check are busy until they have answered."""
        for command in commands:
            if isinstance(command, ev.SendTo) and isinstance(command.message, (Stop, CheckNode)):
                self.busy.setdefault(command.node_id, command.message.cycle)

    def _hear_ready(self, node_id, message):
        first = message.term == 0  # it has run nothing yet: no answer to a check
        if (-1 if first else message.cycle) >= self.busy.get(node_id, -1):
            self.busy.pop(node_id, None)

    def _hear_active(self, message, plan):
        node_id = message.node.node_id
        if message.doing is not Activity.IDLE:
            self.busy[node_id] = plan.cycle
        learns = self.newest_plan < 0 and self.carries_on  # the last plan, from those who had a place in it
        if learns and plan.cycle == self.known_cycle and plan.group_rank not in self.active:
            self.active[plan.group_rank] = node_id

    def forget(self, node_id):
        self.connected.pop(node_id, None)
        self.busy.pop(node_id, None)

    def can_run(self, node_id):
        """Whether it is here and has no workers."""
        return node_id in self.connected and node_id not in self.busy
