"""Nodes that leave the job for good, and nodes that are under suspicion.

All exclusions go through `Exclusion.exclude`: by request of a rank, by a health check, or by a rule. What only a rule
says excludes few nodes, and none that the job needs.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.said import headline
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.assignment import Assignment
from nvrx_slurm.core.coordinator.members import is_possible
from nvrx_slurm.core.coordinator.part import Part
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.errors import ExitCode


class Exclusion(Part):
    """Takes nodes out of the job."""

    def __init__(self, roster: Roster) -> None:
        super().__init__(roster)
        self._unwanted: tuple[t.Node, str] | None = None

    def after_this_cycle(self, node: t.Node, why: str) -> None:
        """The node leaves the job before the next plan, by a rule."""
        self._unwanted = node, why

    def cycle_over(self, now: float) -> None:
        """Nothing of the cycle is left."""
        unwanted = self._unwanted
        self._unwanted = None
        if unwanted is not None:
            self.by_rule(*unwanted, now)

    def exclude(
        self,
        node: t.Node,
        rank: int,
        why: str,
        now: float,
        quiet: bool = False,
    ) -> t.Finish | None:
        """The node leaves at once and is not taken again; the end of the job if no node can ever take its place.

        `rank`: the rank that asked; -1 = a health check or a rule says so. `quiet`: the cycle fails and says why.
        """
        kind = t.FaultKind.EXCLUDED if rank >= 0 else t.FaultKind.UNHEALTHY
        fault = t.RankFault(kind, node.host, node.infra_rank, rank, message=why)
        what = headline(fault)
        roster = self._roster
        job = self._job
        needed = self._s.min_nodes
        self._budget.exclude(node)
        if roster.nodes_left >= needed:
            if not quiet:
                self._say(what)
            roster.refuse(node.node_id, what, now, fault)
            return None
        self._ledger.add((fault,), job.cycle, now)
        self._members.remove(node.node_id)
        roster.refuse(node.node_id, what, now)
        left = f"{roster.nodes_left} nodes are left after the exclusion of {node.host}"
        some = f"{left}, {needed} are needed"
        return t.Finish(ExitCode.TOO_FEW_NODES, f"{some}: {what}")

    def strike(self, hosts: Sequence[str], why: str) -> None:
        """Note in the file of strikes that these hosts are under suspicion ("" is none)."""
        for host in hosts:
            if host:
                self._say(f"node {host} gets a strike: {why}")
                self._out.append(ev.Strike(host, why))

    def holder(self, assignment: Assignment | None, rank: int) -> t.Node | None:
        """The node that has, or had, a global rank there; None = it is not a member any more."""
        if assignment is None:
            return None
        member = self._members.get(assignment.node_of(rank))
        return None if member is None else member.node

    def by_rule(self, place: t.Node | t.RankFault, why: str, now: float) -> None:
        """A node is certainly bad: it leaves the job where enough nodes are left."""
        for node in self._members.in_order():
            same = (node.infra_rank, node.host) == (place.infra_rank, place.host)
            if same and self._may_exclude(node):
                self.exclude(node, -1, why, now)

    def _may_exclude(self, node: t.Node) -> bool:
        """Whether enough nodes are here without it, and at most 5 % of all are excluded: else the rule is doubtful."""
        s = self._s
        others = [member.node for member in self._members.values()]
        others.remove(node)
        if not is_possible(others, s.min_nodes, s.segment):
            return False
        excluded = len(self._budget.history.excluded)
        most = max(1, s.max_nodes // 20)
        return excluded < most
