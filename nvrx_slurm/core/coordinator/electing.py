"""A coordinator that may not act yet: agents register with it, and their registrations are votes."""

from __future__ import annotations

from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.ending import Ending
from nvrx_slurm.core.coordinator.members import Use, missing
from nvrx_slurm.core.coordinator.part import Part
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.states import Stage
from nvrx_slurm.core.election.events import FENCE_MARGIN_S, MEMBER_SHARE
from nvrx_slurm.core.election.quorum import peer_key
from nvrx_slurm.core.machine import Tick, earliest, rows
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode

_ELECTING = Stage.ELECTING
_LATER = (
    *(t.EndKnown, t.Hung, t.Evidence, t.Examined, t.RanksFailed, t.Spent, t.Succeeded),
    *(t.Ready, t.Warmth, t.Loaded, t.Asked, t.NodeUnfit, t.WarnJob, t.EndJob),
)
_PROBE_S = 1.0
_MOST_HELD = 1_000  # messages of one agent that wait


class Electing(Part):
    """Owns the state before the first quorum. Messages wait; they are handled once the election is won."""

    table = rows(
        (_ELECTING, ev.Joined, "on_joined", (Stage.JOINING,), "a vote"),
        (_ELECTING, ev.Lost, "on_lost", (), "a vote less"),
        (_ELECTING, _LATER, "hold", (), "for the time after the election"),
        (_ELECTING, ev.ProvenDead, "on_dead", (Stage.JOINING,), "it is not counted any more"),
        (_ELECTING, ev.Raised, "on_raised", (), "stand for a later term"),
        (_ELECTING, (*ev.ANSWERS, t.Counted), "ignore", (), "nothing was asked yet"),
        (
            _ELECTING,
            Tick,
            "on_tick",
            (Stage.FINISHED,),
            "which of the nodes that are missing are dead?",
        ),
    )

    def __init__(self, roster: Roster, ending: Ending, now: float) -> None:
        super().__init__(roster)
        self._ending = ending
        self._held: dict[
            str, list[Any]
        ] = {}  # node_id -> its registration, and its messages after that
        self._voters: dict[str, str] = {}  # key -> node_id
        self._known = {
            peer.key: peer for peer in self._s.known
        }  # where nodes of the job listen, by key
        self._proven: dict[str, t.Peer] = {}  # agents that are dead by our own probes, by key
        self._planless: dict[str, t.Node] = {}  # nodes that have had no plan, by node_id
        self._led_at: float | None = (
            None  # until then a coordinator before this one may have been heard
        )
        self._led_term = 0  # the last term in which one was
        self._probe_at: float | None = None
        self._give_up_at: float | None = None  # no quorum will come
        if self._s.quorum_timeout_s:
            self._give_up_at = now + self._s.quorum_timeout_s

    def on_joined(self, event: ev.Joined, now: float) -> Stage | None:
        """One vote more. Its plan says which nodes may be missing.

        What it says of the job's past is kept, also if the voter leaves: the number of a cycle is not used again.
        """
        message = event.message
        node = event.message.node
        quorum = self._quorum
        self._voters[peer_key(node)] = node.node_id
        self._held[node.node_id] = [event]
        if message.led_s >= 0.0:
            led_at = now - message.led_s
            if self._led_at is None or led_at > self._led_at:
                self._led_at = led_at
            self._led_term = max(self._led_term, message.led_term)
        if message.plan is not None:
            self._roster.inherit(message.plan)
            self._job.inherited.place(message)
            self._learn(message.plan, peer_key(node))
        elif node.node_id not in self._planless:
            self._planless[node.node_id] = node
            quorum.newcomer(node, message.votes)
        some_had_a_plan = quorum.offer[0] > 0
        if some_had_a_plan:
            for late in self._planless.values():
                quorum.newcomer(late)
        if quorum.enough(self._voters):
            return self._win(now)
        if self._probe_at is None:
            self._probe(now)
        return None

    def _learn(self, plan: t.Plan, key: str) -> None:
        """The newest plan counts: it says which nodes have a vote, and where they listen."""
        quorum = self._quorum
        offer = (plan.term, plan.cycle)
        peers: dict[str, t.Peer] = {}
        for peer in (plan.leader, *plan.successors):
            if peer is not None:
                peers[peer.key] = peer
        proven = [old for old, peer in self._proven.items() if peer == peers.get(old)]
        if offer > quorum.offer:
            self._known = peers
        elif offer == quorum.offer:
            self._known.update(peers)
        quorum.learn(plan, proven)
        quorum.knows(key, *offer)

    def on_lost(self, event: ev.Lost, now: float) -> None:
        """It votes for another candidate, or is dead."""
        held = self._held.pop(event.node_id, None)
        if held is None:
            return
        key = peer_key(held[0].message.node)
        if self._voters.get(key) == event.node_id:
            del self._voters[key]

    def hold(self, event: ev.FromAgent[Any], now: float) -> None:
        """An agent reports while no coordinator may act. `_MOST_HELD` bounds what it can say before that."""
        held = self._held.get(event.node_id)
        if held is None:
            return
        message = event.message
        if isinstance(message, t.Ready):
            now_idle = replace(
                held[0].message, doing=t.Activity.IDLE, port=message.port, held=message.held
            )
            held[0] = ev.Joined(now_idle)
        elif len(held) < _MOST_HELD:
            held.append(event)

    def on_dead(self, event: ev.ProvenDead, now: float) -> Stage | None:
        """One node fewer to ask for a vote."""
        peer = event.peer
        quorum = self._quorum
        if peer.key in self._voters or not quorum.is_proof(peer, now):
            return None
        self._proven[peer.key] = peer
        quorum.died(peer.key, self._voters)
        return self._win(now) if quorum.enough(self._voters) else None

    def on_raised(self, event: ev.Raised, now: float) -> None:
        """An agent has voted for a later term. A vote is for one term: all others vote again."""
        me = self._s.peer
        self._job.raised(event.term)
        for key, node_id in list(self._voters.items()):
            if me is not None and key != me.key:
                self._send(node_id, t.Elsewhere(event.term, me, False))
                self._out.append(ev.Drop(node_id))
                del self._voters[key]
                del self._held[node_id]

    def deadline(self) -> float | None:
        """When to probe again, or to give up. The end of the allocation does not matter yet."""
        return earliest(self._probe_at, self._give_up_at)

    def on_tick(self, event: Tick, now: float) -> Stage | None:
        """Nodes that did not register may have died since. In the end those that did are told why nothing begins."""
        give_up_at = self._give_up_at
        probe_at = self._probe_at
        if give_up_at is not None and now >= give_up_at:
            return self._give_up()
        if probe_at is not None and now >= probe_at:
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
        """How many votes are a majority, where some voters are not counted."""
        dead = self._quorum.dead
        living = self._quorum.electors - len(dead)
        uncounted = sum(key in dead for key in self._voters)
        return living // 2 + 1 + uncounted

    def _probe(self, now: float) -> None:
        self._probe_at = now + _PROBE_S
        known_of = self._quorum.proven.union(self._voters)
        for key, peer in self._known.items():
            if key not in known_of:
                self._roster.probe(peer)

    def _give_up(self) -> Stage:
        """The end that a voter knows, or that of a job without a majority."""
        here = [held[0].message for held in self._held.values()]
        for message in here:
            self._members.put(message.node, message.port, Use.READY, message.held)
        for message in here:
            if message.end is not None:
                return self._ending.decide(message.end)
        why = f"no majority of the job's nodes came within {self._s.quorum_timeout_s:g} s"
        some = missing(self._members.keys_of_nodes, self._s.expected, self._least)
        return self._ending.decide(t.Finish(ExitCode.TOO_FEW_NODES, f"{why}; {some}"))

    # --- the end of the election ----------------------------------------------------------------------------

    def _win(self, now: float) -> Stage:
        self._quorum.won(self._voters, self._known.values(), now)
        self._fence_the_missing(now)
        self._out.append(ev.Won())
        # First all registrations: no message finds a member missing.
        held = self._held.values()
        self._out.post(*(events[0] for events in held))
        for events in held:
            self._out.post(*events[1:])
        return Stage.JOINING

    def _fence_the_missing(self, now: float) -> None:
        """Nodes that did not register may run ranks until their leases are over."""
        if self._led_at is None:
            return
        quorum = self._quorum
        voters = self._voters
        known_of = quorum.proven.union(voters)
        last_leader = self._s.last_leader
        if last_leader in known_of:
            last_leader = ""
        lease_s = self._s.lease_s + FENCE_MARGIN_S
        # Those that are proven dead may have led others until they died.
        led_at = self._led_at if quorum.enough_without(self._proven, voters) else now
        # Another node may have heard the leader for so much longer.
        others_until = self._led_at + lease_s + MEMBER_SHARE * self._s.lease_s
        # A plan that no voter has got may have given ranks to an agent that is back: no proof is about that life.
        unsure = not self._s.one_life and self._led_term > quorum.offer[0] > 0
        quorum.fence_the_missing(
            last_leader,
            led_at + lease_s,
            others_until,
            unsure,
        )
        quorum.unfence(voters)
