"""The coordinator: gathers agents, makes plans, decides about restarts and the end. Pure; see `core.machine`.

    ELECTING -> JOINING -> RUNNING -> STOPPING -> JOINING ... -> FINISHED -> CLOSED

Each part handles some states or some events; its module tells that part of the story:
`takeover` (wait for a quorum, where the job has several nodes; carry on with a cycle of an older term), `gathering`
(wait for nodes, plan), `running`, `stopping` (it has failed), `hangs`, `ending`. `AnyTime`, below, works in all states
before the end. The parts share the members (`roster`), what happened (`report`), the budget (`restarts`) and where
the job is (`placement`).

A message names its term and its cycle, so a delayed or repeated one about an old cycle is recognised. Within a term
cycles only grow. A new coordinator goes on above the highest cycle of which a voter has told it. Where no voter knows
of any, the job begins anew: with cycle 0, in a later term.
"""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.verdict import evidence, first_cause, headline
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.assignment import Assignment
from nvrx_slurm.core.coordinator.ending import Due, Ending
from nvrx_slurm.core.coordinator.exclusion import Exclusion
from nvrx_slurm.core.coordinator.gathering import Gathering
from nvrx_slurm.core.coordinator.inherited import Inherited
from nvrx_slurm.core.coordinator.hangs import HangSearch
from nvrx_slurm.core.coordinator.members import Use, lost
from nvrx_slurm.core.coordinator.report import Ledger
from nvrx_slurm.core.coordinator.restarts import Budget
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.running import Running
from nvrx_slurm.core.coordinator.states import FAILED, LIVE, OVER, RUNS, CoordinatorSettings, JobState, Stage, live_but
from nvrx_slurm.core.coordinator.stopping import Stopping
from nvrx_slurm.core.coordinator.takeover import Electing, Takeover
from nvrx_slurm.core.election.quorum import peer_key
from nvrx_slurm.core.machine import Machine, Say, Tick, earliest, rows
from nvrx_slurm.core.straggler.suspects import Suspects
from nvrx_slurm.core.words import in_words
from nvrx_slurm.declared import replace

__all__ = ["Coordinator", "CoordinatorSettings", "Stage"]

_LAST_CYCLE = 1_000_000  # a plan of a later one is a defect of its agent: the next cycle could not be numbered
_FAULTS_SAID, _FAULTS_COMPARED = 4, 100  # per cycle; result.json has all
_END = (Stage.FINISHED,)


