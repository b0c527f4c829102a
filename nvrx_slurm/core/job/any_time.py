"""What can happen in all states before the end: agents come and go; ranks, people and Slurm make requests.

The part that owns the state decides what a change of the members means.
"""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.duration import in_words
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.inherited import busy_cycle
from nvrx_slurm.core.job.job_data import ANY, LIVE, OVER, STOPPING, Phase, rows
from nvrx_slurm.core.job.members import JOINING
from nvrx_slurm.core.job.part import JobPart
from nvrx_slurm.core.job.quorum import peer_key

_LAST_CYCLE = 1_000_000  # a plan of a later one is a defect of its agent: the next cycle could not be numbered
_UNSCORED = tuple(phase for phase in LIVE if phase not in STOPPING)
_NO_SEARCH = tuple(phase for phase in LIVE if phase is not Phase.RUNNING)
_UNTRIED = (Phase.TAKEOVER,)
_TRIED = tuple(phase for phase in LIVE if phase not in _UNTRIED)


class AnyTime(JobPart):
    """Handles arrivals and losses, requests, warnings, the end on request, and answers of the coordinator's program."""

    table = rows(
        (LIVE, ev.Joined, "on_joined", ANY, "a new node, a returning one, or a takeover"),
        (LIVE, ev.Lost, "on_lost", ANY, "a fault if it was active"),
        (LIVE, t.Asked, "on_asked", ANY, "exclude, shut down or go on"),
        (_NO_SEARCH, (t.Hung, t.Evidence), "ignore", (), "too late, or of another term"),
        (LIVE, t.WarnJob, "on_warn_job", (), "tell all agents"),
        (LIVE, t.EndJob, "on_end_job", OVER, "told to end"),
        (LIVE, ev.TimeLeft, "on_time_left", OVER, "warn, stop or wait"),
        (LIVE, ev.ProvenDead, "on_dead", ANY, "its ranks are gone, and it is not counted any more"),
        (LIVE, ev.Raised, "ignore", (), "too late: elected"),
        (LIVE, t.Ended, "ignore", (), "it has registered with the end of the job"),
        (_TRIED, ev.Advised, "on_advised", OVER, "the end, if the user wants that and the answer still holds"),
        (_UNTRIED, ev.Advised, "on_advised", (), "no cycle of this term has failed: it is only said"),
        (_UNSCORED, ev.ProgressRead, "on_progress", (), "where the job begins; a late answer"),
    )

    def on_joined(self, event: ev.Joined, now: float) -> None:
        """A new agent, a returning one, or one that reports what it runs to a new coordinator."""
        job, message, node = self.job, event.message, event.message.node
        if message.plan is not None and message.plan.cycle > _LAST_CYCLE:
            self.refuse(node.node_id, f"cycle {message.plan.cycle} of its plan is above {_LAST_CYCLE}", now)
            return
        job.lost_at.pop(node.node_id, None)
        self._lead(message)
        self._learn(message, now)
        if job.budget.excludes(node):
            self.refuse(node.node_id, f"node {node.host} was excluded from this job", now)
            return
        old = job.members.same_place(node)
        job.members.put(node, message.port, JOINING)
        if job.warning is not None:
            self.send(node.node_id, job.warning)
        if old is not None and old.node.node_id != node.node_id:
            self.refuse(old.node.node_id, f"a newer agent of node {node.host} has joined in its place", now)
        if message.end is not None:
            self.finish(message.end, now)
        if self.core.state in LIVE:  # otherwise it was told the end with all the others
            job.members.set_busy(node.node_id, busy_cycle(message))
            self.core.owner.joined(message, now)

    def _learn(self, message: t.Register, now: float) -> None:
        """Take over what the agent knows of earlier terms."""
        job = self.job
        job.inherited.running.remove(message.node.node_id)  # unless the agent says otherwise in a moment
        if message.plan is None:
            return
        overtaken, excludes = job.inherit(message.plan)
        if excludes:  # one that joined before this was known may have been excluded
            for node in job.members.in_order():
                if job.budget.excludes(node):
                    self.refuse(node.node_id, "it was excluded in an earlier term", now)
        for node_id in overtaken:
            self.stop_workers(node_id, job.inherited.last_cycle)

    def _lead(self, message: t.Register) -> None:
        """Its ranks are known again. It runs them on under our lease."""
        quorum, node = self.job.quorum, message.node
        if not quorum.needed:
            return
        if message.plan is not None:
            quorum.knows(peer_key(node), message.plan.term, message.plan.cycle)
        elif node.node_id not in self.job.members and quorum.offer[0] > 0:
            quorum.newcomer(node)
            self.note_dead()
        quorum.back(peer_key(node), self.job.members.keys_of_nodes | {peer_key(node)})
        self.send(node.node_id, t.Lead(self.job.settings.term))

    def on_dead(self, event: ev.ProvenDead, now: float) -> None:
        """A plan may have waited for this."""
        members = self.job.members.keys_of_nodes
        if event.peer.key not in members and self.job.quorum.is_proof(event.peer):
            self.job.quorum.died(event.peer.key, members)
            self.note_dead()
            self.mind_quorum(now)
            self.core.owner.unfenced(now)

    def on_lost(self, event: ev.Lost, now: float) -> None:
        """A stream broke."""
        member = self.job.members.get(event.node_id)
        if member is not None and event.silent:
            self.job.quorum.silent.add(peer_key(member.node))
        if event.node_id in self.job.members and self.job.assignment.group_rank(event.node_id) is not None:
            self.job.lost_at[event.node_id] = now
        self.remove(event.node_id, event.why, now)

    # --- requests and answers ------------------------------------------------------------------------------

    def on_asked(self, event: ev.FromAgent[t.Asked], now: float) -> None:
        """A rank wants its node out, or the job to end."""
        member, asked = self.job.members.get(event.node_id), event.message
        if member is None:
            return
        by = f"rank {asked.rank}" if asked.rank >= 0 else "a health check"
        asker = f"{by} on node {member.node.host}"
        if asked.action is t.WorkloadAction.ShutdownWorkload:
            why = f"{asker} asked to shut down the workload: {asked.description}"
            self.finish(t.Finish(self.job.settings.limits.no_restart_code, why), now)
        elif asked.action is t.WorkloadAction.ExcludeThisNode:
            self.exclude(member.node, asked.rank, asked.description, now)
        else:
            self.say(f"{asker} reports: {asked.description}")

    def on_progress(self, event: ev.ProgressRead, now: float) -> None:
        """The checkpoint that the job begins with. The answer about a failed cycle comes too late."""
        if event.cycle < 0:
            self.job.budget.begin_at(event.iteration)

    def on_time_left(self, event: ev.TimeLeft, now: float) -> None:
        """Say it once; warn or stop when it is time."""
        clock = self.job.clock
        if event.left_s is not None and not clock.known:
            self.say(f"the allocation ends in {in_words(event.left_s)}")
        self.mind_the_clock(clock.answer(event.left_s, now), now)

    def on_advised(self, event: ev.Advised, now: float) -> None:
        """A service has an opinion. It ends the job only where the user chose so, and while it holds."""
        job, said = self.job, f"attribution of cycle {event.cycle}: {event.text}"
        runs = self.core.state in (Phase.RUNNING, Phase.LAST_RANKS)
        void = job.advice.why_void(event.cycle, now - job.cycle_started_at if runs else None)
        if event.stop and job.settings.stops_on_advice and not void:
            self.finish(t.Finish(job.settings.limits.no_restart_code, said), now)
        elif event.stop:
            void = void or "the job goes on (--ft-attribution-stop-action log)"
            self.say(f"{said}; {void}")
        else:
            self.say(said)

    def on_warn_job(self, event: ev.FromAgent[t.WarnJob], now: float) -> None:
        """One agent was warned: all ranks should know."""
        self.warn(t.Warn(event.message.signum, event.message.reason))

    def on_end_job(self, event: ev.FromAgent[t.EndJob], now: float) -> None:
        """Slurm or a person told an agent to end the job."""
        told = event.message
        self.finish(t.Finish(told.code, told.reason, told.signum), now)
