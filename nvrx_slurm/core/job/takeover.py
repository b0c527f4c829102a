"""A new coordinator finds agents that run a cycle of an older term: it carries on with that cycle, or gives it up."""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.verdict import first_cause
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.assignment import Assignment, Slot
from nvrx_slurm.core.job.job_data import LIVE, Phase, rows
from nvrx_slurm.core.job.part import JobPart
from nvrx_slurm.core.machine import Tick

_MINE = (Phase.TAKEOVER,)


class Takeover(JobPart):
    """Owns the state in which agents with workers of an older term are here."""

    states = _MINE
    table = rows(
        (_MINE, t.Failed, "on_failed", (*LIVE, Phase.FINISHED), "of the cycle to carry on with?"),
        (_MINE, t.Succeeded, "on_succeeded", (), "the cycle to carry on with is done on one node"),
        (_MINE, t.Stopped, "on_stopped", (*LIVE, Phase.FINISHED), "that node cannot carry on"),
        (_MINE, Tick, "on_tick", (*LIVE, Phase.FINISHED), "carry on without the missing nodes, or give up"),
    )

    wait_until: float = 0.0

    def enter(self, now: float) -> None:
        """Agents run the last cycle, or only know of it."""
        if self.job.inherited.running:
            self._carry_on_if_complete(now)
        else:
            self._give_up(now)

    def joined(self, message: t.Register, now: float) -> None:
        """One more of the last cycle, or of an older one, or a spare."""
        mine = self.job.inherited.claim(message)
        if mine and message.busy:
            self._carry_on_if_complete(now)
        elif mine:
            self.job.add_faults(message.faults, now)
        else:
            self.stop_old_workers(message, now)
        self._leave_if_nothing_runs(now)
        self.unfenced(now)

    def unfenced(self, now: float) -> None:
        """No node is missing that could still come: there is nothing to wait for."""
        quorum, here = self.job.quorum, self.job.members.keys_of_nodes
        if self.core.state is Phase.TAKEOVER and quorum.needed and not quorum.missing(here):
            self.on_timer(now)

    def left(self, node: t.Node, fault: t.RankFault, now: float) -> None:
        """One fewer."""
        self.stopped(node.node_id, now)

    def on_failed(self, event: ev.FromAgent[t.Failed], now: float) -> None:
        """The cycle to carry on with has failed; any other message is about a cycle that is over."""
        if self.job.inherited.running.group_rank(event.node_id) is None:
            return
        self.job.add_faults(event.message.faults, now)
        if self.job.min_healthy:
            self.job.inherited.failed(event.node_id)
        else:
            self._give_up(now)

    def on_succeeded(self, event: ev.FromAgent[t.Succeeded], now: float) -> None:
        """One node is done with the cycle to carry on with."""
        self.job.inherited.finished(event.node_id, event.message.early)

    def stopped(self, node_id: str, now: float) -> None:
        """A node is ready for another cycle."""
        self.job.inherited.running.remove(node_id)
        self._leave_if_nothing_runs(now)

    def timer_at(self) -> float:
        """How long to wait for the nodes that are missing."""
        return self.wait_until

    def on_timer(self, now: float) -> None:
        """Under min-healthy a cycle goes on if enough of its nodes are good."""
        if self.job.min_healthy and self.job.inherited.running.good >= self.job.settings.min_nodes:
            self._carry_on(now)
        else:
            self._give_up(now)

    # --- what becomes of that cycle -------------------------------------------------------------------------

    def _carry_on_if_complete(self, now: float) -> None:
        """Once every group rank of the cycle has registered, it goes on under this term."""
        s, inherited = self.job.settings, self.job.inherited
        sizes = range(s.min_nodes, max(s.min_nodes, s.max_nodes) + 1) if self.job.min_healthy else (s.min_nodes,)
        if inherited.complete(sizes) and (not self.job.min_healthy or inherited.running.good >= s.min_nodes):
            self._carry_on(now)
        else:
            self.wait_until = now + s.last_call_s
            if self.job.quorum.needed:  # after its fence a missing node runs no ranks to carry on with
                self.wait_until = min(self.wait_until, self.job.quorum.fenced_until())
            self.unfenced(now)

    def _carry_on(self, now: float) -> None:
        job = self.job
        job.fresh = False
        job.assignment = job.inherited.assignment(job.settings.term, job.history)
        job.assignment.shared = self.elected(job.assignment.plan_for(""))
        self.note_dead()
        job.inherited.forget()
        self.say(f"term {job.settings.term} carries on with cycle {job.cycle}")
        for node in job.members.in_order():
            self.send_plan(node.node_id)
        job.report.cycle_began([], now)
        self.core.go(Phase.RUNNING, now)

    def _give_up(self, now: float) -> None:
        """Not all nodes that ran the cycle came to this coordinator in time: that is a fault of that cycle."""
        job = self.job
        job.fresh = False
        job.assignment = Assignment(None, {g: Slot(node_id, 0, 0) for g, node_id in job.inherited.places.items()})
        job.inherited.forget()
        if not job.faults:
            gone = [peer for peer in job.quorum.absent if peer.key not in job.members.keys_of_nodes]
            job.add_faults(map(_lost, gone or (t.Peer("", "", "", 0),)), job.report.started_at)
        self.fail_cycle(first_cause(job.faults), now)

    def _leave_if_nothing_runs(self, now: float) -> None:
        if self.core.state is Phase.TAKEOVER and not self.job.inherited.running:
            self.core.go(Phase.JOINING, now)


def _lost(peer: t.Peer) -> t.RankFault:
    rank = int(peer.key) if peer.key.isdecimal() else -1
    what = "it" if peer.host else "a node of the last cycle"
    why = f"{what} did not register with the new coordinator"
    return t.RankFault(t.FaultKind.NODE_LOST, peer.host, rank, message=why)
