"""Before a coordinator may act: agents register with it, and their registrations are votes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.job_data import FOLLOWS, OVER, Phase, rows
from nvrx_slurm.core.job.members import READY
from nvrx_slurm.core.job.part import JobPart
from nvrx_slurm.core.job.quorum import peer_key
from nvrx_slurm.core.machine import Tick, earliest
from nvrx_slurm.errors import ExitCode

_MINE = (Phase.ELECTING,)
_LATER = (t.Ended, t.Hung, t.Evidence, t.Failed, t.Succeeded, t.Stopped, t.Asked, t.WarnJob, t.EndJob)
_PROBE_S = 1.0
_MOST = 1_000  # messages of one agent that wait


class Electing(JobPart):
    """Owns the state before the first quorum. Messages wait; they are handled once the election is won."""

    states = _MINE
    table = rows(
        (_MINE, ev.Joined, "on_joined", FOLLOWS[Phase.ELECTING], "a vote"),
        (_MINE, ev.Lost, "on_lost", (), "a vote less"),
        (_MINE, _LATER, "hold", (), "for the time after the election"),
        (_MINE, ev.ProvenDead, "on_dead", FOLLOWS[Phase.ELECTING], "it is not counted any more"),
        (_MINE, ev.Raised, "on_raised", (), "stand for a later term"),
        (_MINE, (ev.TimeLeft, ev.ProgressRead, ev.Advised), "ignore", (), "nothing was asked yet"),
        (_MINE, Tick, "on_tick", OVER, "which of the nodes that are missing are dead?"),
    )

    held: dict[str, list[Any]] = {}  # node_id -> its registration, and its messages after that
    voters: dict[str, str] = {}  # key -> node_id
    known: dict[str, t.Peer] = {}  # where nodes of the job listen, by key
    proven: dict[str, t.Peer] = {}  # agents that are dead by our own probes, by key
    planless: dict[str, t.Node] = {}  # nodes that have had no plan, by node_id
    probe_at: float | None = None
    give_up_at: float | None = None  # no quorum will come

    def enter(self, now: float) -> None:
        """This node stands."""
        self.held, self.voters, self.proven, self.planless = {}, {}, {}, {}
        wait_s = self.job.settings.quorum_timeout_s
        self.give_up_at = now + wait_s if wait_s else None
        self.known = {peer.key: peer for peer in self.job.settings.known}

    def on_joined(self, event: ev.Joined, now: float) -> None:
        """One vote more. Its plan says which nodes may be missing, and which term ours has to be above.

        What it says of the job's past is kept, also if the voter leaves: the number of a cycle is not used again.
        """
        job, message = self.job, event.message
        self.voters[peer_key(message.node)] = message.node.node_id
        self.held[message.node.node_id] = [event]
        if message.plan is not None:
            job.inherit(message.plan)
            job.inherited.place(message)
            self._learn(message.plan, peer_key(message.node))
        elif message.node.node_id not in self.planless:
            self.planless[message.node.node_id] = message.node
        if job.quorum.offer[0]:
            for node in self.planless.values():
                job.quorum.newcomer(node)
        if not self._win_if_enough(now) and self.probe_at is None:
            self._probe(now)

    def _learn(self, plan: t.Plan, key: str) -> None:
        """The newest plan counts: it says which nodes have a vote, and where they listen."""
        job, quorum = self.job, self.job.quorum
        quorum.electors = max(quorum.electors, plan.electors)
        if plan.term >= job.settings.term:
            job.settings = replace(job.settings, term=plan.term + 1)
        peers = {peer.key: peer for peer in (plan.leader, *plan.successors) if peer is not None}
        if (plan.term, plan.cycle) > quorum.offer:
            proven = {old for old in quorum.dead if old in self.proven and self.proven[old] == peers.get(old)}
            quorum.learn(plan)
            quorum.dead |= proven
            quorum.returned -= proven
            self.known = peers
        elif (plan.term, plan.cycle) == quorum.offer:
            quorum.dead.update(plan.dead)
            quorum.returned &= set(plan.returned)
            self.known.update(peers)
        quorum.knows(key, plan.term, plan.cycle)

    def on_lost(self, event: ev.Lost, now: float) -> None:
        """It votes for another candidate, or is dead."""
        held = self.held.pop(event.node_id, None)
        if held is not None:
            key = peer_key(held[0].message.node)
            if self.voters.get(key) == event.node_id:
                del self.voters[key]

    def hold(self, event: ev.FromAgent[Any], now: float) -> None:
        """An agent reports while no coordinator may act. `_MOST` bounds what it can say before that."""
        held = self.held.get(event.node_id)
        if held is not None and isinstance(event.message, t.Stopped):
            now_idle = replace(held[0].message, doing=t.Doing.IDLE, port=event.message.port)
            held[0] = ev.Joined(now_idle)
        elif held is not None and len(held) < _MOST:
            held.append(event)

    def on_dead(self, event: ev.ProvenDead, now: float) -> None:
        """One node fewer to ask for a vote."""
        if event.peer.key not in self.voters and self.job.quorum.is_proof(event.peer):
            self.proven[event.peer.key] = event.peer
            self.job.quorum.died(event.peer.key, self.voters)
            self._win_if_enough(now)

    def on_raised(self, event: ev.Raised, now: float) -> None:
        """An agent has voted for a later term, for which this node is the candidate, too."""
        self.job.settings = replace(self.job.settings, term=max(self.job.settings.term, event.term))

    def timer_at(self) -> float | None:
        """When to probe again, or to give up."""
        return earliest(self.probe_at, self.give_up_at)

    def deadline(self) -> float | None:
        """The end of the allocation does not matter yet."""
        return self.timer_at()

    def on_tick(self, event: Tick, now: float) -> None:
        """Nodes that did not register may have died since. In the end those that did are told why nothing begins."""
        if self.give_up_at is not None and now >= self.give_up_at:
            self._give_up(now)
        elif self.probe_at is not None and now >= self.probe_at:
            self._probe(now)

    def _probe(self, now: float) -> None:
        self.probe_at = now + _PROBE_S
        for key, peer in self.known.items():
            if key not in self.voters and key not in self.job.quorum.proven:
                self.probe(peer)

    def _give_up(self, now: float) -> None:
        job = self.job
        for held in self.held.values():
            job.members.put(held[0].message.node, held[0].message.port, READY)
        least = (job.quorum.electors - len(job.quorum.dead)) // 2 + 1
        why = f"no majority of the job's nodes came within {job.settings.quorum_timeout_s:g} s"
        missing = job.members.missing(job.settings.expected, least)
        told = [held[0].message.end for held in self.held.values() if held[0].message.end is not None]
        self.finish(told[0] if told else t.Finish(ExitCode.TOO_FEW_NODES, f"{why}; {missing}"), now)

    # --- the end of the election ----------------------------------------------------------------------------

    def _win_if_enough(self, now: float) -> bool:
        quorum = self.job.quorum
        if not quorum.enough(self.voters):
            return False
        quorum.elected, quorum.missed_at = True, now
        self._fence_the_missing(now)
        self.core.emit(ev.Won())
        held, self.held = self.held, {}
        self.core.go(Phase.JOINING, now)
        for events in held.values():  # first all registrations: no message finds a member missing
            self.core.handle(events[0], now)
        for events in held.values():
            for event in events[1:]:
                if self.core.state is not Phase.CLOSED:
                    self.core.handle(event, now)
        return True

    def _fence_the_missing(self, now: float) -> None:
        """Nodes that did not register may run ranks until their leases are over."""
        s, quorum = self.job.settings, self.job.quorum
        missing = quorum.missing(self.voters)
        quorum.absent = tuple(peer for key, peer in self.known.items() if key not in self.voters)
        leader = s.last_leader
        only_leader = missing == 1 and leader and leader not in self.voters and leader not in quorum.proven
        if missing and quorum.offer[0]:
            quorum.fence_until = now + (s.leader_fence_s if only_leader else s.fence_s)
