"""What may come at any time before the end: agents that come and go, requests, warnings, and answers of the program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.ending import Due
from nvrx_slurm.core.coordinator.members import Use
from nvrx_slurm.core.coordinator.part import Part
from nvrx_slurm.core.coordinator.states import FAILED, LIVE, OVER, RUNS, Stage, live_but
from nvrx_slurm.core.election.quorum import peer_key
from nvrx_slurm.core.machine import Tick, rows
from nvrx_slurm.core.words import in_words

if TYPE_CHECKING:
    from nvrx_slurm.core.coordinator.coordinator import Coordinator

_LAST_CYCLE = 1_000_000  # a plan of a later one is a defect of its agent: the next cycle could not be numbered
_END = (Stage.FINISHED,)


class AnyTime(Part):
    """Handles arrivals and losses, requests, warnings, the end on request, and answers of the coordinator's program."""

    table = rows(
        (LIVE, ev.Joined, "on_joined", (), "a new node, a returning one, or a takeover"),
        (LIVE, ev.Known, "on_known", _END, "it may know the end of the job"),
        (
            LIVE,
            Tick,
            "on_tick",
            _END,
            "the end of the allocation goes before the timer of the state",
        ),
        (LIVE, t.Asked, "on_asked", _END, "exclude, shut down or go on"),
        (LIVE, t.Warmth, "on_warmth", (), "the next plan says how ranks are started"),
        (LIVE, t.Loaded, "on_loaded", (), "where its ranks go on"),
        (live_but(Stage.LAST_CALL), t.NodeUnfit, "on_unfit", _END, "exclude it"),
        (Stage.LAST_CALL, t.NodeUnfit, "on_unfit", (), "more nodes than are needed may come"),
        (live_but(Stage.RUNNING), (t.Hung, t.Evidence), "ignore", (), "of another time"),
        ((*LIVE, *OVER[:2]), t.Spent, "ignore", (), "for the account"),
        (LIVE, t.WarnJob, "on_warn_job", (), "tell all agents"),
        (LIVE, t.EndJob, "on_end_job", _END, "told to end"),
        (LIVE, ev.TimeLeftRead, "on_time_left", _END, "warn, stop or wait"),
        (LIVE, ev.ProvenDead, "on_dead", (), "its ranks are gone, and it is not counted any more"),
        (
            LIVE,
            ev.CheckpointsFound,
            "on_checkpoints",
            (),
            "where ranks resume; the first plan may wait for it",
        ),
        (LIVE, ev.ReachedRead, "on_reached", (), "how far the failed cycle got"),
        (LIVE, ev.Raised, "ignore", (), "too late: elected"),
        (LIVE, t.EndKnown, "ignore", (), "it has registered with the end of the job"),
        (
            Stage.TAKEOVER,
            ev.Advised,
            "on_advised",
            (),
            "no cycle of this term has failed: it is only said",
        ),
        (
            live_but(Stage.TAKEOVER),
            ev.Advised,
            "on_advised",
            _END,
            "if the user wants that, and it holds",
        ),
        (
            live_but(*FAILED),
            ev.ProgressRead,
            "on_progress",
            (),
            "where the job begins; a late answer",
        ),
        (
            (*FAILED, *OVER[:2]),
            t.RanksFailed,
            "on_late_faults",
            (),
            "for the first cause and the failure table",
        ),
    )

    def __init__(self, core: Coordinator) -> None:
        super().__init__(core.roster)
        self._core = core
        self._ending = core.ending
        self._exclusion = core.exclusion

    # --- agents come and go ---------------------------------------------------------------------------------

    def on_joined(self, event: ev.Joined, now: float) -> None:
        """A new agent, a returning one, or one that reports what it runs to a new coordinator."""
        roster = self._roster
        message = event.message
        node = event.message.node
        if message.plan is not None and message.plan.cycle > _LAST_CYCLE:
            why = f"cycle {message.plan.cycle} of its plan is above {_LAST_CYCLE}"
            roster.refuse(node.node_id, why, now)
            return
        roster.is_back(node)
        self._learn(message, now)
        if self._budget.excludes(node):  # its fence stays: it may run ranks until it has read this
            roster.refuse(node.node_id, f"node {node.host} was excluded from this job", now)
            return
        roster.lead(message)
        old = self._members.same_place(node)
        self._members.put(node, message.port, Use.JOINING, message.held)
        if self._quorum.returns(peer_key(node), now):
            roster.mind_quorum(now)
        if self._ending.warning is not None:
            self._send(node.node_id, self._ending.warning)
        if old is not None and old.node.node_id != node.node_id:
            why = f"a newer agent of node {node.host} has joined in its place"
            roster.refuse(old.node.node_id, why, now)
        self._out.post(ev.Known(message))

    def _learn(self, message: t.Register, now: float) -> None:
        """Take over what the agent knows of earlier terms."""
        inherited = self._job.inherited
        roster = self._roster
        inherited.without(message.node.node_id)  # unless the agent says otherwise in a moment
        if message.plan is None:
            return
        overtaken, excludes = roster.inherit(message.plan)
        if excludes:  # one that joined before this was known may have been excluded
            for node in self._members.in_order():
                if self._budget.excludes(node):
                    roster.refuse(node.node_id, "it was excluded in an earlier term", now)
        for node_id in overtaken:
            roster.stop_workers(node_id, inherited.last_cycle)

    def on_known(self, event: ev.Known, now: float) -> Stage | None:
        """Where it knows the end of the job, this is told to all."""
        message = event.message
        node_id = message.node.node_id
        if message.end is not None:
            return self._ending.decide(message.end)
        if message.doing is t.Activity.PREPARING:
            self._members.set_use(node_id, Use.PREPARING)
        elif message.busy and message.plan is not None:
            self._members.set_use(node_id, Use.BUSY, message.plan.cycle)
        else:
            self._members.set_use(node_id, Use.READY)
        self._out.post(ev.Arrived(message))
        return None

    def on_dead(self, event: ev.ProvenDead, now: float) -> None:
        """A plan may have waited for this. It comes too late where the node may have voted for another one before."""
        members = self._members.keys_of_nodes
        quorum = self._quorum
        key = event.peer.key
        roster = self._roster
        if key in members:
            return
        if quorum.is_late(key, roster.here, event.unheard, now):
            return
        if quorum.is_proof(event.peer, now):
            quorum.died(key, members)
            roster.note_dead()
            roster.mind_quorum(now)
            self._out.post(ev.Cleared())

    def on_tick(self, event: Tick, now: float) -> Stage | None:
        """Without a quorum this coordinator resigns."""
        due_at = self._core.timer_at()
        if self._quorum.resigns(now):
            lapsed = f"most of the job's {self._quorum.electors} nodes are out of reach"
            self._out.append(ev.Lapsed(lapsed))
            return None
        due = self._ending.clock.check(now)
        is_due = due_at is not None and now >= due_at
        if is_due and due is Due.NOTHING:
            self._out.post(ev.Timer())
        return self._ending.mind_the_clock(due)

    def on_late_faults(self, event: ev.FromAgent[t.RanksFailed], now: float) -> None:
        """Faults of the last cycle that arrive after it was given up."""
        if self._ending.end is not None and not self._ledger.faults:
            return  # the job ends without a fault: what ranks say while they are stopped is no cause
        message = event.message
        job = self._job
        if message.cycle != job.cycle or event.node_id not in job.assignment.group_ranks:
            return
        for fault in message.faults:
            if self._ledger.add((fault,), job.cycle, now) and self._ending.end is None:
                self._say_late(fault)

    # --- requests and answers -------------------------------------------------------------------------------

    def on_asked(self, event: ev.FromAgent[t.Asked], now: float) -> Stage | None:
        """A rank wants its node out, or the job to end."""
        member = self._members.get(event.node_id)
        asked = event.message
        if member is None:
            return None
        if asked.action is t.WorkloadAction.ExcludeThisNode:
            return self._exclude(member.node, asked.rank, asked.description, now)
        asker = f"rank {asked.rank} on node {member.node.host}"
        if asked.action is t.WorkloadAction.ShutdownWorkload:
            why = f"{asker} asked to shut down the workload: {asked.description}"
            return self._ending.decide(t.Finish(self._s.limits.no_restart_code, why))
        self._say(f"{asker} reports: {asked.description}")
        return None

    def on_warmth(self, event: ev.FromAgent[t.Warmth], now: float) -> None:
        """Whether a node can fork its ranks."""
        self._members.note_warmth(event.node_id, event.message)

    def on_loaded(self, event: ev.FromAgent[t.Loaded], now: float) -> None:
        """What the ranks of the cycle have found in memory."""
        told = event.message
        if told.cycle == self._job.cycle and self._ledger.loaded(told):
            self._say(f"cycle {told.cycle}: {told.message}")

    def on_unfit(self, event: ev.FromAgent[t.NodeUnfit], now: float) -> Stage | None:
        """A health check of the node has failed."""
        member = self._members.get(event.node_id)
        if member is None:
            return None
        return self._exclude(member.node, -1, event.message.reason, now)

    def _exclude(self, node: t.Node, rank: int, why: str, now: float) -> Stage | None:
        """The exclusion of an active node makes the cycle that runs fail, which says why."""
        has_ranks = node.node_id in self._job.assignment.group_ranks
        fails = has_ranks and self._core.state is Stage.RUNNING
        end = self._exclusion.exclude(node, rank, why, now, quiet=fails)
        return None if end is None else self._ending.decide(end)

    def on_progress(self, event: ev.ProgressRead, now: float) -> None:
        """The checkpoint that the job begins with. The answer about a failed cycle comes too late."""
        if event.cycle < 0:
            self._budget.begin_at(event.iteration)

    def on_checkpoints(self, event: ev.CheckpointsFound, now: float) -> None:
        """Known now, and said in the next plan."""
        self._budget.found(event.saved)
        self._out.post(ev.Cleared())

    def on_reached(self, event: ev.ReachedRead, now: float) -> None:
        """An answer that comes after the next plan is of no use."""
        if event.cycle == self._job.cycle and self._core.state in FAILED:
            self._ledger.got_to(event.iteration)

    def on_time_left(self, event: ev.TimeLeftRead, now: float) -> Stage | None:
        """Say it once; warn or stop when it is time."""
        clock = self._ending.clock
        if event.left_s is not None and clock.end_at is None:
            self._say(f"the allocation ends in {in_words(event.left_s)}")
        return self._ending.mind_the_clock(clock.answer(event.left_s, now))

    def on_advised(self, event: ev.Advised, now: float) -> Stage | None:
        """The attribution service has answered. Its STOP ends the job only where the user chose so, and only if no
        later cycle has failed otherwise or got further."""
        said = f"attribution of cycle {event.cycle}: {event.text}"
        runs = self._core.state in RUNS
        running_s = now - self._job.started_at if runs else None
        void = self._ledger.advice.why_void(event.cycle, running_s)
        if event.stop and self._s.stops_on_advice and not void:
            return self._ending.decide(t.Finish(self._s.limits.no_restart_code, said))
        if event.stop:
            said += f"; {void or 'the job goes on (--ft-attribution-stop-action log)'}"
        self._say(said)
        return None

    def on_warn_job(self, event: ev.FromAgent[t.WarnJob], now: float) -> None:
        """One agent was warned: all ranks should know."""
        self._ending.warn(t.Warn(event.message.signum, event.message.reason))

    def on_end_job(self, event: ev.FromAgent[t.EndJob], now: float) -> Stage:
        """Slurm or a person told an agent to end the job."""
        told = event.message
        return self._ending.decide(t.Finish(told.code, told.reason, told.signum))
