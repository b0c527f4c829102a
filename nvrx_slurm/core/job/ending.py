"""The end is decided: all agents hear it and leave."""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.verdict import first_cause
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.job_data import Phase, rows
from nvrx_slurm.core.job.members import READY
from nvrx_slurm.core.job.part import JobPart
from nvrx_slurm.core.machine import Tick
from nvrx_slurm.errors import ExitCode

_MINE = (Phase.FINISHED, Phase.RETURNING)
_NAMES_SHOWN = 16
_TOO_LATE = (
    ev.Raised,
    t.Hung,
    t.Evidence,
    t.Succeeded,
    t.Stopped,
    t.Asked,
    t.WarnJob,
    t.EndJob,
    ev.TimeLeft,
    ev.ProgressRead,
    ev.Advised,
)


class Ending(JobPart):
    """Owns the states after the decision. `job.end` is that decision."""

    states = (*_MINE, Phase.CLOSED)
    table = rows(
        (_MINE, ev.Joined, "on_joined", (Phase.FINISHED,), "it learns the end, too"),
        (_MINE, ev.Lost, "on_lost", (*_MINE, Phase.CLOSED), "it has left"),
        (_MINE, t.Ended, "on_ended", (), "it knows the end; when all do, they leave"),
        (_MINE, t.Failed, "more_faults", (), "for the first cause and the failure table"),
        (_MINE, Tick, "on_tick", (Phase.CLOSED,), "the end waits for a bounded time"),
        (_MINE, ev.ProvenDead, "on_dead", (), "it is not waited for"),
        (_MINE, _TOO_LATE, "ignore", (), "the end is decided"),
    )

    leave_by: float = 0.0
    return_by: float = 0.0
    stay_until: float = 0.0  # agents stay for a node that was missed a moment ago
    ended: set[str] = set()  # node_ids of agents that have no workers and know the end

    def enter(self, now: float) -> None:
        """Tell all agents."""
        assert self.job.end is not None
        self.ended = set()
        self.leave_by = now + self.job.settings.drain_timeout_s
        quorum = self.job.quorum
        self.stay_until = quorum.missed_at + self.job.settings.return_grace_s if quorum.needed else now
        self.send_all(self.job.end)
        self._close_if_alone(now)

    def on_joined(self, event: ev.Joined, now: float) -> None:
        """A late agent learns that the job is over."""
        assert self.job.end is not None
        node = event.message.node
        self.job.lost_at.pop(node.node_id, None)
        self.job.members.put(node, event.message.port, READY)
        if self.job.quorum.needed:
            self.send(node.node_id, t.Lead(self.job.settings.term))
        self.send(node.node_id, self.job.end)
        self.core.go(Phase.FINISHED, now)

    def on_lost(self, event: ev.Lost, now: float) -> None:
        """An agent has left."""
        if self.job.members.remove(event.node_id) is not None:
            self._leave_if_all_know(now)
            self._close_if_alone(now)

    def on_dead(self, event: ev.ProvenDead, now: float) -> None:
        """One node fewer that may come and ask."""
        if self.job.quorum.is_proof(event.peer):
            self.job.quorum.died(event.peer.key, self.job.members.keys_of_nodes)
            self._leave_if_all_know(now)

    def on_ended(self, event: ev.FromAgent[t.Ended], now: float) -> None:
        """One more knows the end."""
        self.ended.add(event.node_id)
        self._leave_if_all_know(now)

    def _leave_if_all_know(self, now: float) -> None:
        job = self.job
        if now < self.stay_until and job.quorum.missing(job.members.keys_of_nodes):
            return
        if len(self.ended) >= len(job.members) and all(node_id in self.ended for node_id in job.members):
            self.stay_until = 0.0
            self.send_all(t.Leave())

    def deadline(self) -> float | None:
        """How long agents may take to leave, or to return; the end of the allocation does not matter any more."""
        if self.core.state is Phase.CLOSED:
            return None
        if self.core.state is Phase.RETURNING:
            return self.return_by
        return min(self.leave_by, self.stay_until or self.leave_by)

    def on_tick(self, event: Tick, now: float) -> None:
        """Agents that have not left, or not returned, are not waited for any longer."""
        if self.core.state is Phase.FINISHED and now < self.leave_by:
            self.stay_until = 0.0
            self._leave_if_all_know(now)
            return
        if len(self.job.members):
            left = ", ".join(node.host for node in self.job.members.in_order()[:_NAMES_SHOWN])
            self.say(f"not waiting any longer for {left} to leave")
        self._close(now)

    def _close_if_alone(self, now: float) -> None:
        """An agent that was cut off a moment ago may come back, and should hear the end."""
        if len(self.job.members):
            return
        self.return_by = max(self.job.lost_at.values(), default=now) + self.job.settings.return_grace_s
        if self.job.lost_at and now < self.return_by:
            self.core.go(Phase.RETURNING, now)
        else:
            self._close(now)

    def _close(self, now: float) -> None:
        job = self.job
        assert job.end is not None
        self.core.go(Phase.CLOSED, now)
        cause = None if job.end.code == ExitCode.OK else first_cause(job.faults)
        report = job.report.build(job.budget.history, job.cycle, now)
        self.core.emit(ev.Done(job.end.code, job.end.reason, cause, report))
