"""The plan of the next cycle: which nodes are active, with which group ranks, and what is said about it."""

from __future__ import annotations

from collections.abc import Mapping

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.recurrence import followed, nodes_of, suspects
from nvrx_slurm.core.attribution.recurrence import place as place_of
from nvrx_slurm.core.checkpoint.copies import Resumption
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.assignment import Assignment
from nvrx_slurm.core.coordinator.members import Member, is_possible
from nvrx_slurm.core.coordinator.part import Part
from nvrx_slurm.core.coordinator.placement import Placement, place
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.stopping import Stopping
from nvrx_slurm.declared import replace


class Planner(Part):
    """Plans the next cycle. `stopping`: what the last one that failed says about it."""

    def __init__(self, roster: Roster, stopping: Stopping) -> None:
        super().__init__(roster)
        self._stopping = stopping

    def is_possible(self) -> bool:
        """Whether the ready nodes are enough."""
        members = self._members
        fewest = self._s.min_nodes
        segment = self._s.segment
        if members.ready < fewest:
            return False
        return not segment or is_possible(members.ready_nodes(), fewest, segment)

    def may_improve(self) -> bool:
        """Whether an active node would lose its place, while nodes that may keep its segment whole are not ready."""
        if self._members.ready == len(self._members):
            return False
        active = set(self._job.assignment.places.values())
        if not active.isdisjoint(self._last_resort()):
            return True  # a spare that is still being checked should take its place
        if not self._s.segment:
            return False
        return not active.isdisjoint(self._placement().spares)

    def plan(self, now: float) -> None:
        """Enough nodes are ready, and none has to be waited for."""
        placement = self._placement()
        self._tell_of_suspects(placement)
        if self._job.fresh and self._s.tracks_progress and not self._s.finds_checkpoints:
            self._out.append(ev.ReadProgress(-1))
        self._send_plans(placement, now)

    def _placement(self) -> Placement:
        """Of the ready nodes, which are enough."""
        s = self._s
        ready = self._members.ready_nodes()
        nodes = s.min_nodes
        if s.policy is t.RestartPolicy.MIN_HEALTHY:
            most = s.max_active or len(ready)
            nodes = max(nodes, min(len(ready), most))
        last = self._last_resort()
        places = self._places()
        placement = place(ready, places, nodes, s.segment, last)
        suspect = self._stopping.suspect
        left = suspect and (placement is None or suspect not in placement.active)
        if self._stopping.elsewhere and not left:
            step = s.segment if s.segment and s.segment < nodes else 1
            moved = {(g + step) % nodes: node_id for g, node_id in places.items()}
            placement = place(ready, moved, nodes, s.segment, last)
            why = f"each group rank moves on by {step} of {nodes} nodes"
            placement = None if placement is None else replace(placement, why=why)
        assert placement is not None
        return placement

    def _last_resort(self) -> list[str]:
        """Nodes that are active only where others are not enough, the last suspected one last."""
        found = [self._stopping.suspect]
        for one in suspects(self._ledger.failures):
            for node_id, member in self._members.items():
                if place_of(member.node) == one:
                    found.append(node_id)
        return found

    def _places(self) -> Mapping[int, str]:
        """Who had which group rank in the last cycle; or in the one before, where a node has lost its place for nothing
        and can have it back."""
        before = self._job.before
        for_nothing = not self._stopping.elsewhere and followed(self._ledger.failures)
        if for_nothing and before is not None:
            return before.places
        return self._job.assignment.places

    def _tell_of_suspects(self, placement: Placement) -> None:
        """Say that a node has lost its place because its failure has come back, or that this was for nothing."""
        failures = self._ledger.failures
        if self._stopping.elsewhere or self._job.fresh or not failures:
            return
        last = failures[-1]
        if followed(failures):
            from_to = f"from node {failures[-2].host} to node {last.host}"
            moved = f"the failure of rank {last.rank} has moved {from_to}"
            self._say(f"{moved}: it is the script or its data, not a node")
            return
        active = self._job.assignment.group_ranks.keys()
        replaced = active & placement.spares & set(self._last_resort())
        places = {place_of(self._members[node_id].node) for node_id in replaced}
        hosts = tuple(host for rank, host in nodes_of(last) if (rank, host) in places)
        if not hosts:
            return
        self._ledger.moved(hosts)
        who = f"node {last.host} alone has failed"
        some = "a spare takes its place"
        if last.alike:
            who = f"{len(last.alike) + 1} nodes fail alike"
            some = f"spares take the places of {', '.join(hosts)}"
        self._say(f"{who} in two of three cycles: {some}")

    def _send_plans(self, placement: Placement, now: float) -> None:
        job = self._job
        cycle = job.next_cycle
        active = [self._members[node_id] for node_id in placement.active]
        before = set(job.assignment.places.values())
        promoted = []
        for member in active:
            if before and member.node.node_id not in before:
                promoted.append(member.node.host)
        found = self._in_memory(active)
        budget = self._budget.history
        history, took = self._ledger.cycle_began(budget, promoted, now, found.iteration)
        nodes = [(member.node, member.port) for member in active]
        cold = self._cold(active)
        most = self._s.max_restarts
        memory = found.plans([self._members[node_id].node for node_id in placement.spares])
        job.planned(Assignment.plan(nodes, job.term, cycle, history, most, not cold, memory))
        self._roster.share()
        self._say(f"cycle {cycle}: {placement.why}{took}")
        if found.sentence():
            self._say(f"cycle {cycle}: {found.sentence()}")
        if cold:
            self._say(f"cycle {cycle}: all ranks are executed, not forked: {cold}")
        self._roster.send_plans(placement.active, placement.spares)

    def _in_memory(self, active: list[Member]) -> Resumption:
        """What the ranks of these nodes can load from memory."""
        held = {}
        for node_id, member in self._members.items():
            if member.held is not None:
                held[node_id] = member.held
        nodes = [member.node for member in active]
        return Resumption(nodes, held, self._budget.history.resume_before)

    def _cold(self, active: list[Member]) -> str:
        """Why ranks are not forked; "" if they are. Ranks of two kinds may differ, and then a job may hang."""
        if not self._budget.may_fork:
            return "they had to begin again too often"
        for member in active:
            warmth = self._members.warmth.get(member.node.node_id)
            if warmth is not None and warmth.reason:
                return f"node {member.node.host}: {warmth.reason}"
        return ""
