"""A cycle has failed: restart or end, stop its workers, and read the progress that it made."""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.verdict import REPEATS, Verdict, judge, lacks_module, repeats
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.job_data import ANY, LIVE, STOPPING, Phase, rows
from nvrx_slurm.core.job.part import JobPart
from nvrx_slurm.core.job.restarts import evidence, headline
from nvrx_slurm.core.machine import Tick

_PROGRESS_S = 6.0  # the program gives the file system 5 s
_START_S = 120.0  # a module that is missing later may be on a file system that is away


class Stopping(JobPart):
    """Owns the states from the fault that stops a cycle until nothing of that cycle is left."""

    states = STOPPING
    table = rows(
        (STOPPING, t.Failed, "more_faults", (), "for the first cause and the failure table"),
        (STOPPING, t.Succeeded, "ignore", (), "too late: the cycle is being stopped"),
        (STOPPING, t.Stopped, "on_stopped", (*LIVE, Phase.FINISHED), "the next cycle when all are"),
        (STOPPING, ev.ProgressRead, "on_progress", ANY, "score this cycle"),
        (STOPPING, Tick, "on_tick", ANY, "a node does not stop, or progress cannot be read"),
    )

    pending: set[str] = set()  # node_ids of agents that have yet to stop
    stop_by: float = 0.0
    score_by: float = 0.0  # no plan before the cycle is scored, or this
    end_unless_scored: t.Finish | None = None  # what the budget says, if progress does not say more

    def enter(self, now: float) -> None:
        """Stop all workers for the next cycle, or end the job."""
        job, s = self.job, self.job.settings
        assert job.cause is not None
        listening = (node.port for node in job.members.in_order() if node.infra_rank == job.cause.infra_rank)
        decision = job.budget.after(job.cause, now - job.cycle_started_at, next(listening, 0))
        job.advice.failed(job.cycle, job.cause, now - job.cycle_started_at)
        failed = f"{f'rank {job.cause.rank}' if job.cause.rank >= 0 else 'node'} ({job.cause.host}) failed"
        if decision.restart:
            self.say(decision.why + evidence(job.cause))
        else:  # the last lines of the job tell its cause in full
            left = decision.why.removeprefix(headline(job.cause)).removeprefix("; ")
            self.say(f"{failed} and ends the job: {left}")
        end = None if decision.restart else t.Finish(decision.code, decision.why)
        if s.tracks_progress:  # lack of progress comes first: "do not start it again" is more than "failed"
            self.core.emit(ev.ReadProgress(job.cycle))
        elif end is not None:
            self.finish(end, now)
            return
        if decision.restart:
            job.report.cycle_failed(job.cycle, job.cause, now)
        self.end_unless_scored, self.score_by = end, now + _PROGRESS_S if s.tracks_progress else now
        self.stop_by = now + s.stop_timeout_s
        job.pause_until = now + decision.pause_s
        nodes = job.assignment.places.values()
        self.pending = {node_id for node_id in nodes if job.members.may_run(node_id)}
        for node_id in nodes:
            if node_id in self.pending:
                self.send(node_id, t.Stop(s.term, job.cycle, failed))
        if s.has_preflight:
            self._check_spares()
        self._go_on_if_stopped(now)

    def _check_spares(self) -> None:
        """Spares say whether they are fit, too; a spare that is not needed is not waited for."""
        job = self.job
        for node in job.members.ready_nodes():
            if job.assignment.group_rank(node.node_id) is None:
                job.members.set_busy(node.node_id, job.cycle)
                self.send(node.node_id, t.Stop(job.settings.term, job.cycle, "it may be needed"))

    # --- nodes come and go ----------------------------------------------------------------------------------

    def joined(self, message: t.Register, now: float) -> None:
        """An agent that made its stream anew may have stopped meanwhile."""
        if message.busy:
            self.stop_old_workers(message, now)
        else:
            self.stopped(message.node.node_id, now)

    def left(self, node: t.Node, fault: t.RankFault, now: float) -> None:
        """It is not waited for."""
        if node.node_id in self.pending:
            self.job.add_faults((fault,), now)
            self.stopped(node.node_id, now)

    # --- what agents report ---------------------------------------------------------------------------------

    def on_progress(self, event: ev.ProgressRead, now: float) -> None:
        """Whether the job has come further than the cycle before. An answer that comes too late is not scored."""
        if event.cycle < 0 or now >= self.score_by:
            return
        decision = self.job.budget.score(event.iteration)
        end = t.Finish(decision.code, decision.why) if decision is not None else self.end_unless_scored
        self.score_by = now
        if end is not None:
            self.finish(end, now)
        elif self.core.state is Phase.SCORING:
            self._all_stopped(now)

    # --- what follows ---------------------------------------------------------------------------------------

    def timer_at(self) -> float:
        """How long workers may take to end, or the file system to answer."""
        return self.stop_by if self.core.state is Phase.STOPPING else self.score_by

    def on_timer(self, now: float) -> None:
        """Nodes whose workers do not end are taken out of the job, so that the others can go on."""
        if self.core.state is Phase.SCORING:
            self._all_stopped(now)
            return
        stubborn, self.pending = sorted(self.pending), set()
        for node_id in stubborn:
            why = f"its workers did not end within {self.job.settings.stop_timeout_s:g} s"
            self.say(f"node {self.job.members[node_id].node.host} is taken out of the job: {why}")
            self.refuse(node_id, why, now)
        self._go_on_if_stopped(now)

    def stopped(self, node_id: str, now: float) -> None:
        """One node fewer to wait for."""
        if node_id in self.pending:
            self.pending.discard(node_id)
            self._go_on_if_stopped(now)

    def _go_on_if_stopped(self, now: float) -> None:
        """The next cycle can be planned once nothing of this one is left."""
        if self.pending:
            return
        if now < self.score_by:
            self.core.go(Phase.SCORING, now)
        else:
            self._all_stopped(now)

    def _all_stopped(self, now: float) -> None:
        if self.end_unless_scored is not None:
            self.finish(self.end_unless_scored, now)
            return
        verdict = judge(self.job.faults, max(1, len(self.job.assignment)))
        if verdict is not None:
            self._act_on(verdict, now)
        if self.core.state is not Phase.FINISHED:
            self.core.go(Phase.JOINING, now)

    def _act_on(self, verdict: Verdict, now: float) -> None:
        """All faults of the cycle are known: exclude a node that is certainly bad, or end a job that fails for ever."""
        job, limits = self.job, self.job.settings.limits
        job.cause = verdict.cause
        job.report.cause_known(verdict.cause)
        times = repeats(verdict, job.report.restarts)
        again = f"the same failure {times} times"
        if job.cycle == 0 and job.advice.lasted_s < _START_S and lacks_module(verdict, len(job.assignment)):
            why = f"{headline(verdict.cause)}; no restart: a rank of each node lacks that module"
            self.finish(t.Finish(limits.hopeless_code, why), now)
        elif limits.stops_on_repeats and times >= REPEATS:
            why = f"{headline(verdict.cause)}; {again}: a restart does not help"
            self.finish(t.Finish(limits.no_restart_code, why), now)
        elif times >= REPEATS:
            self.say(f"{again}: a restart may not help; the job goes on (--ft-attribution-stop-action log)")
        elif verdict.remedy is t.Remedy.ELSEWHERE and (
            verdict.confidence is t.Confidence.CERTAIN
            or (verdict.cause.kind is t.FaultKind.HANG and job.settings.hang_exclude)
        ):
            nodes = (node for node in job.members.in_order() if node.infra_rank == verdict.cause.infra_rank)
            for node in [node for node in nodes if node.host == verdict.cause.host and job.may_exclude_by_rule(node)]:
                self.exclude(node, -1, verdict.sentence, now)
