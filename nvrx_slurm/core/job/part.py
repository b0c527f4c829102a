"""What the parts of the coordinator have in common: how they speak to agents, and how they end the job."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.verdict import first_cause
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.job_clock import Due
from nvrx_slurm.core.job.job_data import SIGUSR1, JobData, Phase
from nvrx_slurm.core.job.members import READY, Member
from nvrx_slurm.core.job.quorum import peer_key, peer_of
from nvrx_slurm.core.job.restarts import evidence, headline
from nvrx_slurm.core.machine import Say, Table, Tick, earliest
from nvrx_slurm.errors import ExitCode, signal_exit_code

if TYPE_CHECKING:
    from nvrx_slurm.core.job.coordinator import Coordinator

MOST_SUCCESSORS = 32
_SIGTERM = 15
_FAULTS_SAID, _FAULTS_COMPARED = 4, 100  # per cycle; result.json has all


class JobPart:
    """A part of the coordinator. A part that owns states overrides the hooks below."""

    states: ClassVar[tuple[Phase, ...]] = ()  # that it owns: it is told when the machine enters the first of them
    table: ClassVar[Table]  # rows that it handles, of its own states or of those of other parts

    def __init__(self, core: Coordinator, job: JobData) -> None:
        self.core, self.job = core, job

    def ignore(self, event: object, now: float) -> None:
        """Handler of rows where nothing is to be done (the row says why)."""

    # --- what a part that owns states is told ---------------------------------------------------------------

    def enter(self, now: float) -> None:
        """The machine has come from a state of another part to one of this part's."""

    def joined(self, message: t.Register, now: float) -> None:
        """An agent has registered; it is a member already."""

    def left(self, node: t.Node, fault: t.RankFault, now: float) -> None:
        """A member is gone and removed; `fault` says why."""

    def unfenced(self, now: float) -> None:
        """Ranks that may have run elsewhere are gone."""

    def stopped(self, node_id: str, now: float) -> None:
        """A member has become ready: no worker is left on its node, which has passed its preflight."""

    def on_stopped(self, event: ev.FromAgent[t.Stopped], now: float) -> None:
        """A node has stopped its workers; a repeated or stale message changes nothing."""
        if self.job.members.note_stopped(event.node_id, event.message):
            key = peer_key(self.job.members[event.node_id].node)
            self.job.quorum.fences.pop(key, None)
            self.job.quorum.knows(key, event.message.term, event.message.cycle)
            self.stopped(event.node_id, now)

    def timer_at(self) -> float | None:
        """When this part has something to do (monotonic seconds), or None."""
        return None

    def on_timer(self, now: float) -> None:
        """That time has come."""

    def deadline(self) -> float | None:
        """The part's own timer, the end of the allocation, or that of a coordinator without a quorum."""
        return earliest(self.timer_at(), self.job.clock.deadline(), self.job.quorum.resign_at)

    def on_tick(self, event: Tick, now: float) -> None:
        """The end of the allocation goes before the part's own timer."""
        resign_at, due_at = self.job.quorum.resign_at, self.timer_at()
        if resign_at is not None and now >= resign_at:
            self.job.quorum.resign_at = None
            self.core.emit(ev.Lapsed(f"most of the job's {self.job.quorum.electors} nodes are out of reach"))
        elif not self.mind_the_clock(self.job.clock.look(now), now) and due_at is not None and now >= due_at:
            self.on_timer(now)

    # --- messages -------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Print a sentence."""
        self.core.emit(Say(text))

    def send(self, node_id: str, message: t.CoordinatorMessage) -> None:
        """To one agent."""
        self.core.emit(ev.SendTo(node_id, message))

    def send_all(self, message: t.CoordinatorMessage) -> None:
        """To all connected agents, in infra order."""
        for node in self.job.members.in_order():
            self.send(node.node_id, message)

    def send_plan(self, node_id: str) -> None:
        """The plan of the running cycle, from the point of view of one agent."""
        self.send(node_id, self.job.assignment.plan_for(node_id))

    def stop_workers(self, node_id: str, cycle: int) -> None:
        """An agent has workers of `cycle` that are not, or no longer, part of the job."""
        self.send(node_id, t.Stop(self.job.settings.term, cycle, f"its part in cycle {cycle} is over"))

    def stop_old_workers(self, message: t.Register, now: float) -> None:
        """The same for an agent that has just registered, if it has any."""
        if message.plan is not None and message.busy:
            self.stop_workers(message.node.node_id, message.plan.cycle)
            if self.job.quorum.needed:
                self.job.quorum.fences[peer_key(message.node)] = now + self.job.settings.stop_timeout_s

    def warn(self, warning: t.Warn) -> None:
        """Tell all agents, and those that come later, that the job is about to end."""
        if self.job.warning is None:
            self.job.warning = warning
            self.say(f"warning all ranks: {warning.reason}")
            self.send_all(warning)

    # --- faults, and nodes that go --------------------------------------------------------------------------

    def fail_cycle(self, cause: t.RankFault | None, now: float) -> None:
        """The cycle cannot go on: its workers are stopped."""
        assert cause is not None
        self.job.cause = cause
        self.core.go(Phase.STOPPING, now)

    def remove(self, node_id: str, why: str, now: float, fault: t.RankFault | None = None) -> None:
        """A member is lost, or is taken out for `fault`."""
        job, member = self.job, self.job.members.remove(node_id)
        if member is None:
            return
        fault = fault or lost(member.node, why)
        self._fence(member, now)
        if fault.kind is not t.FaultKind.NODE_LOST or job.assignment.group_rank(node_id) is not None:
            job.report.add_fault(fault, job.cycle, now)
        else:
            self.say(f"node {member.node.host} left: {fault.message}")
        self.core.owner.left(member.node, fault, now)

    def _fence(self, member: Member, now: float) -> None:
        """Its ranks may run until its lease is over, unless it is dead or was silent for that long."""
        quorum, s = self.job.quorum, self.job.settings
        if not quorum.needed:
            return
        key = peer_key(member.node)
        quorum.missed_at = now
        if key in quorum.silent:
            quorum.silent.discard(key)
        elif member.busy != READY:
            quorum.fences[key] = now + s.lease_s
        if member.node.port:
            self.probe(peer_of(member.node))
        self.mind_quorum(now)

    def probe(self, peer: t.Peer) -> None:
        """Ask for a proof of death."""
        self.job.quorum.probed[peer.key] = peer
        self.core.emit(ev.Probe(peer))

    def mind_quorum(self, now: float) -> None:
        """Without a quorum nothing is planned, and after a while this coordinator resigns."""
        quorum, peer = self.job.quorum, self.job.settings.peer
        own = {peer.key} if peer is not None else set()  # also where the agent of this node was refused
        if quorum.enough(self.job.members.keys_of_nodes | own):
            quorum.resign_at = None
        elif quorum.resign_at is None:
            quorum.resign_at = now + self.job.settings.prove_s

    def elected(self, plan: t.Plan) -> t.Plan:
        """The plan with what agents need for the election of the next coordinator."""
        peer, quorum = self.job.settings.peer, self.job.quorum
        if peer is None:
            return plan
        others = [peer_of(node) for node in self.job.members.in_order() if peer_key(node) != peer.key and node.port]
        step = max(1, len(others) / MOST_SUCCESSORS)
        successors = tuple(others[int(i * step)] for i in range(min(len(others), MOST_SUCCESSORS)))
        quorum.electors = max(quorum.electors, len(quorum.dead.union(self.job.members.keys_of_nodes)))
        quorum.plan(plan.term, plan.cycle, self.job.members.keys_of_nodes)
        return replace(plan, leader=peer, successors=successors, electors=quorum.electors)

    def note_dead(self) -> None:
        """Nodes that get the plan of this cycle from now on learn that they have no vote."""
        shared, quorum = self.job.assignment.shared, self.job.quorum
        if shared is not None:
            dead, returned = tuple(sorted(quorum.dead)), tuple(sorted(quorum.returned))
            self.job.assignment.shared = replace(shared, dead=dead, returned=returned)

    def refuse(self, node_id: str, why: str, now: float, fault: t.RankFault | None = None) -> None:
        """Send an agent away; a member is removed."""
        self.send_away(node_id, why)
        self.remove(node_id, why, now, fault)

    def exclude(self, node: t.Node, rank: int, why: str, now: float) -> None:
        """The node leaves at once and is not taken again; the job ends if no node can ever take its place. `rank`: the
        rank that asked; -1 = a health check or a rule says so."""
        job = self.job
        kind = t.FaultKind.EXCLUDED if rank >= 0 else t.FaultKind.UNHEALTHY
        fault = t.RankFault(kind, node.host, node.infra_rank, rank, message=why)
        job.budget.exclude(node)
        if job.nodes_left < job.settings.min_nodes:
            job.add_faults((fault,), now)
            needed = f"{job.settings.min_nodes} are needed"
            some = f"{job.nodes_left} nodes are left after the exclusion of {node.host}, {needed}"
            job.members.remove(node.node_id)
            self.send_away(node.node_id, headline(fault))
            self.finish(t.Finish(ExitCode.TOO_FEW_NODES, f"{some}: {headline(fault)}"), now)
            return
        if self.core.state is not Phase.RUNNING or job.assignment.group_rank(node.node_id) is None:
            self.say(headline(fault))  # otherwise that is why the cycle has failed
        self.refuse(node.node_id, headline(fault), now, fault)

    def send_away(self, node_id: str, why: str) -> None:
        """Tell an agent that it is not taken, and close its stream."""
        self.send(node_id, t.Refused(ExitCode.NODE_REFUSED, why))
        self.core.emit(ev.Drop(node_id))

    def more_faults(self, event: ev.FromAgent[t.Failed], now: float) -> None:
        """Faults of the last cycle that arrive after it was given up."""
        current = event.message.cycle == self.job.cycle
        if current and self.job.assignment.group_rank(event.node_id) is not None:
            for fault in event.message.faults:
                if self.job.add_faults((fault,), now):
                    self._say_if_new(fault)

    def _say_if_new(self, fault: t.RankFault) -> None:
        """Comparing a fault with all others is slow: of the many ranks of a big job only the first are compared."""
        cause = self.job.cause
        if fault.kind is t.FaultKind.HANG and cause is not None and cause.finding is not None:
            return  # one of the ranks that wait for the first cause
        known = len(self.job.faults)
        first = known <= _FAULTS_COMPARED and first_cause(self.job.faults) == fault
        if self.job.end is None and (first or known <= _FAULTS_SAID):
            what = "more likely the cause" if first else "also failed"
            self.say(f"{what}: {headline(fault)}{evidence(fault)}")

    # --- the end --------------------------------------------------------------------------------------------

    def finish(self, end: t.Finish, now: float) -> None:
        """Decide the end and tell all agents."""
        self.job.end = end
        self.core.go(Phase.FINISHED, now)

    def mind_the_clock(self, due: Due, now: float) -> bool:
        """Do what the end of the allocation asks for; whether that was something."""
        s = self.job.settings
        if due is Due.ASK:
            self.core.emit(ev.AskTimeLeft())
        elif due is Due.WARN:
            left = f"less than {s.warn_before_end_s:g} s of the allocation are left"
            self.warn(t.Warn(s.warning_signum or SIGUSR1, left))
        elif due is Due.STOP:
            left = f"less than {s.stop_before_end_s:g} s of the allocation are left"
            self.job.report.out_of_time = True
            self.finish(t.Finish(signal_exit_code(_SIGTERM), left, _SIGTERM), now)
        return due is not Due.NOTHING


def lost(node: t.Node, why: str) -> t.RankFault:
    """A node that is gone, as a fault."""
    return t.RankFault(t.FaultKind.NODE_LOST, node.host, node.infra_rank, message=why)
