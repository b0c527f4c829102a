"""A cycle from the fault that stops it until nothing of it is left; then the restart, or the end of the job.

The budget decides, the workers are stopped, and progress is read. With no worker left, the cause decides what else
follows, and `gathering` plans the next cycle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution import follows, recurrence
from nvrx_slurm.core.attribution.said import evidence, headline
from nvrx_slurm.core.attribution.verdict import JudgedCause, is_victim, judge
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.ending import Ending, cycle_over
from nvrx_slurm.core.coordinator.exclusion import Exclusion
from nvrx_slurm.core.coordinator.members import Use
from nvrx_slurm.core.coordinator.part import Part
from nvrx_slurm.core.coordinator.restarts import Decision
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.states import FAILED, Stage
from nvrx_slurm.core.machine import Entered, rows

_NEXT = (Stage.SCORING, Stage.JOINING, Stage.FINISHED)  # once nothing of the cycle is left
_PROGRESS_S = 6.0  # the program gives the file system 5 s
_VICTIMS = 8  # ranks


class Stopping(Part):
    """Owns the states from the fault that stops a cycle until nothing of that cycle is left."""

    states = FAILED
    table = rows(
        (Stage.STOPPING, Entered, "on_entered", _NEXT, "restart, or the end"),
        (Stage.STOPPING, ev.Arrived, "on_arrived", _NEXT, "it may have stopped"),
        (Stage.STOPPING, ev.Left, "on_left", _NEXT, "it is not waited for"),
        (Stage.STOPPING, ev.Available, "on_available", _NEXT, "one fewer"),
        (Stage.STOPPING, ev.Timer, "on_timer", _NEXT, "a node does not stop"),
        (
            Stage.STOPPING,
            ev.ProgressRead,
            "on_progress",
            (Stage.SCORING, Stage.FINISHED),
            "score this cycle",
        ),
        (
            Stage.SCORING,
            ev.ProgressRead,
            "on_progress",
            (Stage.JOINING, Stage.FINISHED),
            "score this cycle",
        ),
        (
            Stage.SCORING,
            ev.Timer,
            "on_timer",
            (Stage.JOINING, Stage.FINISHED),
            "progress cannot be read",
        ),
        (Stage.SCORING, ev.Arrived, "on_arrived", (), "no worker of the cycle is left"),
        (Stage.SCORING, (ev.Left, ev.Available), "ignore", (), "no worker of the cycle is left"),
        (FAILED, ev.Cleared, "ignore", (), "no plan waits"),
        (FAILED, t.Succeeded, "ignore", (), "too late: the cycle is being stopped"),
    )

    def __init__(self, roster: Roster, ending: Ending, exclusion: Exclusion) -> None:
        super().__init__(roster)
        self._ending = ending
        self._exclusion = exclusion
        self.pending: set[str] = set()  # node_ids of agents that have yet to stop
        # What the last cycle that was stopped says about the next one:
        self.pause_until = 0.0  # it does not start before
        self._moves_after: int | None = None  # after this cycle ranks move to other nodes
        self._suspect = ""
        self._stop_by = 0.0
        self._score_by = 0.0  # no plan before the cycle is scored, or this
        # what the budget says, if progress does not say more
        self._end_unless_scored: t.Finish | None = None

    @property
    def elsewhere(self) -> bool:
        """Whether the next cycle runs on other nodes."""
        return self._moves_after == self._job.cycle

    @property
    def suspect(self) -> str:
        """The node_id that a spare should replace then; "" = group ranks move on by a node."""
        return self._suspect if self.elsewhere else ""

    def on_entered(self, event: Entered, now: float) -> Stage | None:
        """Stop all workers for the next cycle, or end the job."""
        job = self._job
        cause = self._ledger.cause
        assert cause is not None
        if self._s.tells_of_cycles and event.was is Stage.TAKEOVER:
            self._out.append(ev.CycleBegan(job.cycle))
        lasted_s = now - job.started_at
        decision = self._after(cause, lasted_s)
        who = f"rank {cause.rank}" if cause.rank >= 0 else "node"
        failed = f"{who} ({cause.host}) failed"
        if decision.restart:
            self._say(decision.why + evidence(cause, advises=True))
        else:  # the last lines of the job tell its cause in full
            left = decision.why.removeprefix(headline(cause)).removeprefix("; ")
            self._say(f"{failed} and ends the job: {left}")
        self._ledger.failed(job.cycle, lasted_s, decision.restart, now)
        self._end_unless_scored = None
        self._score_by = now
        if decision.restart:
            self._out.append(ev.ReadReached(job.cycle))
        else:
            self._end_unless_scored = t.Finish(decision.code, decision.why)
        # Lack of progress comes first: "do not start it again" is more than "failed".
        if self._s.tracks_progress:
            self._out.append(ev.ReadProgress(job.cycle))
            self._score_by = now + _PROGRESS_S
        elif self._end_unless_scored is not None:
            return self._decide(self._end_unless_scored)
        wait_s = recurrence.grace_s(cause, self._ledger.restarts)
        self._stop_by = now + wait_s + self._s.stop_timeout_s
        self.pause_until = now + decision.pause_s
        self._stop_workers(t.Stop(job.term, job.cycle, failed, wait_s))
        self._check_spares()
        return self._go_on_if_stopped(now)

    def _after(self, cause: t.RankFault, lasted_s: float) -> Decision:
        """What the budget says."""
        port = 0
        for member in self._members.values():
            if member.node.infra_rank == cause.infra_rank:
                port = member.node.port
                break
        reruns: int | None = None
        if cause.exit_code == t.RERUN and len(self._job.assignment) > 1:
            reruns = follows.reruns(self._ledger.restarts)
        return self._budget.after(cause, lasted_s, port, reruns)

    def _stop_workers(self, stop: t.Stop) -> None:
        nodes = self._job.assignment.places.values()
        self.pending = self._members.not_ready(nodes)
        for node_id in nodes:
            if node_id in self.pending:
                self._send(node_id, stop)

    def _check_spares(self) -> None:
        """They say whether they are fit, too; one that is not needed is not waited for."""
        job = self._job
        check = t.CheckNode(job.term, job.cycle)
        for node in self._members.ready_nodes():
            if node.node_id not in job.assignment.group_ranks:
                self._members.set_use(node.node_id, Use.BUSY, job.cycle)
                self._send(node.node_id, check)

    # --- nodes come and go, and report -----------------------------------------------------------------------

    def on_arrived(self, event: ev.Arrived, now: float) -> Stage | None:
        """An agent that made its stream anew may have stopped meanwhile."""
        if not event.message.busy:
            return self._without(event.message.node.node_id, now)
        self._roster.stop_old_workers(event.message, now)
        return None

    def on_left(self, event: ev.Left, now: float) -> Stage | None:
        """It is not waited for."""
        if event.node_id in self.pending:
            is_new = self._ledger.add((event.fault,), self._job.cycle, now)
            # an exclusion is said where it is decided
            if is_new and event.fault.kind is t.FaultKind.NODE_LOST:
                self._say_late(event.fault)
        return self.on_available(event, now)

    def on_available(self, event: ev.Left | ev.Available, now: float) -> Stage | None:
        """It has stopped."""
        return self._without(event.node_id, now)

    def on_progress(self, event: ev.ProgressRead, now: float) -> Stage | None:
        """Whether the job has come further than the cycle before. An answer that comes too late is not scored."""
        self._ledger.saved(event.iteration)
        if event.cycle < 0 or now >= self._score_by:
            return None
        decision = self._budget.score(event.iteration)
        end = self._end_unless_scored
        if decision is not None:
            end = t.Finish(decision.code, decision.why)
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
        why = f"its workers did not end within {self._s.stop_timeout_s:g} s"
        stubborn = sorted(self.pending)
        self.pending = set()
        for node_id in stubborn:
            host = self._members[node_id].node.host
            self._say(f"node {host} is taken out of the job: {why}")
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
        verdict = judge(self._ledger.faults, len(self._job.assignment.slots), past)
        if verdict is not None and (told := victims(verdict.cause, self._ledger.faults)):
            self._say(told)
        end = None if verdict is None else self._act_on(verdict, past, now)
        if end is not None:
            return self._decide(end)
        if self._s.tells_of_cycles:
            self._out.append(cycle_over(self._job, self._ledger, True, now))
        self._exclusion.cycle_over(now)
        return Stage.JOINING

    def _decide(self, end: t.Finish) -> Stage:
        """The end, unless most nodes are out of reach: they may go on, and this coordinator is about to resign."""
        resign_at = self._quorum.resign_at
        if resign_at is None:
            return self._ending.decide(end)
        self._end_unless_scored = end
        self._score_by = resign_at + 1.0
        return Stage.SCORING

    def _act_on(
        self, verdict: JudgedCause, past: Sequence[t.RestartRecord], now: float
    ) -> t.Finish | None:
        """All faults of the cycle are known. What they say decides about the nodes of the next cycle, or the end."""
        job = self._job
        ledger = self._ledger
        assignment = self._job.assignment
        held: t.Node | None = None
        if verdict.cause.exit_code == t.REJECTED:
            held = self._exclusion.holder(job.before, verdict.cause.rank)
        nodes = len(assignment)
        failed = follows.FailedCycle(
            nodes=nodes,
            ranks=sum(slot.nproc for slot in assignment.slots.values()),
            has_spare=len(self._members) > nodes,
            first=job.cycle == 0,
            lasted_s=ledger.advice.lasted_s,
            reached=ledger.reached,
            checkpoint=ledger.checkpoint,
            resume_before=self._budget.history.resume_before,
            held_before=held,
        )
        course = follows.course(verdict, failed, past, self._s.limits, self._s.hang_exclude)
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
            self._say(course.why)
        if course.resume_before >= 0:
            self._budget.resume_before(course.resume_before)
        if course.elsewhere:
            self._moves_after = job.cycle
            self._suspect = assignment.node_of(course.suspect)
        return None


def victims(cause: t.RankFault, faults: Iterable[t.RankFault]) -> str:
    """Whose errors only follow from the first cause, so that nobody reads their tracebacks; "": none."""
    ranks = {fault.rank for fault in faults if is_victim(fault)} - {cause.rank}
    if not ranks:
        return ""
    named = ", ".join(map(str, sorted(ranks)[:_VICTIMS]))
    if len(ranks) > _VICTIMS:
        named += f" and {len(ranks) - _VICTIMS} more"
    return f"victims, whose errors follow from this one: rank {named}"
