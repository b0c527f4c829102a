"""How a coordinator begins where others were before it.

`Electing`: it may not act yet; agents register with it, and their registrations are votes. `Takeover`: agents run a
cycle of an older term; it carries on with that cycle, or gives it up.
"""

from __future__ import annotations

from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.verdict import first_cause
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.assignment import Assignment, Slot
from nvrx_slurm.core.coordinator.ending import Ending
from nvrx_slurm.core.coordinator.members import Use, missing
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.states import CoordinatorSettings, Stage
from nvrx_slurm.core.election.election import FENCE_MARGIN_S, MEMBER_SHARE
from nvrx_slurm.core.election.quorum import peer_key
from nvrx_slurm.core.machine import Entered, Outbox, Say, Tick, earliest, rows
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode

_ELECTING = Stage.ELECTING
_LATER = (
    *(t.EndKnown, t.Hung, t.Evidence, t.Examined, t.RanksFailed, t.Spent, t.Succeeded),
    *(t.Ready, t.Warmth, t.Asked, t.NodeUnfit, t.WarnJob, t.EndJob),
)
_PROBE_S = 1.0
_BEGIN_S = 5.0  # agents that Slurm starts together begin within this time
_MOST_HELD = 1_000  # messages of one agent that wait
_MINE = Stage.TAKEOVER
_DECIDED = (Stage.RUNNING, Stage.STOPPING)


