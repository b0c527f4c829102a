"""A cycle from the fault that stops it until nothing of it is left; then the restart, or the end of the job.

The budget decides, the workers are stopped, and progress is read. With no worker left, the cause decides what else
follows, and `gathering` plans the next cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution import recurrence
from nvrx_slurm.core.attribution import verdict as vd
from nvrx_slurm.core.attribution.verdict import evidence, headline
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.ending import Ending
from nvrx_slurm.core.coordinator.exclusion import Exclusion
from nvrx_slurm.core.coordinator.members import Use
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.states import FAILED, CoordinatorSettings, Stage
from nvrx_slurm.core.machine import Entered, Outbox, Say, rows

_NEXT = (Stage.SCORING, Stage.JOINING, Stage.FINISHED)  # once nothing of the cycle is left
_PROGRESS_S = 6.0  # the program gives the file system 5 s
_VICTIMS = 8  # ranks


class Stopping:
    """Owns the states from the fault that stops a cycle until nothing of that cycle is left."""

    states = FAILED
    table = rows(
        (Stage.STOPPING, Entered, "on_entered", _NEXT, "restart, or the end"),
        (Stage.STOPPING, ev.Arrived, "on_arrived", _NEXT, "it may have stopped"),
        (Stage.STOPPING, ev.Left, "on_left", _NEXT, "it is not waited for"),
        (Stage.STOPPING, ev.Available, "on_available", _NEXT, "one fewer"),
        (Stage.STOPPING, ev.Timer, "on_timer", _NEXT, "a node does not stop"),
        (Stage.STOPPING, ev.ProgressRead, "on_progress", (Stage.SCORING, Stage.FINISHED), "score this cycle"),
        (Stage.SCORING, ev.ProgressRead, "on_progress", (Stage.JOINING, Stage.FINISHED), "score this cycle"),
        (Stage.SCORING, ev.Timer, "on_timer", (Stage.JOINING, Stage.FINISHED), "progress cannot be read"),
        (Stage.SCORING, ev.Arrived, "on_arrived", (), "no worker of the cycle is left"),
        (Stage.SCORING, (ev.Left, ev.Available), "ignore", (), "no worker of the cycle is left"),
        (FAILED, ev.Cleared, "ignore", (), "no plan waits"),
        (FAILED, t.Succeeded, "ignore", (), "too late: the cycle is being stopped"),
    )  # fmt: skip

    def __init__(
        self,
        s: CoordinatorSettings,
        out: Outbox,
        roster: Roster,
        ending: Ending,
        exclusion: Exclusion,
    ) -> None:
        self._s = s
        self._out = out
        self._roster = roster
        self._ending = ending
        self._exclusion = exclusion
        self._job = roster.job
        self._ledger = roster.ledger
        self._budget = roster.budget
        self.pending: set[str] = set()  # node_ids of agents that have yet to stop
        self._stop_by = 0.0
        self._score_by = 0.0  # no plan before the cycle is scored, or this
        # what the budget says, if progress does not say more
        self._end_unless_scored: t.Finish | None = None

    def on_entered(self, event: Entered, now: float) -> Stage | None:
        """Stop all workers for the next cycle, or end the job."""
        job, s, out, cause = self._job, self._s, self._out, self._ledger.cause
        assert cause is not None
        if s.tells_of_cycles and event.was is Stage.TAKEOVER:
            out.append(ev.CycleBegan(job.cycle))
        members, lasted_s = self._roster.members, now - job.started_at
        ports = [
            member.node.port
            for member in members.values()
            if member.node.infra_rank == cause.infra_rank
        ]
        before = (
            vd.reruns(self._ledger.restarts)
            if cause.exit_code == t.RERUN and len(job.assignment) > 1
            else None
        )
        decision = self._budget.after(cause, lasted_s, ports[0] if ports else 0, before)
        failed = f"{f'rank {cause.rank}' if cause.rank >= 0 else 'node'} ({cause.host}) failed"
        if decision.restart:
            out.append(Say(decision.why + evidence(cause, advises=True)))
        else:  # the last lines of the job tell its cause in full
            left = decision.why.removeprefix(headline(cause)).removeprefix("; ")
            out.append(Say(f"{failed} and ends the job: {left}"))
        self._ledger.failed(job.cycle, lasted_s, decision.restart, now)
        end = None if decision.restart else t.Finish(decision.code, decision.why)
        if decision.restart:
            out.append(ev.ReadReached(job.cycle))
        if (
            s.tracks_progress
        ):  # lack of progress comes first: "do not start it again" is more than "failed"
            out.append(ev.ReadProgress(job.cycle))
        elif end is not None:
            return self._decide(end)
        self._end_unless_scored, self._score_by = (
            end,
            now + _PROGRESS_S if s.tracks_progress else now,
        )
        wait_s = recurrence.grace_s(cause, self._ledger.restarts)
        self._stop_by = now + wait_s + s.stop_timeout_s
        job.pause_until = now + decision.pause_s
        nodes = job.assignment.places.values()
        self.pending = {
            node_id
            for node_id in nodes
            if node_id in members and members[node_id].use is not Use.READY
        }
        stop = t.Stop(job.term, job.cycle, failed, wait_s)
        out += [ev.SendTo(node_id, stop) for node_id in nodes if node_id in self.pending]
        spares = [
            node.node_id
            for node in members.ready_nodes()
            if node.node_id not in job.assignment.group_ranks
        ]
        for (
            node_id
        ) in spares:  # they say whether they are fit, too; one that is not needed is not waited for
            members.set_use(node_id, Use.BUSY, job.cycle)
            out.append(ev.SendTo(node_id, t.CheckNode(job.term, job.cycle)))
        return self._go_on_if_stopped(now)

    # --- nodes come and go, and report -----------------------------------------------------------------------

    def on_arrived(self, event: ev.Arrived, now: float) -> Stage | None:
        """An agent that made its stream anew may have stopped meanwhile."""
        if not event.message.busy:
            return self._without(event.message.node.node_id, now)
        self._roster.stop_old_workers(event.message, now)
        return None

    def on_left(self, event: ev.Left, now: float) -> Stage | None:
        """It is not waited for."""
        if event.node.node_id in self.pending:
            self._ledger.add((event.fault,), self._job.cycle, now)
        return self._without(event.node.node_id, now)

    def on_available(self, event: ev.Available, now: float) -> Stage | None:
        """It has stopped."""
        return self._without(event.node_id, now)

    def on_progress(self, event: ev.ProgressRead, now: float) -> Stage | None:
        """Whether the job has come further than the cycle before. An answer that comes too late is not scored."""
        self._ledger.checkpoint = -1 if event.iteration is None else event.iteration
        if event.cycle < 0 or now >= self._score_by:
            return None
        decision = self._budget.score(event.iteration)
        end = (
            t.Finish(decision.code, decision.why)
            if decision is not None
            else self._end_unless_scored
        )
        self._score_by = now
        if end is not None:
            return self._decide(end)
        return None if self.pending else self._all_stopped(now)

    # --- what follows ---------------------------------------------------------------------------------------

    def timer_at(self, state: Stage) -> float:
        """How long workers may take to end, or the file system to answer."""
        return self._stop_by if state is Stage.STOPPING else self._score_by

    def on_timer(self, event: ev.Timer, now: float) -> Stage | None:
        """Nodes whose workers do not end are taken out of the job, so that the others can go on."""
        stubborn, self.pending = sorted(self.pending), set()
        for node_id in stubborn:
            why = f"its workers did not end within {self._s.stop_timeout_s:g} s"
            self._out.append(
                Say(
                    f"node {self._roster.members[node_id].node.host} is taken out of the job: {why}"
                )
            )
            self._roster.refuse(node_id, why, now)
        return self._go_on_if_stopped(now)

    def _without(self, node_id: str, now: float) -> Stage | None:
        """One node fewer to wait for."""
        if node_id not in self.pending:
            return None
        self.pending.discard(node_id)
        return self._go_on_if_stopped(now)

    def _go_on_if_stopped(self, now: float) -> Stage | None:
        """The next cycle can be planned once nothing of this one is left."""
        if self.pending:
            return None
        return Stage.SCORING if now < self._score_by else self._all_stopped(now)

    def _all_stopped(self, now: float) -> Stage:
        if self._end_unless_scored is not None:
            return self._decide(self._end_unless_scored)
        past = self._ledger.restarts
        verdict = vd.judge(self._ledger.faults, len(self._job.assignment.slots), past)
        if verdict is not None and (told := victims(verdict.cause, self._ledger.faults)):
            self._out.append(Say(told))
        end = None if verdict is None else self._act_on(verdict, past, now)
        return Stage.JOINING if end is None else self._decide(end)

    def _decide(self, end: t.Finish) -> Stage:
        """The end, unless most nodes are out of reach: they may go on, and this coordinator is about to resign."""
        if (resign_at := self._roster.quorum.resign_at) is None:
            return self._ending.decide(end)
        self._end_unless_scored, self._score_by = end, resign_at + 1.0
        return Stage.SCORING

    def _act_on(
        self, verdict: vd.JudgedCause, past: Sequence[t.RestartRecord], now: float
    ) -> t.Finish | None:
        """All faults of the cycle are known. What they say decides about the nodes of the next cycle, or the end."""
        job = self._job
        ledger = self._ledger
        roster = self._roster
        cause = verdict.cause
        held = (
            self._exclusion.holder(job.before, cause.rank)
            if cause.exit_code == t.REJECTED
            else None
        )
        told = self._budget.history.resume_before
        nodes, ranks = (
            len(job.assignment),
            sum(slot.nproc for slot in job.assignment.slots.values()),
        )
        spare = len(roster.members) > nodes
        first = job.cycle == 0
        lasted_s = ledger.advice.lasted_s
        failed = vd.FailedCycle(
            nodes, ranks, spare, first, lasted_s, ledger.reached, ledger.checkpoint, told, held
        )
        course = vd.course(verdict, failed, past, self._s.limits, self._s.hang_exclude)
        # with both it stays open which of them has helped
        tried = course.elsewhere and course.resume_before < 0
        ledger.cause_known(verdict, tried, restarts=not course.end)
        if course.end:
            self._budget.refund()
            return t.Finish(course.end, course.why)
        self._exclusion.strike(*recurrence.struck(past, ledger.reached, now - job.started_at))
        if course.strike:
            self._exclusion.strike((course.strike,), course.why)
        if course.exclude is not None:
            self._exclusion.by_rule(course.exclude, course.why, now)
        elif course.why and not course.strike:
            self._out.append(Say(course.why))
        if course.resume_before >= 0:
            self._budget.resume_before(course.resume_before)
        if course.elsewhere:
            job.elsewhere, job.suspect = True, job.assignment.node_of(course.suspect)
        return None


def victims(cause: t.RankFault, faults: Iterable[t.RankFault]) -> str:
    """Whose errors only follow from the first cause, so that nobody reads their tracebacks; "": none."""
    ranks = set()
    for fault in faults:
        echoes = fault.finding is not None and fault.finding.role is t.LineRole.ECHO
        if echoes and fault.rank != cause.rank and not vd.is_told_to_end(fault):
            ranks.add(fault.rank)
    named = ", ".join(map(str, sorted(ranks)[:_VICTIMS]))
    more = f" and {len(ranks) - _VICTIMS} more" if len(ranks) > _VICTIMS else ""
    return f"victims, whose errors follow from this one: rank {named}{more}" if ranks else ""
