"""The connected agents: which are here, ready or missing; how they are told what to do, and how they are removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.verdict import headline
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.report import Ledger
from nvrx_slurm.core.coordinator.restarts import Budget
from nvrx_slurm.core.coordinator.states import LIVE, CoordinatorSettings, JobState
from nvrx_slurm.core.election.election import MEMBER_SHARE
from nvrx_slurm.core.election.quorum import Quorum, peer_key, peer_of
from nvrx_slurm.core.machine import Outbox, Say, rows
from nvrx_slurm.declared import Record, replace
from nvrx_slurm.errors import ExitCode

_NAMES_SHOWN = 16
MOST_SUCCESSORS = 32


def infra_order(node: t.Node) -> tuple[tuple[int, ...], int, str, str]:
    """Sort key of members: network topology, then the order Slurm gave us, then the node's own descriptor."""
    return (node.order, node.infra_rank, node.addr, node.node_id)


def complete_segments(nodes: Iterable[t.Node], segment: int) -> int:
    """How many segments of `segment` (>= 1) nodes there are, each within one domain. O(nodes)."""
    return sum(count // segment for count in Counter(node.domain for node in nodes).values())


def is_possible(ready: Collection[t.Node], min_nodes: int, segment: int | None) -> bool:
    """Whether `place` has enough nodes."""
    return len(ready) >= min_nodes and (not segment or complete_segments(ready, segment) * segment >= min_nodes)


class Use(Enum):
    """What can be done with a member."""

    READY = "it can be planned with"
    JOINING = "it cannot yet be planned with"
    PREPARING = "it has run nothing and is being checked"
    BUSY = "it may still run workers of a cycle"


@dataclass(slots=True)
class Member:
    """One connected agent."""

    node: t.Node
    port: int  # it offers this one as MASTER_PORT
    use: Use = Use.READY
    cycle: int = -1  # BUSY: the highest one of which it may still run workers


class MemberTable(dict[str, Member]):
    """Connected agents by node_id; every query the coordinator makes per message is O(1)."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: dict[str, str] = {}  # `peer_key` -> node_id of the latest life
        self.ready = 0  # how many have no workers

    def same_place(self, node: t.Node) -> Member | None:
        """The connected member that `node` replaces: the same agent life, or the same infra rank."""
        known = node.node_id if node.node_id in self else self._holders.get(peer_key(node), "")
        return self.get(known)

    def put(self, node: t.Node, port: int, use: Use) -> None:
        """Add a member, or note what has become of it."""
        self.remove(node.node_id)
        self[node.node_id] = Member(node, port, use)
        self.ready += use is Use.READY
        self._holders[peer_key(node)] = node.node_id

    def remove(self, node_id: str) -> Member | None:
        """Forget a member; None if it is not here."""
        member = self.pop(node_id, None)
        if member is None:
            return None
        self.ready -= member.use is Use.READY
        if self._holders.get(peer_key(member.node)) == node_id:
            del self._holders[peer_key(member.node)]
        return member

    @property
    def keys_of_nodes(self) -> KeysView[str]:
        """The members by `quorum.peer_key`, as a live view."""
        return self._holders.keys()

    def set_use(self, node_id: str, use: Use, cycle: int = -1) -> None:
        """Note what can be done with a member; BUSY: it may run workers of `cycle`."""
        member = self[node_id]
        self.ready += (use is Use.READY) - (member.use is Use.READY)
        member.use, member.cycle = use, cycle

    def not_ready(self, node_ids: Iterable[str]) -> set[str]:
        """Those of them that are connected and may have workers."""
        return {node_id for node_id in node_ids if node_id in self and self[node_id].use is not Use.READY}

    def note_ready(self, node_id: str, message: t.Ready) -> bool:
        """Whether this message makes a busy member ready; a repeated or stale one does not."""
        member = self.get(node_id)
        if member is None or member.use is Use.READY:
            return False
        first = message.term == 0  # it has never run anything
        if member.use is not Use.PREPARING and (first or message.cycle < member.cycle):
            return False
        self.set_use(node_id, Use.READY)
        member.port = message.port
        return True

    def ready_nodes(self) -> list[t.Node]:
        """The nodes that can be part of a plan now."""
        return [m.node for m in self.values() if m.use is Use.READY]

    def in_order(self) -> list[t.Node]:
        """All connected nodes in infra order."""
        return sorted((m.node for m in self.values()), key=infra_order)

    def missing_segments(self, min_nodes: int, segment: int) -> str:
        """One sentence: how many complete segments the ready nodes are, and which domains have nodes to spare."""
        ready = self.ready_nodes()
        have = f"{complete_segments(ready, segment)} of {min_nodes // segment} complete segments of {segment}"
        left = Counter(node.domain for node in sorted(ready, key=infra_order))
        some = [f"domain {name} has {count} nodes" for name, count in left.items() if count % segment]
        return f"{len(ready)} nodes are ready, but only {have}" + (f": {_listed(some)}" if some else "")


def missing(here: Collection[str], expected: Sequence[str], at_least: int) -> str:
    """One sentence: how many are here (by `peer_key`) and, as far as names are known, which are missing."""
    head = f"{len(here)} of at least {at_least} nodes are here"
    names = [host for rank, host in enumerate(expected) if str(rank) not in here]
    return f"{head}; missing: {_listed(names)}" if names else head


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


class Slot(Record):
    """One group rank: its node and its global ranks `first_rank` .. `first_rank + nproc - 1`."""

    node_id: str
    first_rank: int
    nproc: int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Its global ranks."""
        return tuple(range(self.first_rank, self.first_rank + self.nproc))


class Assignment:
    """`slots` by group rank; `shared` is the plan as a spare gets it (None: nothing was planned yet)."""

    def __init__(self, shared: t.Plan | None = None, slots: Mapping[int, Slot] | None = None) -> None:
        self.shared = shared
        self.slots = dict(slots or {})
        self.places = {g: slot.node_id for g, slot in self.slots.items()}  # kept by the next plan where possible
        self.group_ranks = {slot.node_id: g for g, slot in self.slots.items()}
        self.succeeded: set[int] = set()  # group ranks whose workers all ended with 0
        self.early = False  # some of them because they were warned
        self.broken: set[int] = set()  # group ranks with a fault (min-healthy goes on without them)
        self.gone: set[int] = set()  # those of them that are out for good: their ranks were declared dead

    @classmethod
    def plan(
        cls, active: Sequence[tuple[t.Node, int]], term: int, cycle: int, history: t.History, max_restarts: int
    ) -> Assignment:
        """The plan of a new cycle: `active` nodes (at least one) in the order of their group ranks, with the ports that
        they offer."""
        slots: dict[int, Slot] = {}
        world_size = 0
        for group_rank, (node, _) in enumerate(active):
            slots[group_rank] = Slot(node.node_id, world_size, node.nproc)
            world_size += node.nproc
        first, port = active[0]
        addr = first.addr or first.host
        return cls(t.Plan(term, cycle, history, max_restarts, len(active), world_size, addr, port), slots)

    def add(self, group_rank: int, slot: Slot) -> None:
        """Give a node a slot; it loses the one that it had."""
        self.remove(slot.node_id)
        self.slots[group_rank], self.places[group_rank] = slot, slot.node_id
        self.group_ranks[slot.node_id] = group_rank

    def remove(self, node_id: str) -> None:
        """Take the slot of a node, if it has one."""
        group_rank = self.group_ranks.pop(node_id, None)
        if group_rank is not None:
            del self.slots[group_rank], self.places[group_rank]
            self.succeeded.discard(group_rank)
            self.broken.discard(group_rank)

    def done(self, group_rank: int, early: bool) -> None:
        """All workers of this group rank have ended with 0; `early`: some because they were warned."""
        self.succeeded.add(group_rank)
        self.early = self.early or early

    def node_of(self, rank: int) -> str:
        """The node_id that has a global rank; "" = none."""
        return next((slot.node_id for slot in self.slots.values() if rank in slot.ranks), "")

    def ends(self, members: Mapping[str, Member]) -> tuple[tuple[int, t.Node], ...]:
        """The first and the last global rank, each with its node, as far as these are members."""
        slots = sorted(self.slots.values(), key=lambda slot: slot.first_rank)[:: max(1, len(self.slots) - 1)]
        ranks = {rank: slot.node_id for slot in slots for rank in (slot.first_rank, slot.first_rank + slot.nproc - 1)}
        here = [(rank, members[node_id].node) for rank, node_id in sorted(ranks.items()) if node_id in members]
        return tuple(here[:: max(1, len(here) - 1)])

    def __len__(self) -> int:
        """Active nodes."""
        return len(self.slots)

    @property
    def planned(self) -> int:
        """Active nodes that the plan speaks of; more than `len` where a new term has not seen all of them."""
        return self.shared.active_nodes if self.shared is not None else 0

    @property
    def healthy(self) -> int:
        """Active nodes that run without a fault."""
        return len(self.slots.keys() - self.broken - self.succeeded)

    @property
    def good(self) -> int:
        """Active nodes that run without a fault or are done."""
        return len(self.slots) - len(self.broken)

    def plan_for(self, node_id: str) -> t.Plan:
        """The plan from the point of view of one member."""
        assert self.shared is not None
        group_rank = self.group_ranks.get(node_id)
        if group_rank is None:
            return self.shared
        return replace(self.shared, group_rank=group_rank, rank_offset=self.slots[group_rank].first_rank)


class Roster:
    """The members, whether they are a quorum, and what is said to them."""

    table = rows((LIVE, t.Ready, "on_ready", (), "the state decides what that means"))

    def __init__(self, s: CoordinatorSettings, out: Outbox, job: JobState, ledger: Ledger, budget: Budget) -> None:
        self._s, self._out = s, out
        self.job, self.ledger, self.budget = job, ledger, budget
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
        self._out.append(ev.SendTo(node_id, t.Stop(self.job.term, cycle, f"its part in cycle {cycle} is over")))

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
        self._out.append(ev.SendTo(node.node_id, t.Lead(self.job.term, peer_key(node) not in quorum.dead)))

    def on_ready(self, event: ev.FromAgent[t.Ready], now: float) -> None:
        """A node has stopped its workers; a repeated or stale message changes nothing."""
        message = event.message
        if not self.members.note_ready(event.node_id, message):
            return
        if self.quorum.electors:
            key = peer_key(self.members[event.node_id].node)
            self.quorum.fences.pop(key, None)
            self.quorum.knows(key, message.term, message.cycle)
        self._out.posted.append(ev.Available(event.node_id))

    # --- plans ----------------------------------------------------------------------------------------------

    def share(self, assignment: Assignment) -> None:
        """This is the plan of the cycle, with what agents need for the election of the next coordinator."""
        peer, quorum, plan = self._s.peer, self.quorum, assignment.shared
        assert plan is not None
        self.job.assignment = assignment
        if peer is not None:
            others = [peer_of(node) for node in self.members.in_order() if peer_key(node) != peer.key and node.port]
            step = max(1, len(others) / MOST_SUCCESSORS)
            successors = tuple(others[int(i * step)] for i in range(min(len(others), MOST_SUCCESSORS)))
            quorum.electors = max(quorum.electors, len(quorum.dead.union(self.members.keys_of_nodes)))
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
        own = {peer.key} if peer is not None else set()  # also where the agent of this node was refused
        self.quorum.mind(self.members.keys_of_nodes | own, now, self._s.prove_s)

    def refuse(self, node_id: str, why: str, now: float, fault: t.RankFault | None = None) -> None:
        """Tell an agent that it is not taken, and close its stream; a member is removed."""
        self._out += [ev.SendTo(node_id, t.Refused(ExitCode.NODE_REFUSED, why)), ev.Drop(node_id)]
        self.remove(node_id, why, now, fault)

    def exclude(self, node: t.Node, rank: int, why: str, now: float, quiet: bool = False) -> t.Finish | None:
        """The node leaves at once and is not taken again; the end of the job if no node can ever take its place.

        `rank`: the rank that asked; -1 = a health check or a rule says so. `quiet`: the cycle fails and says why.
        """
        kind = t.FaultKind.EXCLUDED if rank >= 0 else t.FaultKind.UNHEALTHY
        fault = t.RankFault(kind, node.host, node.infra_rank, rank, message=why)
        self.budget.exclude(node)
        if self.nodes_left >= self._s.min_nodes:
            if not quiet:
                self._out.append(Say(headline(fault)))
            self.refuse(node.node_id, headline(fault), now, fault)
            return None
        self.ledger.add((fault,), self.job.cycle, now)
        self.members.remove(node.node_id)
        self.refuse(node.node_id, headline(fault), now)
        some = f"{self.nodes_left} nodes are left after the exclusion of {node.host}, {self._s.min_nodes} are needed"
        return t.Finish(ExitCode.TOO_FEW_NODES, f"{some}: {headline(fault)}")

    def strike(self, hosts: Sequence[str], why: str) -> None:
        """Note in the file of strikes that these hosts are under suspicion ("" is none)."""
        for host in filter(None, hosts):
            self._out += [Say(f"node {host} gets a strike: {why}"), ev.Strike(host, why)]

    def holder(self, assignment: Assignment | None, rank: int) -> t.Node | None:
        """The node that has, or had, a global rank there; None = it is not a member any more."""
        member = self.members.get(assignment.node_of(rank)) if assignment is not None else None
        return member.node if member is not None else None

    def exclude_by_rule(self, place: t.Node | t.RankFault, why: str, now: float) -> None:
        """A node is certainly bad: it leaves the job where enough nodes are left."""
        for node in self.members.in_order():
            if (node.infra_rank, node.host) == (place.infra_rank, place.host) and self._may_exclude(node):
                self.exclude(node, -1, why, now)

    def _may_exclude(self, node: t.Node) -> bool:
        """Whether enough nodes are left, and at most 5 % of them are excluded: else the rule itself is doubtful."""
        excluded, nodes = len(self.budget.history.excluded), self._s.max_nodes
        others = [member.node for member in self.members.values() if member.node is not node]
        if self._s.segment and not is_possible(others, self._s.min_nodes, self._s.segment):
            return False
        return self.nodes_left > self._s.min_nodes and excluded < max(1, nodes // 20)


def lost(node: t.Node, why: str) -> t.RankFault:
    """A node that is gone, as a fault."""
    return t.RankFault(t.FaultKind.NODE_LOST, node.host, node.infra_rank, message=why)