class Electing:
    """Owns the state before the first quorum. Messages wait; they are handled once the election is won."""

    table = rows(
        (_ELECTING, ev.Joined, "on_joined", (Stage.JOINING,), "a vote"),
        (_ELECTING, ev.Lost, "on_lost", (), "a vote less"),
        (_ELECTING, _LATER, "hold", (), "for the time after the election"),
        (_ELECTING, ev.ProvenDead, "on_dead", (Stage.JOINING,), "it is not counted any more"),
        (_ELECTING, ev.Raised, "on_raised", (), "stand for a later term"),
        (_ELECTING, (*ev.ANSWERS, t.Counted), "ignore", (), "nothing was asked yet"),
        (_ELECTING, Tick, "on_tick", (Stage.FINISHED,), "which of the nodes that are missing are dead?"),
    )  # fmt: skip

    def __init__(self, s: CoordinatorSettings, out: Outbox, roster: Roster, ending: Ending, now: float) -> None:
        self._s, self._out, self._roster, self._ending = s, out, roster, ending
        self._job, self._quorum = roster.job, roster.quorum
        self._held: dict[str, list[Any]] = {}  # node_id -> its registration, and its messages after that
        self._voters: dict[str, str] = {}  # key -> node_id
        self._known = {peer.key: peer for peer in s.known}  # where nodes of the job listen, by key
        self._proven: dict[str, t.Peer] = {}  # agents that are dead by our own probes, by key
        self._planless: dict[str, t.Node] = {}  # nodes that have had no plan, by node_id
        self._led_at: float | None = None  # until then a coordinator before this one may have been heard
        self._led_term = 0  # the last term in which one was
        self._probe_at: float | None = None
        self._give_up_at = now + s.quorum_timeout_s if s.quorum_timeout_s else None  # no quorum will come
        if s.one_life:
            self._quorum.begin_until = now + min(_BEGIN_S, s.quorum_timeout_s / 2 or _BEGIN_S)

    def on_joined(self, event: ev.Joined, now: float) -> Stage | None:
        """One vote more. Its plan says which nodes may be missing.

        What it says of the job's past is kept, also if the voter leaves: the number of a cycle is not used again.
        """
        quorum, message = self._quorum, event.message
        self._voters[peer_key(message.node)] = message.node.node_id
        self._held[message.node.node_id] = [event]
        if message.led_s >= 0.0:
            led_at = now - message.led_s
            self._led_at = led_at if self._led_at is None else max(self._led_at, led_at)
            self._led_term = max(self._led_term, message.led_term)
        if message.plan is not None:
            self._roster.inherit(message.plan)
            self._job.inherited.place(message)
            self._learn(message.plan, peer_key(message.node))
        elif message.node.node_id not in self._planless:
            self._planless[message.node.node_id] = message.node
            quorum.newcomer(message.node, message.votes)
        if quorum.offer[0]:
            for node in self._planless.values():
                quorum.newcomer(node)
        if quorum.enough(self._voters):
            return self._win(now)
        if self._probe_at is None:
            self._probe(now)
        return None

    def _learn(self, plan: t.Plan, key: str) -> None:
        """The newest plan counts: it says which nodes have a vote, and where they listen."""
        quorum = self._quorum
        quorum.electors = max(quorum.electors, plan.electors)
        peers = {peer.key: peer for peer in (plan.leader, *plan.successors) if peer is not None}
        if (plan.term, plan.cycle) > quorum.offer:
            proven = {old for old in quorum.dead if old in self._proven and self._proven[old] == peers.get(old)}
            quorum.learn(plan)
            quorum.dead |= proven
            quorum.returned -= proven
            self._known = peers
        elif (plan.term, plan.cycle) == quorum.offer:
            quorum.dead.update(plan.dead)
            quorum.returned &= set(plan.returned)
            self._known.update(peers)
        quorum.knows(key, plan.term, plan.cycle)

    def on_lost(self, event: ev.Lost, now: float) -> None:
        """It votes for another candidate, or is dead."""
        held = self._held.pop(event.node_id, None)
        if held is not None:
            key = peer_key(held[0].message.node)
            if self._voters.get(key) == event.node_id:
                del self._voters[key]

    def hold(self, event: ev.FromAgent[Any], now: float) -> None:
        """An agent reports while no coordinator may act. `_MOST_HELD` bounds what it can say before that."""
        held = self._held.get(event.node_id)
        if held is not None and isinstance(event.message, t.Ready):
            told = event.message
            now_idle = replace(held[0].message, doing=t.Activity.IDLE, port=told.port, held=told.held)
            held[0] = ev.Joined(now_idle)
        elif held is not None and len(held) < _MOST_HELD:
            held.append(event)

    def on_dead(self, event: ev.ProvenDead, now: float) -> Stage | None:
        """One node fewer to ask for a vote."""
        if event.peer.key in self._voters or not self._quorum.is_proof(event.peer, now):
            return None
        self._proven[event.peer.key] = event.peer
        self._quorum.died(event.peer.key, self._voters)
        return self._win(now) if self._quorum.enough(self._voters) else None

    def on_raised(self, event: ev.Raised, now: float) -> None:
        """An agent has voted for a later term. A vote is for one term: all others vote again."""
        s = self._s
        self._job.term = event.term
        for key, node_id in list(self._voters.items()):
            if s.peer is not None and key != s.peer.key:
                self._out += [
                    ev.SendTo(node_id, t.Elsewhere(event.term, s.peer, False)),
                    ev.Drop(node_id),
                ]
                del self._voters[key], self._held[node_id]

    def deadline(self) -> float | None:
        """When to probe again, or to give up. The end of the allocation does not matter yet."""
        return earliest(self._probe_at, self._give_up_at)

    def on_tick(self, event: Tick, now: float) -> Stage | None:
        """Nodes that did not register may have died since. In the end those that did are told why nothing begins."""
        if self._give_up_at is not None and now >= self._give_up_at:
            return self._give_up()
        if self._probe_at is not None and now >= self._probe_at:
            self._probe(now)
        return None

    @property
    def votes(self) -> int:
        """How many nodes have voted."""
        return len(self._voters)

    def missing(self) -> str:
        """How many votes there are, and which nodes have not voted."""
        return missing(self._voters, self._s.expected, self._least)

    @property
    def _least(self) -> int:
        dead = self._quorum.dead
        return (self._quorum.electors - len(dead)) // 2 + 1 + sum(key in dead for key in self._voters)

    def _probe(self, now: float) -> None:
        self._probe_at = now + _PROBE_S
        for key, peer in self._known.items():
            if key not in self._voters and key not in self._quorum.proven:
                self._roster.probe(peer)

    def _give_up(self) -> Stage:
        s, members = self._s, self._roster.members
        for held in self._held.values():
            members.put(held[0].message.node, held[0].message.port, Use.READY)
        why = f"no majority of the job's nodes came within {s.quorum_timeout_s:g} s"
        told = [held[0].message.end for held in self._held.values() if held[0].message.end is not None]
        end = t.Finish(
            ExitCode.TOO_FEW_NODES,
            f"{why}; {missing(members.keys_of_nodes, s.expected, self._least)}",
        )
        return self._ending.decide(told[0] if told else end)

    # --- the end of the election ----------------------------------------------------------------------------

    def _win(self, now: float) -> Stage:
        self._quorum.elected, self._quorum.missed_at = True, now
        self._fence_the_missing(now)
        self._out.append(ev.Won())
        # First all registrations: no message finds a member missing.
        self._out.posted += [events[0] for events in self._held.values()]
        self._out.posted += [event for events in self._held.values() for event in events[1:]]
        return Stage.JOINING

    def _fence_the_missing(self, now: float) -> None:
        """Nodes that did not register may run ranks until their leases are over."""
        s, quorum, voters = self._s, self._quorum, self._voters
        quorum.absent = tuple(peer for key, peer in self._known.items() if key not in voters)
        if self._led_at is None:
            return
        lease_s = s.lease_s + FENCE_MARGIN_S
        # Those that are proven dead may have led others until they died.
        until = (self._led_at if quorum.enough_without(self._proven, voters) else now) + lease_s
        if s.last_leader and s.last_leader not in quorum.proven.union(voters):
            quorum.leader, quorum.fences[s.last_leader] = s.last_leader, until
        # Another node may have heard the leader for so much longer.
        quorum.fence_until = max(until, self._led_at + lease_s + MEMBER_SHARE * s.lease_s)
        # A plan that no voter has got may have given ranks to an agent that is back: no proof is about that life.
        quorum.unsure = not s.one_life and self._led_term > quorum.offer[0] > 0
        quorum.unfence(voters)