class AnyTime:
    """Handles arrivals and losses, requests, warnings, the end on request, and answers of the coordinator's program."""

    table = rows(
        (LIVE, ev.Joined, "on_joined", (), "a new node, a returning one, or a takeover"),
        (LIVE, ev.Known, "on_known", _END, "it may know the end of the job"),
        (LIVE, ev.Lost, "on_lost", (), "the state decides what that means"),
        (LIVE, Tick, "on_tick", _END, "the end of the allocation goes before the timer of the state"),
        (LIVE, t.Asked, "on_asked", _END, "exclude, shut down or go on"),
        (LIVE, t.Warmth, "on_warmth", (), "the next plan says how ranks are started"),
        (live_but(Stage.LAST_CALL), t.NodeUnfit, "on_unfit", _END, "exclude it"),
        (Stage.LAST_CALL, t.NodeUnfit, "on_unfit", (), "more nodes than are needed may come"),
        (live_but(Stage.RUNNING), (t.Hung, t.Evidence), "ignore", (), "of another time"),
        ((*LIVE, *OVER[:2]), t.Spent, "ignore", (), "for the account"),
        (LIVE, t.WarnJob, "on_warn_job", (), "tell all agents"),
        (LIVE, t.EndJob, "on_end_job", _END, "told to end"),
        (LIVE, ev.TimeLeftRead, "on_time_left", _END, "warn, stop or wait"),
        (LIVE, ev.ProvenDead, "on_dead", (), "its ranks are gone, and it is not counted any more"),
        (LIVE, ev.CheckpointsFound, "on_checkpoints", (), "where ranks resume; the first plan may wait for it"),
        (LIVE, ev.ReachedRead, "on_reached", (), "how far the failed cycle got"),
        (LIVE, ev.Raised, "ignore", (), "too late: elected"),
        (LIVE, t.EndKnown, "ignore", (), "it has registered with the end of the job"),
        (Stage.TAKEOVER, ev.Advised, "on_advised", (), "no cycle of this term has failed: it is only said"),
        (live_but(Stage.TAKEOVER), ev.Advised, "on_advised", _END, "if the user wants that, and it holds"),
        (live_but(*FAILED), ev.ProgressRead, "on_progress", (), "where the job begins; a late answer"),
        ((*FAILED, *OVER[:2]), t.RanksFailed, "on_late_faults", (), "for the first cause and the failure table"),
    )

    def __init__(self, core: Coordinator) -> None:
        self._core = core
        self._s = core.settings
        self._out = core.out
        self._job = core.job
        self._ledger = core.ledger
        self._budget = core.budget
        self._ending = core.ending
        self._exclusion = core.exclusion
        self._roster = core.roster
        self._members = core.roster.members
        self._quorum = core.roster.quorum

    # --- agents come and go ---------------------------------------------------------------------------------

    def on_joined(self, event: ev.Joined, now: float) -> None:
        """A new agent, a returning one, or one that reports what it runs to a new coordinator."""
        roster = self._roster
        message = event.message
        node = event.message.node
        if message.plan is not None and message.plan.cycle > _LAST_CYCLE:
            roster.refuse(node.node_id, f"cycle {message.plan.cycle} of its plan is above {_LAST_CYCLE}", now)
            return
        roster.lost_at.pop(node.node_id, None)
        self._job.held[node.node_id] = message.held
        roster.lead(message)
        self._learn(message, now)
        if self._budget.excludes(node):
            roster.refuse(node.node_id, f"node {node.host} was excluded from this job", now)
            return
        old = self._members.same_place(node)
        self._members.put(node, message.port, Use.JOINING)
        self._regain(peer_key(node), now)
        if self._ending.warning is not None:
            self._out.append(ev.SendTo(node.node_id, self._ending.warning))
        if old is not None and old.node.node_id != node.node_id:
            roster.refuse(old.node.node_id, f"a newer agent of node {node.host} has joined in its place", now)
        self._out.posted.append(ev.Known(message))

    def _regain(self, key: str, now: float) -> None:
        """A node has registered. Where a quorum was missing, it counts if it cannot have voted for another one."""
        if self._quorum.strayed(key, now):
            self._quorum.strays.add(key)
        elif self._quorum.resign_at is not None:
            self._roster.mind_quorum(now)

    def _learn(self, message: t.Register, now: float) -> None:
        """Take over what the agent knows of earlier terms."""
        job, roster = self._job, self._roster
        job.inherited.running.remove(message.node.node_id)  # unless the agent says otherwise in a moment
        if message.plan is None:
            return
        overtaken, excludes = roster.inherit(message.plan)
        if excludes:  # one that joined before this was known may have been excluded
            for node in self._members.in_order():
                if self._budget.excludes(node):
                    roster.refuse(node.node_id, "it was excluded in an earlier term", now)
        for node_id in overtaken:
            roster.stop_workers(node_id, job.inherited.last_cycle)

    def on_known(self, event: ev.Known, now: float) -> Stage | None:
        """Where it knows the end of the job, this is told to all."""
        message, node_id = event.message, event.message.node.node_id
        if message.end is not None:
            return self._ending.decide(message.end)
        if message.doing is t.Activity.PREPARING:
            self._members.set_use(node_id, Use.PREPARING)
        elif message.busy and message.plan is not None:
            self._members.set_use(node_id, Use.BUSY, message.plan.cycle)
        else:
            self._members.set_use(node_id, Use.READY)
        self._out.posted.append(ev.Arrived(message))
        return None

    def on_lost(self, event: ev.Lost, now: float) -> None:
        """A stream broke."""
        member = self._members.get(event.node_id)
        silent = event.silent_s >= self._s.lease_s
        if member is not None:
            self._quorum.silent_s = event.silent_s
        if member is not None and event.node_id in self._job.assignment.group_ranks:
            self._roster.lost_at[event.node_id] = now
        fault = replace(lost(member.node, event.why), silent_s=self._s.lease_s) if member and silent else None
        self._roster.remove(event.node_id, event.why, now, fault)

    def on_dead(self, event: ev.ProvenDead, now: float) -> None:
        """A plan may have waited for this. It comes too late where the node may have voted for another one before."""
        members = self._members.keys_of_nodes
        quorum = self._quorum
        key = event.peer.key
        if key not in members and quorum.is_proof(event.peer, now) and not quorum.strayed(key, now):
            quorum.died(key, members)
            self._roster.note_dead()
            self._roster.mind_quorum(now)
            self._out.posted.append(ev.Cleared())

    def on_tick(self, event: Tick, now: float) -> Stage | None:
        """Without a quorum this coordinator resigns."""
        quorum, due_at = self._quorum, self._core.timer_at()
        if quorum.resign_at is not None and now >= quorum.resign_at:
            quorum.resign_at = None
            self._out.append(ev.Lapsed(f"most of the job's {quorum.electors} nodes are out of reach"))
            return None
        due = self._ending.clock.check(now)
        if due is Due.NOTHING and due_at is not None and now >= due_at:
            self._out.posted.append(ev.Timer())
        return self._ending.mind_the_clock(due)

    def on_late_faults(self, event: ev.FromAgent[t.RanksFailed], now: float) -> None:
        """Faults of the last cycle that arrive after it was given up."""
        if self._ending.end is not None and not self._ledger.faults:
            return  # the job ends without a fault: what ranks say while they are stopped is no cause
        job = self._job
        if event.message.cycle == job.cycle and event.node_id in job.assignment.group_ranks:
            for fault in event.message.faults:
                if self._ledger.add((fault,), job.cycle, now):
                    self._say_if_new(fault)

    def _say_if_new(self, fault: t.RankFault) -> None:
        """Comparing a fault with all others is slow: of the many ranks of a big job only the first are compared."""
        cause, faults = self._ledger.cause, self._ledger.faults
        if fault.kind is t.FaultKind.HANG and cause is not None and cause.finding is not None:
            return  # one of the ranks that wait for the first cause
        first = len(faults) <= _FAULTS_COMPARED and first_cause(faults) == fault
        if self._ending.end is None and (first or len(faults) <= _FAULTS_SAID):
            what = "more likely the cause" if first else "also failed"
            self._out.append(Say(f"{what}: {headline(fault)}{evidence(fault)}"))

    # --- requests and answers -------------------------------------------------------------------------------

    def on_asked(self, event: ev.FromAgent[t.Asked], now: float) -> Stage | None:
        """A rank wants its node out, or the job to end."""
        member, asked = self._members.get(event.node_id), event.message
        if member is None:
            return None
        if asked.action is t.WorkloadAction.ExcludeThisNode:
            return self._exclude(member.node, asked.rank, asked.description, now)
        asker = f"rank {asked.rank} on node {member.node.host}"
        if asked.action is t.WorkloadAction.ShutdownWorkload:
            why = f"{asker} asked to shut down the workload: {asked.description}"
            return self._ending.decide(t.Finish(self._s.limits.no_restart_code, why))
        self._out.append(Say(f"{asker} reports: {asked.description}"))
        return None

    def on_warmth(self, event: ev.FromAgent[t.Warmth], now: float) -> None:
        """Whether a node can fork its ranks."""
        self._job.warmth[event.node_id] = event.message

    def on_unfit(self, event: ev.FromAgent[t.NodeUnfit], now: float) -> Stage | None:
        """A health check of the node has failed."""
        member = self._members.get(event.node_id)
        return None if member is None else self._exclude(member.node, -1, event.message.reason, now)

    def _exclude(self, node: t.Node, rank: int, why: str, now: float) -> Stage | None:
        """The exclusion of an active node makes the cycle that runs fail, which says why."""
        active = self._core.state is Stage.RUNNING and node.node_id in self._job.assignment.group_ranks
        end = self._exclusion.exclude(node, rank, why, now, quiet=active)
        return None if end is None else self._ending.decide(end)

    def on_progress(self, event: ev.ProgressRead, now: float) -> None:
        """The checkpoint that the job begins with. The answer about a failed cycle comes too late."""
        if event.cycle < 0:
            self._budget.begin_at(event.iteration)

    def on_checkpoints(self, event: ev.CheckpointsFound, now: float) -> None:
        """Known now, and said in the next plan."""
        self._budget.found(event.saved)
        self._out.posted.append(ev.Cleared())

    def on_reached(self, event: ev.ReachedRead, now: float) -> None:
        """An answer that comes after the next plan is of no use."""
        if event.cycle == self._job.cycle and self._core.state in FAILED:
            self._ledger.reached = event.iteration

    def on_time_left(self, event: ev.TimeLeftRead, now: float) -> Stage | None:
        """Say it once; warn or stop when it is time."""
        clock = self._ending.clock
        if event.left_s is not None and clock.end_at is None:
            self._out.append(Say(f"the allocation ends in {in_words(event.left_s)}"))
        return self._ending.mind_the_clock(clock.answer(event.left_s, now))

    def on_advised(self, event: ev.Advised, now: float) -> Stage | None:
        """A service has an opinion. It ends the job only where the user chose so, and while it holds."""
        s, said = self._s, f"attribution of cycle {event.cycle}: {event.text}"
        running_s = now - self._job.started_at if self._core.state in RUNS else None
        void = self._ledger.advice.why_void(event.cycle, running_s)
        if event.stop and s.stops_on_advice and not void:
            return self._ending.decide(t.Finish(s.limits.no_restart_code, said))
        if event.stop:
            said += f"; {void or 'the job goes on (--ft-attribution-stop-action log)'}"
        self._out.append(Say(said))
        return None

    def on_warn_job(self, event: ev.FromAgent[t.WarnJob], now: float) -> None:
        """One agent was warned: all ranks should know."""
        self._ending.warn(t.Warn(event.message.signum, event.message.reason))

    def on_end_job(self, event: ev.FromAgent[t.EndJob], now: float) -> Stage:
        """Slurm or a person told an agent to end the job."""
        told = event.message
        return self._ending.decide(t.Finish(told.code, told.reason, told.signum))


