"""A new coordinator finds agents that run a cycle of an older term: it carries on with that cycle, or gives it up."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.verdict import first_cause
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.roster import Assignment, Roster, Slot
from nvrx_slurm.core.coordinator.states import Arrived, Available, Cleared, CoordinatorSettings, Left, Stage, Timer
from nvrx_slurm.core.machine import Entered, Outbox, Say, rows

_MINE = Stage.TAKEOVER
_DECIDED = (Stage.RUNNING, Stage.STOPPING)


class Inherited:
    """The last cycle of which any agent has a plan, and the agents with a group rank in it. O(1) per message."""

    def __init__(self) -> None:
        self.last_cycle = -1
        self.plan: t.Plan | None = None  # of that cycle, from an agent that was active in it
        self.places: dict[int, str] = {}  # group rank -> node_id, of that cycle only
        self.running = Assignment()  # of the agents that still run it, or are done with it

    def learn(self, plan: t.Plan) -> list[str]:
        """Note a plan that an agent has seen; returns the runners of a cycle that turns out not to be the last one."""
        if plan.cycle <= self.last_cycle:
            return []
        self.last_cycle = plan.cycle
        overtaken = sorted(self.running.places.values())
        self.forget()
        return overtaken

    def place(self, message: t.Register) -> t.Plan | None:
        """Note an agent's group rank in the last cycle; its plan, or None if it has none or another agent has it."""
        plan, node = message.plan, message.node
        if plan is None or not plan.active or plan.cycle != self.last_cycle:
            return None
        return plan if self.places.setdefault(plan.group_rank, node.node_id) == node.node_id else None

    def claim(self, message: t.Register) -> bool:
        """The same for an agent that may run on; whether it has that group rank."""
        plan, node = self.place(message), message.node
        if plan is None:
            return False
        self.plan = plan
        if message.doing in (t.Activity.RUNNING, t.Activity.SUCCEEDED):
            self.running.add(plan.group_rank, Slot(node.node_id, plan.rank_offset, node.nproc))
            if message.doing is t.Activity.SUCCEEDED:
                self.finished(node.node_id, message.early)
            elif message.faults:
                self.failed(node.node_id)
        return True

    def finished(self, node_id: str, early: bool) -> None:
        """This agent is done with the last cycle."""
        group_rank = self.running.group_ranks.get(node_id)
        if group_rank is not None:
            self.running.succeeded.add(group_rank)
            self.running.early = self.running.early or early

    def failed(self, node_id: str) -> None:
        """This agent runs on with a fault."""
        group_rank = self.running.group_ranks.get(node_id)
        if group_rank is not None:
            self.running.broken.add(group_rank)

    def complete(self, sizes: Collection[int]) -> bool:
        """Whether all of the last cycle is here and goes on, and it is of a size that we would plan."""
        return self.plan is not None and len(self.running) == self.plan.active_nodes and len(self.running) in sizes

    def assignment(self, term: int, history: t.History) -> Assignment:
        """That cycle, carried on in `term`. A node that is not here has no slot in it, but keeps its place."""
        assert self.plan is not None
        self.running.shared = replace(self.plan, term=term, history=history, group_rank=-1, rank_offset=-1)
        self.running.places = self.places
        return self.running

    def forget(self) -> None:
        """That cycle is over, or carried on."""
        self.plan, self.places, self.running = None, {}, Assignment()


class Takeover:
    """Owns the state in which agents with workers of an older term are here."""

    states = (_MINE,)
    table = rows(
        (_MINE, Entered, "on_entered", _DECIDED, "all of the cycle may be here, or nothing of it"),
        (_MINE, Arrived, "on_arrived", (*_DECIDED, Stage.JOINING), "one more of that cycle, or of an older one"),
        (_MINE, Left, "on_left", (Stage.JOINING,), "that node cannot carry on"),
        (_MINE, Available, "on_available", (Stage.JOINING,), "that node cannot carry on"),
        (_MINE, Cleared, "on_cleared", _DECIDED, "there may be nobody to wait for"),
        (_MINE, Timer, "on_timer", _DECIDED, "carry on without the missing nodes, or give up"),
        (_MINE, t.RanksFailed, "on_failed", (Stage.STOPPING,), "of the cycle to carry on with?"),
        (_MINE, t.Succeeded, "on_succeeded", (), "the cycle to carry on with is done on one node"),
    )

    def __init__(self, s: CoordinatorSettings, out: Outbox, roster: Roster) -> None:
        self._s, self._out, self._roster = s, out, roster
        self._job, self._ledger, self._budget = roster.job, roster.ledger, roster.budget
        self._min_healthy = s.policy is t.RestartPolicy.MIN_HEALTHY
        self._wait_until = 0.0

    def on_entered(self, event: Entered, now: float) -> Stage | None:
        """Agents run the last cycle, or only know of it."""
        return self._carry_on_if_complete(now) if self._job.inherited.running else self._give_up(now)

    def on_arrived(self, event: Arrived, now: float) -> Stage | None:
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

    def on_cleared(self, event: Cleared, now: float) -> Stage | None:
        """No node is missing that could still come: there is nothing to wait for."""
        return self._decide_if_all_are_here(now)

    def on_left(self, event: Left, now: float) -> Stage | None:
        """One fewer."""
        return self._without(event.node.node_id)

    def on_available(self, event: Available, now: float) -> Stage | None:
        """A node is ready for another cycle."""
        return self._without(event.node_id)

    def _without(self, node_id: str) -> Stage | None:
        running = self._job.inherited.running
        running.remove(node_id)
        return None if running else Stage.JOINING

    def on_failed(self, event: ev.FromAgent[t.RanksFailed], now: float) -> Stage | None:
        """The cycle to carry on with has failed; any other message is about a cycle that is over."""
        inherited = self._job.inherited
        if event.node_id not in inherited.running.group_ranks:
            return None
        self._ledger.add(event.message.faults, self._job.cycle, now)
        if not self._min_healthy:
            return self._give_up(now)
        inherited.failed(event.node_id)
        return None

    def on_succeeded(self, event: ev.FromAgent[t.Succeeded], now: float) -> None:
        """One node is done with the cycle to carry on with."""
        self._job.inherited.finished(event.node_id, event.message.early)

    def timer_at(self, state: Stage) -> float:
        """How long to wait for the nodes that are missing."""
        return self._wait_until

    def on_timer(self, event: Timer, now: float) -> Stage:
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
        self._ledger.cycle_began([], now)
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