class Takeover:
    """Owns the state in which agents with workers of an older term are here."""

    states = (_MINE,)
    table = rows(
        (_MINE, Entered, "on_entered", _DECIDED, "all of the cycle may be here, or nothing of it"),
        (_MINE, ev.Arrived, "on_arrived", (*_DECIDED, Stage.JOINING), "one more of that cycle, or of an older one"),
        (_MINE, ev.Left, "on_left", (Stage.JOINING,), "that node cannot carry on"),
        (_MINE, ev.Available, "on_available", (Stage.JOINING,), "that node cannot carry on"),
        (_MINE, ev.Cleared, "on_cleared", _DECIDED, "there may be nobody to wait for"),
        (_MINE, ev.Timer, "on_timer", _DECIDED, "carry on without the missing nodes, or give up"),
        (_MINE, t.RanksFailed, "on_failed", (Stage.STOPPING,), "of the cycle to carry on with?"),
        (_MINE, t.Succeeded, "on_succeeded", (), "the cycle to carry on with is done on one node"),
    )  # fmt: skip

    def __init__(self, s: CoordinatorSettings, out: Outbox, roster: Roster) -> None:
        self._s, self._out, self._roster = s, out, roster
        self._job, self._ledger, self._budget = roster.job, roster.ledger, roster.budget
        self._min_healthy = s.policy is t.RestartPolicy.MIN_HEALTHY
        self._wait_until = 0.0

    def on_entered(self, event: Entered, now: float) -> Stage | None:
        """Agents run the last cycle, or only know of it."""
        return self._carry_on_if_complete(now) if self._job.inherited.running else self._give_up(now)

    def on_arrived(self, event: ev.Arrived, now: float) -> Stage | None:
        """One more of the last cycle, or of an older one, or a spare."""
        message, inherited = event.message, self._job.inherited
        mine, to = inherited.claim(message), None
        if mine and message.busy:
            to = self._carry_on_if_complete(now)
        elif mine:
            self._ledger.add(message.faults, self._job.cycle, now)
        else:
            self._roster.stop_old_workers(message, now)
        if to is None and not inherited.running:
            return Stage.JOINING
        return to or self._decide_if_all_are_here(now)

    def on_cleared(self, event: ev.Cleared, now: float) -> Stage | None:
        """No node is missing that could still come: there is nothing to wait for."""
        return self._decide_if_all_are_here(now)

    def on_left(self, event: ev.Left, now: float) -> Stage | None:
        """One fewer."""
        return self._without(event.node.node_id)

    def on_available(self, event: ev.Available, now: float) -> Stage | None:
        """A node is ready for another cycle."""
        return self._without(event.node_id)

    def _without(self, node_id: str) -> Stage | None:
        running = self._job.inherited.running
        running.remove(node_id)
        return None if running else Stage.JOINING

    def on_failed(self, event: ev.FromAgent[t.RanksFailed], now: float) -> Stage | None:
        """The cycle to carry on with has failed; any other message is about a cycle that is over."""
        running = self._job.inherited.running
        if event.node_id not in running.group_ranks:
            return None
        self._ledger.add(event.message.faults, self._job.cycle, now)
        if not self._min_healthy:
            return self._give_up(now)
        running.broken.add(running.group_ranks[event.node_id])
        return None

    def on_succeeded(self, event: ev.FromAgent[t.Succeeded], now: float) -> None:
        """One node is done with the cycle to carry on with."""
        self._job.inherited.finished(event.node_id, event.message.early)

    def timer_at(self, state: Stage) -> float:
        """How long to wait for the nodes that are missing."""
        return self._wait_until

    def on_timer(self, event: ev.Timer, now: float) -> Stage:
        """The others do not come."""
        return self._decide(now)

    # --- what becomes of that cycle -------------------------------------------------------------------------

    def _decide_if_all_are_here(self, now: float) -> Stage | None:
        quorum = self._roster.quorum
        here = quorum.needed and not quorum.missing(self._roster.members.keys_of_nodes)
        return self._decide(now) if here else None

    def _decide(self, now: float) -> Stage:
        """Under min-healthy a cycle goes on if enough of its nodes are good."""
        enough = self._min_healthy and self._job.inherited.running.good >= self._s.min_nodes
        return self._carry_on(now) if enough else self._give_up(now)

    def _carry_on_if_complete(self, now: float) -> Stage | None:
        """Once every group rank of the cycle has registered, it goes on under this term."""
        s, inherited, quorum = self._s, self._job.inherited, self._roster.quorum
        sizes = range(s.min_nodes, max(s.min_nodes, s.max_nodes) + 1) if self._min_healthy else (s.min_nodes,)
        if inherited.complete(sizes) and (not self._min_healthy or inherited.running.good >= s.min_nodes):
            return self._carry_on(now)
        self._wait_until = now + s.last_call_s
        if quorum.needed:  # after its fence a missing node runs no ranks to carry on with
            self._wait_until = min(self._wait_until, quorum.fenced_until())
        return self._decide_if_all_are_here(now)

    def _carry_on(self, now: float) -> Stage:
        job = self._job
        job.fresh = False
        self._roster.share(job.inherited.assignment(job.term, self._ledger.complete(self._budget.history)))
        job.inherited.forget()
        self._out.append(Say(f"term {job.term} carries on with cycle {job.cycle}"))
        for node in self._roster.members.in_order():
            self._roster.send_plan(node.node_id)
        return Stage.RUNNING

    def _give_up(self, now: float) -> Stage:
        """Not all nodes that ran the cycle came to this coordinator in time: that is a fault of that cycle."""
        job, ledger, here = self._job, self._ledger, self._roster.members.keys_of_nodes
        job.fresh = False
        job.assignment = Assignment(None, {g: Slot(node_id, 0, 0) for g, node_id in job.inherited.places.items()})
        job.inherited.forget()
        if not ledger.faults:
            gone = [peer for peer in self._roster.quorum.absent if peer.key not in here]
            ledger.add(map(_lost, gone or (t.Peer("", "", "", 0),)), job.cycle, ledger.started_at)
        ledger.cause = first_cause(ledger.faults)
        return Stage.STOPPING


def _lost(peer: t.Peer) -> t.RankFault:
    rank = int(peer.key) if peer.key.isdecimal() else -1
    what = "it" if peer.host else "a node of the last cycle"
    why = f"{what} did not register with the new coordinator"
    return t.RankFault(t.FaultKind.NODE_LOST, peer.host, rank, message=why)
