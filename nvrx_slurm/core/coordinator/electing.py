"""A coordinator that may not act yet: agents register with it, and their registrations are votes."""

from __future__ import annotations

from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.ending import Ending
from nvrx_slurm.core.coordinator.members import Use, missing
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.states import CoordinatorSettings, Stage
from nvrx_slurm.core.election.election import FENCE_MARGIN_S, MEMBER_SHARE
from nvrx_slurm.core.election.quorum import peer_key
from nvrx_slurm.core.machine import Outbox, Tick, earliest, rows
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode

_ELECTING = Stage.ELECTING
_LATER = (
    *(t.EndKnown, t.Hung, t.Evidence, t.Examined, t.RanksFailed, t.Spent, t.Succeeded),
    *(t.Ready, t.Warmth, t.Asked, t.NodeUnfit, t.WarnJob, t.EndJob),
)
_PROBE_S = 1.0
_MOST_HELD = 1_000  # messages of one agent that wait


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

    def __init__(
        self, s: CoordinatorSettings, out: Outbox, roster: Roster, ending: Ending, now: float
    ) -> None:
        self._s, self._out, self._roster, self._ending = s, out, roster, ending
        self._job, self._quorum = roster.job, roster.quorum
        self._held: dict[
            str, list[Any]
        ] = {}  # node_id -> its registration, and its messages after that
        self._voters: dict[str, str] = {}  # key -> node_id
        self._known = {peer.key: peer for peer in s.known}  # where nodes of the job listen, by key
        self._proven: dict[str, t.Peer] = {}  # agents that are dead by our own probes, by key
        self._planless: dict[str, t.Node] = {}  # nodes that have had no plan, by node_id
        self._led_at: float | None = (
            None  # until then a coordinator before this one may have been heard
        )
        self._led_term = 0  # the last term in which one was
        self._probe_at: float | None = None
        self._give_up_at = (
            now + s.quorum_timeout_s if s.quorum_timeout_s else None
        )  # no quorum will come

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
        peers = {peer.key: peer for peer in (plan.leader, *plan.successors) if peer is not None}
        if (plan.term, plan.cycle) > quorum.offer:
            self._known = peers
        elif (plan.term, plan.cycle) == quorum.offer:
            self._known.update(peers)
        quorum.learn(plan, [old for old, peer in self._proven.items() if peer == peers.get(old)])
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
            now_idle = replace(held[0].message, doing=t.Activity.IDLE, port=event.message.port)
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
        self._job.raised(event.term)
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
        return (
            (self._quorum.electors - len(dead)) // 2 + 1 + sum(key in dead for key in self._voters)
        )

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
        told = [
            held[0].message.end for held in self._held.values() if held[0].message.end is not None
        ]
        end = t.Finish(
            ExitCode.TOO_FEW_NODES,
            f"{why}; {missing(members.keys_of_nodes, s.expected, self._least)}",
        )
        return self._ending.decide(told[0] if told else end)

    # --- the end of the election ----------------------------------------------------------------------------

    def _win(self, now: float) -> Stage:
        self._quorum.won(self._voters, self._known.values(), now)
        self._fence_the_missing(now)
        self._out.append(ev.Won())
        # First all registrations: no message finds a member missing.
        self._out.post(*(events[0] for events in self._held.values()))
        self._out.post(*(event for events in self._held.values() for event in events[1:]))
        return Stage.JOINING

    def _fence_the_missing(self, now: float) -> None:
        """Nodes that did not register may run ranks until their leases are over."""
        if self._led_at is None:
            return
        quorum = self._quorum
        voters = self._voters
        last_leader = self._s.last_leader
        if last_leader in quorum.proven.union(voters):
            last_leader = ""
        lease_s = self._s.lease_s + FENCE_MARGIN_S
        # Those that are proven dead may have led others until they died.
        led_at = self._led_at if quorum.enough_without(self._proven, voters) else now
        # Another node may have heard the leader for so much longer.
        others_until = self._led_at + lease_s + MEMBER_SHARE * self._s.lease_s
        # A plan that no voter has got may have given ranks to an agent that is back: no proof is about that life.
        unsure = not self._s.one_life and self._led_term > quorum.offer[0] > 0
        quorum.fence_the_missing(last_leader, led_at + lease_s, others_until, unsure)
        quorum.unfence(voters)
