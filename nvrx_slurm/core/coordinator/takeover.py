"""Agents run a cycle of an older term: this coordinator carries on with that cycle, or gives it up."""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.part import Part
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.states import Stage
from nvrx_slurm.core.machine import Entered, rows

_MINE = Stage.TAKEOVER
_DECIDED = (Stage.RUNNING, Stage.STOPPING)


class Takeover(Part):
    """Owns the state in which agents with workers of an older term are here."""

    states = (_MINE,)
    table = rows(
        (_MINE, Entered, "on_entered", _DECIDED, "all of the cycle may be here, or nothing of it"),
        (
            _MINE,
            ev.Arrived,
            "on_arrived",
            (*_DECIDED, Stage.JOINING),
            "one more of that cycle, or of an older one",
        ),
        (_MINE, (ev.Left, ev.Available), "on_gone", (Stage.JOINING,), "it cannot carry on"),
        (_MINE, ev.Cleared, "on_cleared", _DECIDED, "there may be nobody to wait for"),
        (_MINE, ev.Timer, "on_timer", _DECIDED, "carry on without the missing nodes, or give up"),
        (_MINE, t.RanksFailed, "on_failed", (Stage.STOPPING,), "of the cycle to carry on with?"),
        (_MINE, t.Succeeded, "on_succeeded", (), "the cycle to carry on with is done on one node"),
    )

    def __init__(self, roster: Roster) -> None:
        super().__init__(roster)
        self._min_healthy = self._s.policy is t.RestartPolicy.MIN_HEALTHY
        self._wait_until = 0.0

    def on_entered(self, event: Entered, now: float) -> Stage | None:
        """Agents run the last cycle, or only know of it."""
        if self._job.inherited.running:
            return self._carry_on_if_complete(now)
        return self._give_up(now)

    def on_arrived(self, event: ev.Arrived, now: float) -> Stage | None:
        """One more of the last cycle, or of an older one, or a spare."""
        message = event.message
        inherited = self._job.inherited
        mine = inherited.claim(message)
        to: Stage | None = None
        if mine and message.busy:
            to = self._carry_on_if_complete(now)
        elif mine:
            self._ledger.add(message.faults, self._job.cycle, now)
        else:
            self._roster.stop_old_workers(message, now)
        if to is not None:
            return to
        if not inherited.running:
            return Stage.JOINING
        return self._decide_if_all_are_here(now)

    def on_cleared(self, event: ev.Cleared, now: float) -> Stage | None:
        """No node is missing that could still come: there is nothing to wait for."""
        return self._decide_if_all_are_here(now)

    def on_gone(self, event: ev.Left | ev.Available, now: float) -> Stage | None:
        """A node is lost, or ready for another cycle."""
        inherited = self._job.inherited
        inherited.without(event.node_id)
        return None if inherited.running else Stage.JOINING

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

    def on_timer(self, event: ev.Timer, now: float) -> Stage:
        """The others do not come."""
        return self._decide(now)

    # --- what becomes of that cycle -------------------------------------------------------------------------

    def _decide_if_all_are_here(self, now: float) -> Stage | None:
        quorum = self._quorum
        here = self._members.keys_of_nodes
        some_may_come = quorum.missing(here)
        if quorum.needed and not some_may_come:
            return self._decide(now)
        return None

    @property
    def _enough_are_good(self) -> bool:
        return self._job.inherited.running.good >= self._s.min_nodes

    def _decide(self, now: float) -> Stage:
        """Under min-healthy a cycle goes on if enough of its nodes are good."""
        if self._min_healthy and self._enough_are_good:
            return self._carry_on(now)
        return self._give_up(now)

    def _carry_on_if_complete(self, now: float) -> Stage | None:
        """Once every group rank of the cycle has registered, it goes on under this term."""
        fewest = self._s.min_nodes
        most = max(fewest, self._s.max_nodes) if self._min_healthy else fewest
        complete = self._job.inherited.complete(range(fewest, most + 1))
        if complete and (self._enough_are_good or not self._min_healthy):
            return self._carry_on(now)
        until = now + self._s.last_call_s
        if self._quorum.needed:  # after its fence a missing node runs no ranks to carry on with
            until = min(until, self._quorum.fenced_until())
        self._wait_until = until
        return self._decide_if_all_are_here(now)

    def _carry_on(self, now: float) -> Stage:
        job = self._job
        history = self._ledger.complete(self._budget.history)
        job.carry_on(history)
        self._roster.share()
        self._say(f"term {job.term} carries on with cycle {job.cycle}")
        for node in self._members.in_order():
            self._roster.send_plan(node.node_id)
        return Stage.RUNNING

    def _give_up(self, now: float) -> Stage:
        """Not all nodes that ran the cycle came to this coordinator in time: that is a fault of that cycle."""
        ledger = self._ledger
        job = self._job
        here = self._members.keys_of_nodes
        job.give_up()
        if not ledger.faults:
            gone = [peer for peer in self._quorum.absent if peer.key not in here]
            unknown = t.Peer("", "", "", 0)
            faults = map(_lost, gone or [unknown])
            ledger.add(faults, job.cycle, ledger.started_at)
        ledger.blame()
        return Stage.STOPPING


def _lost(peer: t.Peer) -> t.RankFault:
    rank = int(peer.key) if peer.key.isdecimal() else -1
    what = "it" if peer.host else "a node of the last cycle"
    why = f"{what} did not register with the new coordinator"
    return t.RankFault(t.FaultKind.NODE_LOST, peer.host, rank, message=why)
