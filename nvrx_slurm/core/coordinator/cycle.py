"""A cycle from its plan to its end: faults, successes, nodes that come and go; then the restart, or the end of the job.

A fault leads to STOPPING. There the budget decides, the workers are stopped, and progress is read. With no worker
left, `gathering` plans the next cycle.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.verdict import REPEATS, Verdict, evidence, first_cause, headline, judge
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.ending import Ending
from nvrx_slurm.core.coordinator.hangs import HangSearch
from nvrx_slurm.core.coordinator.roster import Roster, Use, lost
from nvrx_slurm.core.coordinator.states import (
    FAILED,
    Arrived,
    Cleared,
    CoordinatorSettings,
    Left,
    Phase,
    Ready,
    Review,
    Timer,
)
from nvrx_slurm.core.machine import Entered, Outbox, Say, rows
from nvrx_slurm.errors import ExitCode, signal_exit_code

_RUN = (Phase.RUNNING, Phase.LAST_RANKS)
_PROGRESS_S = 6.0  # the program gives the file system 5 s
_START_S = 120.0  # a module that is missing later may be on a file system that is away


class Running:
    """Owns the states from a plan to the first fault that stops the cycle, or to the success of the job."""

    states = _RUN
    table = rows(
        (Phase.RUNNING, Entered, "on_entered", (), "one that was taken over may be done already"),
        (Phase.RUNNING, Review, "on_review", (Phase.LAST_RANKS, Phase.FINISHED), "the end when all are done"),
        (Phase.LAST_RANKS, Review, "on_review", (Phase.FINISHED,), "the end when all are done"),
        (_RUN, Arrived, "on_arrived", (Phase.STOPPING,), "it goes on, is a spare, or has stopped its workers"),
        (Phase.RUNNING, Left, "on_left", (Phase.STOPPING,), "a fault, if it was active"),
        (Phase.RUNNING, Ready, "on_ready", (Phase.STOPPING,), "a returned node is a spare now"),
        (Phase.LAST_RANKS, Left, "on_left", (), "it had a fault, or was done"),
        (Phase.LAST_RANKS, Ready, "on_ready", (), "its last ranks have ended"),
        (_RUN, Cleared, "ignore", (), "no plan waits"),
        (_RUN, t.Failed, "on_failed", (Phase.STOPPING,), "restart, or go on"),
        (_RUN, t.Succeeded, "on_succeeded", (), "the end when all have"),
        (Phase.LAST_RANKS, Timer, "on_timer", (Phase.FINISHED,), "the last ranks take too long"),
    )

    def __init__(self, s: CoordinatorSettings, out: Outbox, roster: Roster, ending: Ending, hangs: HangSearch) -> None:
        self._s, self._out, self._roster, self._ending, self._hangs = s, out, roster, ending, hangs
        self._job, self._ledger = roster.job, roster.ledger
        self._min_healthy = s.policy is t.RestartPolicy.MIN_HEALTHY
        self._last_ranks_by: float | None = None  # in LAST_RANKS

    def on_entered(self, event: Entered, now: float) -> None:
        """The plans of a cycle have been sent."""
        if self._s.attributes:
            self._out.append(ev.CycleBegan(self._job.cycle))
        self._job.started_at, self._hangs.search, self._last_ranks_by = now, None, None
        if event.was is Phase.TAKEOVER:
            self._out.posted.append(Review())

    # --- nodes come and go ----------------------------------------------------------------------------------

    def on_arrived(self, event: Arrived, now: float) -> Phase | None:
        """An active node that made its stream anew goes on; any other node is a spare."""
        message, assignment = event.message, self._job.assignment
        node, plan = message.node, message.plan
        group_rank = assignment.group_ranks.get(node.node_id)
        if group_rank is None:
            self._arrived_as_spare(message, now)
            return None
        current = plan is not None and plan.cycle == self._job.cycle
        goes_on = current and message.doing in (t.Doing.RUNNING, t.Doing.SUCCEEDED)
        if goes_on and group_rank not in assignment.gone:
            self._roster.send_plan(node.node_id)
            if message.doing is t.Doing.SUCCEEDED:
                self._node_succeeded(group_rank, message.early)
                return None
            return self._node_failed(group_rank, message.faults, now) if message.faults else None
        if group_rank in assignment.gone:  # the others were told that its ranks are dead
            self._roster.stop_old_workers(message, now)
        elif group_rank not in assignment.succeeded:
            unseen = lost(node, "its agent had no coordinator for a while and stopped its workers")
            return self._node_failed(group_rank, (current and message.faults) or (unseen,), now, gone=True)
        return None

    def _arrived_as_spare(self, message: t.Register, now: float) -> None:
        if message.busy:
            self._roster.stop_old_workers(message, now)
        else:
            self._out.append(Say(f"node {message.node.host} joined as a spare"))
            self._roster.send_plan(message.node.node_id)

    def on_left(self, event: Left, now: float) -> Phase | None:
        """A fault, unless the node was a spare or is past its part in the cycle."""
        assignment = self._job.assignment
        group_rank = assignment.group_ranks.get(event.node.node_id)
        if group_rank is None or group_rank in assignment.succeeded | assignment.gone:
            return None
        return self._node_failed(group_rank, (event.fault,), now, gone=True)

    # --- what agents report ---------------------------------------------------------------------------------

    def on_failed(self, event: ev.FromAgent[t.Failed], now: float) -> Phase | None:
        """Ranks failed on an active node."""
        group_rank = self._active(event)
        if group_rank is None:
            return None
        if event.message.faults:
            return self._node_failed(group_rank, event.message.faults, now)
        self._roster.refuse(event.node_id, "it reported a failure without a fault", now)
        return None

    def on_succeeded(self, event: ev.FromAgent[t.Succeeded], now: float) -> None:
        """One node is done."""
        group_rank = self._active(event)
        if group_rank is not None:
            self._node_succeeded(group_rank, event.message.early)

    def on_ready(self, event: Ready, now: float) -> Phase | None:
        """A returned node has stopped its old workers: it is a spare. An active one has stopped by itself, or
        (min-healthy) has lost its last worker."""
        assignment = self._job.assignment
        group_rank = assignment.group_ranks.get(event.node_id)
        if group_rank is None:
            self._roster.send_plan(event.node_id)
        elif group_rank in assignment.broken:
            self._out.posted.append(Review())
        elif group_rank not in assignment.succeeded:
            unasked = lost(self._roster.members[event.node_id].node, "it stopped its workers unasked")
            return self._node_failed(group_rank, (unasked,), now, gone=True)
        return None

    def _active(self, event: ev.FromAgent[t.Failed | t.Succeeded]) -> int | None:
        """The group rank of the sender, if it takes part in the running cycle and speaks of that one."""
        assignment = self._job.assignment
        group_rank = assignment.group_ranks.get(event.node_id)
        current = event.message.cycle == self._job.cycle and event.node_id in self._roster.members
        return group_rank if current and group_rank not in assignment.gone else None

    # --- what follows ---------------------------------------------------------------------------------------

    def _node_failed(
        self, group_rank: int, faults: Sequence[t.RankFault], now: float, gone: bool = False
    ) -> Phase | None:
        """Something happened to an active node; `gone`: none of its workers is left."""
        s, assignment, ledger = self._s, self._job.assignment, self._ledger
        ledger.add(faults, self._job.cycle, now)
        if not self._min_healthy:
            ledger.cause = first_cause(ledger.faults)
            return Phase.STOPPING
        assignment.broken.add(group_rank)
        dead = tuple(fault.rank for fault in faults if fault.rank >= 0)
        if gone:
            assignment.gone.add(group_rank)
            assignment.succeeded.discard(group_rank)
            dead = assignment.slots[group_rank].ranks
        what = headline(faults[0])
        self._tell_wrappers(group_rank, dead, what)
        if assignment.good < s.min_nodes:
            ledger.cause = faults[0]
            return Phase.STOPPING
        if self._is_done():
            self._out.posted.append(Review())
            return None
        some = f"{assignment.good} of {assignment.planned} nodes are good, {s.min_nodes} are needed"
        self._out.append(Say(f"{what}; going on: {some}{evidence(faults[0])}"))
        return None

    def _tell_wrappers(self, group_rank: int, ranks: tuple[int, ...], why: str) -> None:
        """The in-process wrappers of the other nodes need not wait for a heartbeat to be late."""
        for other, slot in self._job.assignment.slots.items():
            if ranks and other != group_rank and slot.node_id in self._roster.members:
                self._out.append(ev.SendTo(slot.node_id, t.RanksGone(self._job.cycle, ranks, why)))

    def _node_succeeded(self, group_rank: int, early: bool) -> None:
        assignment = self._job.assignment
        assignment.succeeded.add(group_rank)
        assignment.early = assignment.early or early
        self._out.posted.append(Review())

    def _is_done(self) -> bool:
        """Whether enough nodes are done, and all others have a fault."""
        assignment = self._job.assignment
        enough = self._s.min_nodes if self._min_healthy else len(assignment)
        return not assignment.healthy and len(assignment.succeeded) >= enough

    def on_review(self, event: Review, now: float) -> Phase | None:
        """The end, if the cycle is done. The last ranks of nodes with a fault may be about to end well, too."""
        if not self._is_done():
            return None
        assignment = self._job.assignment
        last = (assignment.places[g] for g in assignment.broken - assignment.gone)
        if not self._roster.members.not_ready(last):
            return self._succeed()
        if self._last_ranks_by is None:
            self._last_ranks_by = now + self._s.stop_timeout_s
            return Phase.LAST_RANKS
        return self._succeed() if now >= self._last_ranks_by else None

    def _succeed(self) -> Phase:
        if not self._job.assignment.early:
            return self._ending.decide(t.Finish(ExitCode.OK, "all ranks finished"))
        warning = self._ending.warning
        signum = warning.signum if warning is not None else self._s.warning_signum
        why = "the ranks were warned, saved their work and ended"
        return self._ending.decide(t.Finish(signal_exit_code(signum), why))

    def timer_at(self, state: Phase) -> float | None:
        """How long the last ranks of nodes with a fault may take to end, or nodes to answer about a hang."""
        if state is Phase.LAST_RANKS:
            return self._last_ranks_by
        return None if self._hangs.search is None else self._hangs.search.by

    def on_timer(self, event: Timer, now: float) -> Phase:
        """The last ranks have taken too long."""
        return self._succeed()


class Stopping:
    """Owns the states from the fault that stops a cycle until nothing of that cycle is left."""

    states = FAILED
    table = rows(
        (Phase.STOPPING, Entered, "on_entered", (Phase.SCORING, Phase.JOINING, Phase.FINISHED), "restart, or the end"),
        (Phase.STOPPING, Arrived, "on_arrived", (Phase.SCORING, Phase.JOINING, Phase.FINISHED), "it may have stopped"),
        (Phase.STOPPING, Left, "on_left", (Phase.SCORING, Phase.JOINING, Phase.FINISHED), "it is not waited for"),
        (Phase.STOPPING, Ready, "on_ready", (Phase.SCORING, Phase.JOINING, Phase.FINISHED), "one fewer to wait for"),
        (Phase.STOPPING, Timer, "on_timer", (Phase.SCORING, Phase.JOINING, Phase.FINISHED), "a node does not stop"),
        (Phase.STOPPING, ev.ProgressRead, "on_progress", (Phase.FINISHED,), "score this cycle"),
        (Phase.SCORING, ev.ProgressRead, "on_progress", (Phase.JOINING, Phase.FINISHED), "score this cycle"),
        (Phase.SCORING, Timer, "on_unscored", (Phase.JOINING, Phase.FINISHED), "progress cannot be read"),
        (Phase.SCORING, Arrived, "on_arrived", (), "no worker of the cycle is left"),
        (Phase.SCORING, (Left, Ready), "ignore", (), "no worker of the cycle is left"),
        (FAILED, Cleared, "ignore", (), "no plan waits"),
        (FAILED, t.Succeeded, "ignore", (), "too late: the cycle is being stopped"),
    )

    def __init__(self, s: CoordinatorSettings, out: Outbox, roster: Roster, ending: Ending) -> None:
        self._s, self._out, self._roster, self._ending = s, out, roster, ending
        self._job, self._ledger, self._budget = roster.job, roster.ledger, roster.budget
        self.pending: set[str] = set()  # node_ids of agents that have yet to stop
        self._stop_by = 0.0
        self._score_by = 0.0  # no plan before the cycle is scored, or this
        self._end_unless_scored: t.Finish | None = None  # what the budget says, if progress does not say more

    def on_entered(self, event: Entered, now: float) -> Phase | None:
        """Stop all workers for the next cycle, or end the job."""
        job, s, out, cause = self._job, self._s, self._out, self._ledger.cause
        assert cause is not None
        if s.attributes and event.was is Phase.TAKEOVER:
            out.append(ev.CycleBegan(job.cycle))
        members, lasted_s = self._roster.members, now - job.started_at
        ports = [member.node.port for member in members.values() if member.node.infra_rank == cause.infra_rank]
        decision = self._budget.after(cause, lasted_s, ports[0] if ports else 0)
        failed = f"{f'rank {cause.rank}' if cause.rank >= 0 else 'node'} ({cause.host}) failed"
        if decision.restart:
            out.append(Say(decision.why + evidence(cause, advises=True)))
        else:  # the last lines of the job tell its cause in full
            left = decision.why.removeprefix(headline(cause)).removeprefix("; ")
            out.append(Say(f"{failed} and ends the job: {left}"))
        self._ledger.failed(job.cycle, lasted_s, decision.restart, now)
        end = None if decision.restart else t.Finish(decision.code, decision.why)
        if s.tracks_progress:  # lack of progress comes first: "do not start it again" is more than "failed"
            out.append(ev.ReadProgress(job.cycle))
        elif end is not None:
            return self._ending.decide(end)
        self._end_unless_scored, self._score_by = end, now + _PROGRESS_S if s.tracks_progress else now
        self._stop_by = now + s.stop_timeout_s
        job.pause_until = now + decision.pause_s
        nodes = job.assignment.places.values()
        self.pending = {node_id for node_id in nodes if node_id in members and members[node_id].use is not Use.READY}
        stop = t.Stop(job.term, job.cycle, failed)
        out += [ev.SendTo(node_id, stop) for node_id in nodes if node_id in self.pending]
        if s.has_preflight:  # spares say whether they are fit, too; a spare that is not needed is not waited for
            for node_id in [node.node_id for node in members.ready_nodes()]:
                if node_id not in job.assignment.group_ranks:
                    members.set_use(node_id, Use.BUSY, job.cycle)
                    out.append(ev.SendTo(node_id, t.Stop(job.term, job.cycle, "it may be needed")))
        return self._go_on_if_stopped(now)

    # --- nodes come and go, and report -----------------------------------------------------------------------

    def on_arrived(self, event: Arrived, now: float) -> Phase | None:
        """An agent that made its stream anew may have stopped meanwhile."""
        if not event.message.busy:
            return self._without(event.message.node.node_id, now)
        self._roster.stop_old_workers(event.message, now)
        return None

    def on_left(self, event: Left, now: float) -> Phase | None:
        """It is not waited for."""
        if event.node.node_id in self.pending:
            self._ledger.add((event.fault,), self._job.cycle, now)
        return self._without(event.node.node_id, now)

    def on_ready(self, event: Ready, now: float) -> Phase | None:
        """It has stopped."""
        return self._without(event.node_id, now)

    def on_progress(self, event: ev.ProgressRead, now: float) -> Phase | None:
        """Whether the job has come further than the cycle before. An answer that comes too late is not scored."""
        if event.cycle < 0 or now >= self._score_by:
            return None
        decision = self._budget.score(event.iteration)
        end = t.Finish(decision.code, decision.why) if decision is not None else self._end_unless_scored
        self._score_by = now
        if end is not None:
            return self._ending.decide(end)
        return None if self.pending else self._all_stopped(now)

    # --- what follows ---------------------------------------------------------------------------------------

    def timer_at(self, state: Phase) -> float:
        """How long workers may take to end, or the file system to answer."""
        return self._stop_by if state is Phase.STOPPING else self._score_by

    def on_unscored(self, event: Timer, now: float) -> Phase:
        """The job goes on without knowing its progress."""
        return self._all_stopped(now)

    def on_timer(self, event: Timer, now: float) -> Phase | None:
        """Nodes whose workers do not end are taken out of the job, so that the others can go on."""
        stubborn, self.pending = sorted(self.pending), set()
        for node_id in stubborn:
            why = f"its workers did not end within {self._s.stop_timeout_s:g} s"
            host = self._roster.members[node_id].node.host
            self._out.append(Say(f"node {host} is taken out of the job: {why}"))
            self._roster.refuse(node_id, why, now)
        return self._go_on_if_stopped(now)

    def _without(self, node_id: str, now: float) -> Phase | None:
        """One node fewer to wait for."""
        if node_id not in self.pending:
            return None
        self.pending.discard(node_id)
        return self._go_on_if_stopped(now)

    def _go_on_if_stopped(self, now: float) -> Phase | None:
        """The next cycle can be planned once nothing of this one is left."""
        if self.pending:
            return None
        return Phase.SCORING if now < self._score_by else self._all_stopped(now)

    def _all_stopped(self, now: float) -> Phase:
        if self._end_unless_scored is not None:
            return self._ending.decide(self._end_unless_scored)
        verdict = judge(self._ledger.faults, len(self._job.assignment.slots), self._ledger.restarts)
        end = None if verdict is None else self._act_on(verdict, now)
        return Phase.JOINING if end is None else self._ending.decide(end)

    def _act_on(self, verdict: Verdict, now: float) -> t.Finish | None:
        """All faults of the cycle are known: exclude a node that is certainly bad, or end a job that fails for ever."""
        job, ledger, roster, limits, cause = self._job, self._ledger, self._roster, self._s.limits, verdict.cause
        ledger.cause_known(cause)
        times, again = verdict.times, f"the same failure {verdict.times} times"
        at_start = job.cycle == 0 and ledger.advice.lasted_s < _START_S
        if at_start and verdict.lacks_module:
            why = f"{headline(cause)}; no restart: a rank of each node lacks that module"
            return t.Finish(limits.hopeless_code, why)
        if limits.stops_on_repeats and times >= REPEATS:
            return t.Finish(limits.no_restart_code, f"{headline(cause)}; {again}: a restart does not help")
        certain = verdict.confidence is t.Confidence.CERTAIN or (
            cause.kind is t.FaultKind.HANG and self._s.hang_exclude
        )
        if times >= REPEATS:
            some = "a restart may not help; the job goes on (--ft-attribution-stop-action log)"
            self._out.append(Say(f"{again}: {some}"))
        elif verdict.remedy is t.Remedy.ELSEWHERE and certain:
            nodes = (node for node in roster.members.in_order() if node.infra_rank == cause.infra_rank)
            for node in [node for node in nodes if node.host == cause.host and roster.may_exclude_by_rule(node)]:
                roster.exclude(node, -1, verdict.sentence, now)
        return None
