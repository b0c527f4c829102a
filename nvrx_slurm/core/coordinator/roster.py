"""How agents are told what to do and how they are removed; what the quorum and the lease make of that."""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.assignment import Assignment
from nvrx_slurm.core.coordinator.members import Member, MemberTable, Use, lost
from nvrx_slurm.core.coordinator.report import Ledger
from nvrx_slurm.core.coordinator.restarts import Budget
from nvrx_slurm.core.coordinator.states import LIVE, CoordinatorSettings, JobState
from nvrx_slurm.core.election.election import MEMBER_SHARE
from nvrx_slurm.core.election.quorum import Quorum, peer_key, peer_of
from nvrx_slurm.core.machine import Outbox, Say, rows
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode

MOST_SUCCESSORS = 32


class Roster:
    """The members, whether they are a quorum, and what is said to them."""

    table = rows((LIVE, t.Ready, "on_ready", (), "the state decides what that means"))

    def __init__(
        self, s: CoordinatorSettings, out: Outbox, job: JobState, ledger: Ledger, budget: Budget
    ) -> None:
        self._s, self._out = s, out
        self.job = job
        self.ledger = ledger
        self.budget = budget
        self.members = MemberTable()
        self.quorum = Quorum(s.electors, s.one_life)
        self.lost_at: dict[str, float] = {}  # node_id -> when an active node was lost

    @property
    def nodes_left(self) -> int:
        """How many nodes may still come at most: those that were expected, without the excluded ones."""
        return self._s.max_nodes - len(self.budget.history.excluded)

    # --- messages -------------------------------------------------------------------------------------------

    def send_all(self, message: t.CoordinatorMessage) -> None:
        """To all connected agents, in infra order."""
        for node in self.members.in_order():
            self._out.append(ev.SendTo(node.node_id, message))

    def send_plan(self, node_id: str) -> None:
        """The plan of the running cycle, from the point of view of one agent."""
        self._out.append(ev.SendTo(node_id, self.job.assignment.plan_for(node_id)))

    def stop_workers(self, node_id: str, cycle: int) -> None:
        """An agent has workers of `cycle` that are not, or no longer, part of the job."""
        self._out.append(
            ev.SendTo(node_id, t.Stop(self.job.term, cycle, f"its part in cycle {cycle} is over"))
        )

    def stop_old_workers(self, message: t.Register, now: float) -> None:
        """The same for an agent that has just registered, if it has any."""
        if message.plan is not None and message.busy:
            self.stop_workers(message.node.node_id, message.plan.cycle)
            if self.quorum.needed:
                self.quorum.fences[peer_key(message.node)] = now + self._s.stop_timeout_s

    def lead(self, message: t.Register) -> None:
        """The ranks of this agent are known again. It runs them on under our lease."""
        quorum, node = self.quorum, message.node
        if not quorum.needed:
            return
        if message.plan is not None:
            quorum.knows(peer_key(node), message.plan.term, message.plan.cycle)
        elif node.node_id not in self.members:
            quorum.newcomer(node, message.votes)
            self.note_dead()
        quorum.back(peer_key(node), self.members.keys_of_nodes)
        self._out.append(
            ev.SendTo(node.node_id, t.Lead(self.job.term, peer_key(node) not in quorum.dead))
        )

    def on_ready(self, event: ev.FromAgent[t.Ready], now: float) -> None:
        """A node has stopped its workers; a repeated or stale message changes nothing."""
        message = event.message
        if not self.members.note_ready(event.node_id, message):
            return
        self.job.held[event.node_id] = message.held
        if self.quorum.electors:
            key = peer_key(self.members[event.node_id].node)
            self.quorum.fences.pop(key, None)
            self.quorum.knows(key, message.term, message.cycle)
        self._out.posted.append(ev.Available(event.node_id))

    # --- plans ----------------------------------------------------------------------------------------------

    def share(self, assignment: Assignment) -> None:
        """This is the plan of the cycle, with what agents need for the election of the next coordinator."""
        peer = self._s.peer
        quorum = self.quorum
        plan = assignment.shared
        assert plan is not None
        self.job.assignment = assignment
        if peer is not None:
            others = [
                peer_of(node)
                for node in self.members.in_order()
                if peer_key(node) != peer.key and node.port
            ]
            step = max(1, len(others) / MOST_SUCCESSORS)
            successors = tuple(
                others[int(i * step)] for i in range(min(len(others), MOST_SUCCESSORS))
            )
            quorum.electors = max(
                quorum.electors, len(quorum.dead.union(self.members.keys_of_nodes))
            )
            quorum.plan(plan.term, plan.cycle, self.members.keys_of_nodes)
            plan = replace(plan, leader=peer, successors=successors, electors=quorum.electors)
        assignment.shared = plan
        self.note_dead()

    def send_plans(self, active: Sequence[str], spares: Sequence[str]) -> None:
        """To all members of a new cycle."""
        for node_id in (*active, *spares):
            self.send_plan(node_id)
        for node_id in active:
            self.members.set_use(node_id, Use.BUSY, self.job.cycle)

    def note_dead(self) -> None:
        """Nodes that get the plan of this cycle from now on learn that they have no vote."""
        shared, quorum = self.job.assignment.shared, self.quorum
        if shared is not None:
            dead, returned = tuple(sorted(quorum.dead)), tuple(sorted(quorum.returned))
            self.job.assignment.shared = replace(shared, dead=dead, returned=returned)

    def inherit(self, plan: t.Plan) -> tuple[list[str], bool]:
        """Note what an agent's plan tells of earlier terms.

        Returns the runners of a cycle that turns out not to be the last one, and whether further nodes are excluded.
        """
        job = self.job
        self.ledger.inherit(plan.history)
        excludes, overtaken = self.budget.inherit(plan.history), job.inherited.learn(plan)
        if job.fresh:
            job.cycle = max(job.cycle, job.inherited.last_cycle)
        return overtaken, excludes

    # --- nodes that go --------------------------------------------------------------------------------------

    def remove(self, node_id: str, why: str, now: float, fault: t.RankFault | None = None) -> None:
        """A member is lost, or is taken out for `fault`."""
        if (member := self.members.remove(node_id)) is None:
            return
        fault = fault or lost(member.node, why)
        self._fence(member, now)
        if fault.kind is not t.FaultKind.NODE_LOST or node_id in self.job.assignment.group_ranks:
            self.ledger.add_fault(fault, self.job.cycle, now)
        else:
            self._out.append(Say(f"node {member.node.host} left: {fault.message}"))
        self._out.posted.append(ev.Left(member.node, fault))

    def _fence(self, member: Member, now: float) -> None:
        """Its ranks may run until its lease is over, unless it is dead or was silent for that long."""
        quorum = self.quorum
        if not quorum.needed:
            return
        key = peer_key(member.node)
        quorum.missed_at = now
        silent_s, quorum.silent_s = quorum.silent_s, None
        heard_at = now - (self._s.lease_s if silent_s is None else silent_s)  # at least
        quorum.loyal_until[key] = heard_at + MEMBER_SHARE * self._s.lease_s
        if silent_s is not None and silent_s >= self._s.lease_s:
            quorum.fences.pop(key, None)  # ranks that it was stopping are dead, too
        elif member.use is not Use.READY:
            quorum.fences[key] = now + self._s.lease_s
        if member.node.port:
            self.probe(peer_of(member.node))
        self.mind_quorum(now)

    def probe(self, peer: t.Peer) -> None:
        """Ask for a proof of death."""
        self.quorum.probed[peer.key] = peer
        self._out.append(ev.Probe(peer))

    def mind_quorum(self, now: float) -> None:
        """Without a quorum nothing is planned, and after a while this coordinator resigns."""
        peer = self._s.peer
        # also where the agent of this node was refused
        own = {peer.key} if peer is not None else set()
        self.quorum.mind(self.members.keys_of_nodes | own, now, self._s.prove_s)

    def refuse(self, node_id: str, why: str, now: float, fault: t.RankFault | None = None) -> None:
        """Tell an agent that it is not taken, and close its stream; a member is removed."""
        self._out += [ev.SendTo(node_id, t.Refused(ExitCode.NODE_REFUSED, why)), ev.Drop(node_id)]
        self.remove(node_id, why, now, fault)