class Coordinator(Machine):
    """The coordinator's core: `step(event, now)` -> commands; `deadline()` says when it wants a Tick."""

    made_of = ("settings",)
    last = Stage.CLOSED
    envelope = (ev.FromAgent,)
    parts = (Roster, Electing, Gathering, Takeover, Running, Stopping, Ending, HangSearch, Suspects, AnyTime)

    def __init__(self, settings: CoordinatorSettings, now: float) -> None:
        super().__init__(Stage.JOINING, now)
        s, out = settings, self.out
        self.settings = s
        self.job = JobState(s.term, now, Assignment(), Inherited())
        self.budget, self.ledger = Budget(s.max_restarts, s.limits), Ledger(now, s.began_s)
        self.roster = roster = Roster(s, out, self.job, self.ledger, self.budget)
        self.exclusion = exclusion = Exclusion(s, out, roster)
        self.ending = ending = Ending(s, out, roster, exclusion, now)
        self.hangs = hangs = HangSearch(s, out, roster)
        self.suspects = suspects = Suspects(s, out, roster, exclusion)
        self.electing = Electing(s, out, roster, ending, now)
        self.stopping = Stopping(s, out, roster, ending, exclusion)
        self.gathering = gathering = Gathering(s, out, roster, ending, exclusion)
        takeover = Takeover(s, out, roster)
        running = Running(s, out, roster, ending, hangs)
        timed = (gathering, takeover, running, self.stopping)
        self.bind(roster, *timed, self.electing, ending, hangs, suspects, AnyTime(self))
        self._owner: dict[Stage, Gathering | Takeover | Running | Stopping] = {
            state: part for part in timed for state in part.states
        }
        if roster.quorum.elected:
            gathering.begin(now)
        else:
            self.state = Stage.ELECTING

    def timer_at(self) -> float | None:
        """When the state itself has something to do (monotonic seconds), or None."""
        assert isinstance(self.state, Stage)
        return self._owner[self.state].timer_at(self.state)

    def deadline(self) -> float | None:
        """The state's own timer, the end of the allocation, or that of a coordinator without a quorum."""
        if self.state is Stage.ELECTING:
            return self.electing.deadline()
        if self.state in OVER:
            return self.ending.deadline(self.state)
        return earliest(self.timer_at(), self.ending.clock.deadline(), self.roster.quorum.resign_at)

    def validate(self) -> None:
        """What holds after each step."""
        super().validate()
        job = self.job
        members = self.roster.members
        end = self.ending.end
        assert (end is not None) == (self.state in OVER), f"{self.state.name}, but the end is {end}"
        assert members.ready == sum(member.use is Use.READY for member in members.values()), "ready nodes"
        joining = any(member.use is Use.JOINING for member in members.values())
        assert not joining or self.state in OVER, "a member was forgotten"
        assert self.roster.quorum.elected or self.state in (Stage.ELECTING, *OVER), "no quorum was won"
        if self.state in RUNS:
            assert job.assignment.shared is not None and not job.fresh and job.cycle >= 0, "no plan runs"
            assert (job.assignment.shared.term, job.assignment.shared.cycle) == (job.term, job.cycle), "another plan"
        if self.state is Stage.STOPPING:
            assert self.stopping.pending and self.stopping.pending <= members.keys(), "nothing is waited for"
        if self.state is Stage.TAKEOVER:
            assert job.fresh and job.inherited.running, "nothing to carry on with"
