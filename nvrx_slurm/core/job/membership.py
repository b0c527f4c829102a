"""Agents that come and go while the job lives. What that means is decided by the part that owns the state."""

from __future__ import annotations

from typing import ClassVar

from nvrx_slurm import types as t
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.inherited import busy_cycle
from nvrx_slurm.core.job.job_data import ANY, LIVE, rows
from nvrx_slurm.core.job.members import JOINING
from nvrx_slurm.core.job.part import JobPart
from nvrx_slurm.core.machine import Row, Table

_LAST_CYCLE = 1_000_000  # a plan of a later one is a defect of its agent: the next cycle could not be numbered


class Membership(JobPart):
    """Handles ev.Joined and ev.Lost in all states before the end."""

    table: ClassVar[Table] = rows(
        (LIVE, ev.Joined, Row("on_joined", ANY, "a new node, a returning one, or a takeover")),
        (LIVE, ev.Lost, Row("on_lost", ANY, "a fault if it was active")),
    )

    def on_joined(self, event: ev.Joined, now: float) -> None:
        """A new agent, a returning one, or one that reports what it runs to a new coordinator."""
        job, message, node = self.job, event.message, event.message.node
        if message.plan is not None and message.plan.cycle > _LAST_CYCLE:
            self.refuse(node.node_id, f"cycle {message.plan.cycle} of its plan is above {_LAST_CYCLE}", now)
            return
        job.lost_at.pop(node.node_id, None)
        self._learn(message, now)
        if job.budget.excludes(node):
            self.refuse(node.node_id, f"node {node.host} was excluded from this job", now)
            return
        old = job.members.same_place(node)
        job.members.put(node, message.port, JOINING)
        if job.warning is not None:
            self.send(node.node_id, job.warning)
        if old is not None and old.node.node_id != node.node_id:
            self.refuse(old.node.node_id, f"a newer agent of node {node.host} has joined in its place", now)
        if self.core.state in LIVE:  # otherwise it was told the end with all the others
            job.members.set_busy(node.node_id, busy_cycle(message))
            self.owner.joined(message, now)

    def _learn(self, message: t.Register, now: float) -> None:
        """Take over what the agent knows of earlier terms."""
        job = self.job
        job.inherited.running.remove(message.node.node_id)  # unless the agent says otherwise in a moment
        if message.plan is None:
            return
        if job.budget.inherit(message.plan.history):  # one that joined before this was known may have been excluded
            for node in job.members.in_order():
                if job.budget.excludes(node):
                    self.refuse(node.node_id, "it was excluded in an earlier term", now)
        for node_id in job.inherited.learn(message.plan):
            self.stop_workers(node_id, job.inherited.last_cycle)
        if job.fresh:
            job.cycle = max(job.cycle, job.inherited.last_cycle)

    def on_lost(self, event: ev.Lost, now: float) -> None:
        """A stream broke."""
        if event.node_id in self.job.members and self.job.assignment.group_rank(event.node_id) is not None:
            self.job.lost_at[event.node_id] = now
        self.remove(event.node_id, event.why, now)
