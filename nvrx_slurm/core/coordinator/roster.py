"""How agents are told what to do and how they are removed; what the quorum and the lease make of that."""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.named_node import JobNode
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.job import JobState
from nvrx_slurm.core.coordinator.members import Member, MemberTable, Use, lost
from nvrx_slurm.core.coordinator.report import Ledger
from nvrx_slurm.core.coordinator.restarts import Budget
from nvrx_slurm.core.coordinator.states import LIVE, CoordinatorSettings
from nvrx_slurm.core.election.events import MEMBER_SHARE
from nvrx_slurm.core.election.quorum import Quorum, peer_key, peer_of
from nvrx_slurm.core.machine import Outbox, Say, rows
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode

MOST_SUCCESSORS = 32


class Roster:
    """The members, whether they are a quorum, and what is said to them."""

    table = rows(
        (LIVE, ev.Lost, "on_lost", (), "the state decides what that means"),
        (LIVE, t.Ready, "on_ready", (), "the state decides what that means"),
    )

    def __init__(
        self,
        s: CoordinatorSettings,
        out: Outbox,
        job: JobState,
        ledger: Ledger,
        budget: Budget,
        quorum: Quorum,
    ) -> None:
        self.settings = self._s = s
        self.out = self._out = out
        self.job = job
        self.ledger = ledger
        self.budget = budget
        self.quorum = quorum
        self.members = MemberTable()
        self.lost_at: dict[str, float] = {}  # node_id -> when an active node was lost
        ledger.ask_nodes(self._job_nodes)

    @property
    def nodes_left(self) -> int:
        """How many nodes may still come at most: those that were expected, without the excluded ones."""
        return self._s.max_nodes - len(self.budget.history.excluded)

    def _job_nodes(self) -> list[JobNode]:
        """The nodes that are here, and the hosts that were expected."""
        slots = {slot.node_id: slot.ranks for slot in self.job.assignment.slots.values()}
        nodes = [member.node for member in self.members.values()]
        here = [JobNode(node.host, node.addr, slots.get(node.node_id, ())) for node in nodes]
        return here + [JobNode(host) for host in self._s.expected]

    # --- messages -------------------------------------------------------------------------------------------

    def send(self, node_id: str, message: t.CoordinatorMessage) -> None:
        """To one agent."""
        self._out.append(ev.SendTo(node_id, message))

    def send_all(self, message: t.CoordinatorMessage) -> None:
        """To all connected agents, in infra order."""
        for node in self.members.in_order():
            self.send(node.node_id, message)

    def send_plan(self, node_id: str) -> None:
        """The plan of the running cycle, from the point of view of one agent."""
        self.send(node_id, self.job.assignment.plan_for(node_id))

    def stop_workers(self, node_id: str, cycle: int) -> None:
        """An agent has workers of `cycle` that are not, or no longer, part of the job."""
        why = f"its part in cycle {cycle} is over"
        self.send(node_id, t.Stop(self.job.term, cycle, why))

    def stop_old_workers(self, message: t.Register, now: float) -> None:
        """The same for an agent that has just registered, if it has any."""
        if message.plan is not None and message.busy:
            self.stop_workers(message.node.node_id, message.plan.cycle)
            if self.quorum.needed:
                self.quorum.fence(peer_key(message.node), now + self._s.stop_timeout_s)

    def is_back(self, node: t.Node) -> None:
        """A node that was lost has come back."""
        self.lost_at.pop(node.node_id, None)
        self.ledger.spare_is_back(node.host)

    def lead(self, message: t.Register) -> None:
        """This agent has registered: lift the fence on its ranks and tell it that we lead, which renews its lease."""
        quorum = self.quorum
        node = message.node
        plan = message.plan
        key = peer_key(node)
        if not quorum.needed:
            return
        if plan is not None:
            quorum.knows(key, plan.term, plan.cycle)
        elif node.node_id not in self.members:
            quorum.newcomer(node, message.votes)
            self.note_dead()
        quorum.back(key, self.members.keys_of_nodes)
        votes = key not in quorum.dead
        self.send(node.node_id, t.Lead(self.job.term, votes))

    def on_ready(self, event: ev.FromAgent[t.Ready], now: float) -> None:
        """A node has stopped its workers; a repeated or stale message changes nothing."""
        message = event.message
        if not self.members.note_ready(event.node_id, message):
            return
        if self.quorum.electors:
            key = peer_key(self.members[event.node_id].node)
            self.quorum.fence(key, None)
            self.quorum.knows(key, message.term, message.cycle)
        self._out.post(ev.Available(event.node_id))

    # --- plans ----------------------------------------------------------------------------------------------

    def share(self) -> None:
        """Add to the plan of the cycle what agents need for the election of the next coordinator."""
        me = self._s.peer
        job = self.job
        if me is not None:
            self.quorum.plan(job.term, job.cycle, self.members.keys_of_nodes)
            job.assignment.amend(
                leader=me,
                successors=self._successors(me),
                electors=self.quorum.electors,
            )
        self.note_dead()

    def _successors(self, me: t.Peer) -> tuple[t.Peer, ...]:
        """Members that may lead next, spread over the job."""
        others = []
        for node in self.members.in_order():
            if peer_key(node) != me.key and node.port:
                others.append(peer_of(node))
        most = min(len(others), MOST_SUCCESSORS)
        step = max(1, len(others) / MOST_SUCCESSORS)
        return tuple(others[int(i * step)] for i in range(most))

    def send_plans(self, active: Sequence[str], spares: Sequence[str]) -> None:
        """To all members of a new cycle."""
        for node_id in (*active, *spares):
            self.send_plan(node_id)
        for node_id in active:
            self.members.set_use(node_id, Use.BUSY, self.job.cycle)

    def note_dead(self) -> None:
        """Nodes that get the plan of this cycle from now on learn that they have no vote."""
        assignment = self.job.assignment
        if assignment.shared is not None:
            assignment.amend(
                dead=tuple(sorted(self.quorum.dead)),
                returned=tuple(sorted(self.quorum.returned)),
            )

    def inherit(self, plan: t.Plan) -> tuple[list[str], bool]:
        """Note what an agent's plan tells of earlier terms.

        Returns the runners of a cycle that turns out not to be the last one, and whether further nodes are excluded.
        """
        self.ledger.inherit(plan.history)
        excludes = self.budget.inherit(plan.history)
        return self.job.learn(plan), excludes

    # --- nodes that go --------------------------------------------------------------------------------------

    def on_lost(self, event: ev.Lost, now: float) -> None:
        """The stream of a member broke, or it was silent: after the length of a lease its ranks are gone."""
        member = self.members.get(event.node_id)
        if member is None:
            return
        fault = lost(member.node, event.why)
        if event.node_id in self.job.assignment.group_ranks:
            self.lost_at[event.node_id] = now
        else:
            self.ledger.spare_lost(fault.host)
        if event.silent_s >= self._s.lease_s:
            fault = replace(fault, silent_s=self._s.lease_s)
        self._remove(member, fault, now, event.silent_s)

    def remove(
        self,
        node_id: str,
        why: str,
        now: float,
        fault: t.RankFault | None = None,
    ) -> None:
        """A member is taken out, for `fault`."""
        member = self.members.get(node_id)
        if member is not None:
            self._remove(member, fault or lost(member.node, why), now)

    def _remove(
        self,
        member: Member,
        fault: t.RankFault,
        now: float,
        silent_s: float | None = None,
    ) -> None:
        """`silent_s`: how long it was not heard."""
        node = member.node
        job = self.job
        self.members.remove(node.node_id)
        if self.quorum.needed:
            self._fence(member, now, silent_s)
        is_active = node.node_id in job.assignment.group_ranks
        if is_active or fault.kind is not t.FaultKind.NODE_LOST:
            self.ledger.add_fault(fault, job.cycle, now)
        else:
            self._out.append(Say(f"node {node.host} left: {fault.message}"))
        self._out.post(ev.Left(node, fault))

    def _fence(self, member: Member, now: float, silent_s: float | None) -> None:
        """Its ranks may run until its lease is over, unless it is dead or was silent for that long."""
        lease_s = self._s.lease_s
        key = peer_key(member.node)
        heard_at = now - (lease_s if silent_s is None else silent_s)  # at least
        self.quorum.lost(key, heard_at + MEMBER_SHARE * lease_s, now)
        if silent_s is not None and silent_s >= lease_s:
            self.quorum.fence(key, None)  # ranks that it was stopping are dead, too
        elif member.use is not Use.READY:
            self.quorum.fence(key, now + lease_s)
        if member.node.port:
            self.probe(peer_of(member.node))
        self.mind_quorum(now)

    def probe(self, peer: t.Peer) -> None:
        """Ask for a proof of death."""
        self.quorum.probe(peer)
        self._out.append(ev.Probe(peer))

    def mind_quorum(self, now: float) -> None:
        """Without a quorum nothing is planned, and after a while this coordinator resigns."""
        self.quorum.mind(self.here, now, self._s.prove_s)

    @property
    def here(self) -> set[str]:
        """Keys of the members and of this node, also where its agent was refused."""
        me = self._s.peer
        here = set(self.members.keys_of_nodes)
        if me is not None:
            here.add(me.key)
        return here

    def refuse(
        self,
        node_id: str,
        why: str,
        now: float,
        fault: t.RankFault | None = None,
    ) -> None:
        """Tell an agent that it is not taken, and close its stream; a member is removed."""
        self.send(node_id, t.Refused(ExitCode.NODE_REFUSED, why))
        self._out.append(ev.Drop(node_id))
        self.remove(node_id, why, now, fault)
