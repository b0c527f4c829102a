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
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.states import CoordinatorSettings
from nvrx_slurm.core.machine import Outbox, Say
from nvrx_slurm.errors import ExitCode


class Exclusion:
    """Takes nodes out of the job."""

    def __init__(self, s: CoordinatorSettings, out: Outbox, roster: Roster) -> None:
        self._s = s
        self._out = out
        self._roster = roster
        self._members = roster.members

    def exclude(
        self, node: t.Node, rank: int, why: str, now: float, quiet: bool = False
    ) -> t.Finish | None:
        """The node leaves at once and is not taken again; the end of the job if no node can ever take its place.

        `rank`: the rank that asked; -1 = a health check or a rule says so. `quiet`: the cycle fails and says why.
        """
        kind = t.FaultKind.EXCLUDED if rank >= 0 else t.FaultKind.UNHEALTHY
        fault = t.RankFault(kind, node.host, node.infra_rank, rank, message=why)
        self._roster.budget.exclude(node)
        if self._roster.nodes_left >= self._s.min_nodes:
            if not quiet:
                self._out.append(Say(headline(fault)))
            self._roster.refuse(node.node_id, headline(fault), now, fault)
            return None
        self._roster.ledger.add((fault,), self._roster.job.cycle, now)
        self._members.remove(node.node_id)
        self._roster.refuse(node.node_id, headline(fault), now)
        left, needed = self._roster.nodes_left, self._s.min_nodes
        some = f"{left} nodes are left after the exclusion of {node.host}, {needed} are needed"
        return t.Finish(ExitCode.TOO_FEW_NODES, f"{some}: {headline(fault)}")

    def strike(self, hosts: Sequence[str], why: str) -> None:
        """Note in the file of strikes that these hosts are under suspicion ("" is none)."""
        for host in filter(None, hosts):
            self._out += [Say(f"node {host} gets a strike: {why}"), ev.Strike(host, why)]

    def holder(self, assignment: Assignment | None, rank: int) -> t.Node | None:
        """The node that has, or had, a global rank there; None = it is not a member any more."""
        member = self._members.get(assignment.node_of(rank)) if assignment is not None else None
        return member.node if member is not None else None

    def by_rule(self, place: t.Node | t.RankFault, why: str, now: float) -> None:
        """A node is certainly bad: it leaves the job where enough nodes are left."""
        for node in self._members.in_order():
            if (node.infra_rank, node.host) == (place.infra_rank, place.host) and self._may_exclude(
                node
            ):
                self.exclude(node, -1, why, now)

    def _may_exclude(self, node: t.Node) -> bool:
        """Whether enough nodes are left, and at most 5 % of them are excluded: else the rule itself is doubtful."""
        excluded, nodes = len(self._roster.budget.history.excluded), self._s.max_nodes
        others = [member.node for member in self._members.values() if member.node is not node]
        if self._s.segment and not is_possible(others, self._s.min_nodes, self._s.segment):
            return False
        return self._roster.nodes_left > self._s.min_nodes and excluded < max(1, nodes // 20)
