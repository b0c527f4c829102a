"""The coordinator: gathers agents, makes plans, decides about restarts and the end. Pure; see `core.machine`.

    GATHERING -> RUNNING -> STOPPING -> GATHERING ... -> FINISHED -> CLOSED

Cycles only grow, also across terms, so a delayed or repeated message about an old cycle is recognised by its cycle.
The table and the running job are here; how nodes come together is in `core.job.gathering`, what a fault means and how the
job ends in `core.job.coordinator_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar

from nvrx_slurm.core.duration import in_words
from nvrx_slurm.core.job.coordinator_events import (
    GotAsked,
    GotEndJob,
    GotFailed,
    GotStopped,
    GotSucceeded,
    GotWarnJob,
    Joined,
    Lost,
    ProgressRead,
    SendTo,
    TimeLeft,
)
from nvrx_slurm.core.job.coordinator_state import CoordinatorSettings, Phase, lost
from nvrx_slurm.core.job.gathering import Gathering
from nvrx_slurm.core.job.members import READY
from nvrx_slurm.core.job.restarts import headline
from nvrx_slurm.core.machine import Row, Say, Tick
from nvrx_slurm.errors import ExitCode
from nvrx_slurm.types import FaultKind, Finish, Node, RankFault, Warn, WorkloadAction, place_of

__all__ = ["Coordinator", "CoordinatorSettings", "Phase"]

_ALL = (Phase.GATHERING, Phase.RUNNING, Phase.STOPPING, Phase.FINISHED)
_NEXT = (Phase.STOPPING, Phase.GATHERING, Phase.RUNNING)
_FAULT = (Phase.STOPPING, Phase.FINISHED)
_OVER = (Phase.FINISHED, Phase.CLOSED)  # closed at once: nobody is here to be told


class Coordinator(Gathering):
    """The coordinator's core: `step(event, now)` -> commands; `deadline()` says when it wants a Tick."""

    # fmt: off
    table: ClassVar[Mapping[tuple[Enum, type], Row]] = {
        (Phase.GATHERING, Joined): Row("on_joined", _ALL, "count it; plan when there are enough"),
        (Phase.GATHERING, Lost): Row("on_lost", (Phase.GATHERING,), "one fewer"),
        (Phase.GATHERING, GotFailed): Row("on_failed_gathering", (Phase.GATHERING, *_FAULT), "of an older term?"),
        (Phase.GATHERING, GotSucceeded): Row("on_succeeded_gathering", (Phase.GATHERING,), "one that we may carry on"),
        (Phase.GATHERING, GotStopped): Row("on_stopped_gathering", _ALL, "one more is ready"),
        (Phase.GATHERING, GotAsked): Row("on_asked", (*_ALL, Phase.CLOSED), "a late request; an unfit node"),
        (Phase.GATHERING, GotWarnJob): Row("on_warn_job", (Phase.GATHERING,), "for those who will run"),
        (Phase.GATHERING, GotEndJob): Row("on_end", _OVER, "told to end"),
        (Phase.GATHERING, TimeLeft): Row("on_time_left", (Phase.GATHERING, *_OVER), "warn, stop or wait"),
        (Phase.GATHERING, ProgressRead): Row("on_progress", (*_ALL[:2], *_OVER), "score the last cycle"),
        (Phase.GATHERING, Tick): Row("on_tick_gathering", (*_ALL, Phase.CLOSED), "last call, timeout, pause"),
        (Phase.RUNNING, Joined): Row("on_joined", _ALL, "a new spare, or an old friend"),
        (Phase.RUNNING, Lost): Row("on_lost", _ALL, "a fault if it was active"),
        (Phase.RUNNING, GotFailed): Row("on_failed", (Phase.RUNNING, *_FAULT), "restart, go on, or the end"),
        (Phase.RUNNING, GotSucceeded): Row("on_succeeded", (Phase.RUNNING, Phase.FINISHED), "the end when all have"),
        (Phase.RUNNING, GotStopped): Row("on_stopped_running", _ALL, "a returned node is a spare now"),
        (Phase.RUNNING, GotAsked): Row("on_asked", (*_ALL, Phase.CLOSED), "exclude, shut down or go on"),
        (Phase.RUNNING, GotWarnJob): Row("on_warn_job", (Phase.RUNNING,), "tell everybody"),
        (Phase.RUNNING, GotEndJob): Row("on_end", (Phase.FINISHED,), "told to end"),
        (Phase.RUNNING, TimeLeft): Row("on_time_left", (Phase.RUNNING, Phase.FINISHED), "warn, stop or wait"),
        (Phase.RUNNING, ProgressRead): Row("on_progress", (Phase.RUNNING,), "where the job begins"),
        (Phase.RUNNING, Tick): Row("on_tick_running", (Phase.RUNNING, Phase.FINISHED), "time left; stragglers"),
        (Phase.STOPPING, Joined): Row("on_joined", _NEXT, "it may be needed at once"),
        (Phase.STOPPING, Lost): Row("on_lost", _NEXT, "nobody waits for it any more"),
        (Phase.STOPPING, GotFailed): Row("on_more_faults", (Phase.STOPPING,), "for the first-cause report"),
        (Phase.STOPPING, GotSucceeded): Row("ignore", (Phase.STOPPING,), "too late: the cycle is being stopped"),
        (Phase.STOPPING, GotStopped): Row("on_stopped_stopping", _NEXT, "next cycle when all are"),
        (Phase.STOPPING, GotAsked): Row("on_asked", (*_ALL, Phase.CLOSED), "a late request counts"),
        (Phase.STOPPING, GotWarnJob): Row("on_warn_job", (Phase.STOPPING,), "for those who will run"),
        (Phase.STOPPING, GotEndJob): Row("on_end", (Phase.FINISHED,), "told to end"),
        (Phase.STOPPING, TimeLeft): Row("on_time_left", (Phase.STOPPING, Phase.FINISHED), "warn, stop or wait"),
        (Phase.STOPPING, ProgressRead): Row("on_progress", (Phase.STOPPING, Phase.FINISHED), "score this cycle"),
        (Phase.STOPPING, Tick): Row("on_tick_stopping", _ALL, "time left; give up on the stubborn"),
        (Phase.FINISHED, Joined): Row("on_joined_finished", (Phase.FINISHED,), "it learns the end, too"),
        (Phase.FINISHED, Lost): Row("on_lost_finished", (Phase.FINISHED, Phase.CLOSED), "it has left"),
        (Phase.FINISHED, GotFailed): Row("on_more_faults", (Phase.FINISHED,), "for the first-cause report"),
        (Phase.FINISHED, GotSucceeded): Row("ignore", (Phase.FINISHED,), "the end is decided"),
        (Phase.FINISHED, GotStopped): Row("ignore", (Phase.FINISHED,), "the end is decided"),
        (Phase.FINISHED, GotAsked): Row("ignore", (Phase.FINISHED,), "the end is decided"),
        (Phase.FINISHED, GotWarnJob): Row("ignore", (Phase.FINISHED,), "the end is decided"),
        (Phase.FINISHED, GotEndJob): Row("ignore", (Phase.FINISHED,), "the end is decided"),
        (Phase.FINISHED, TimeLeft): Row("ignore", (Phase.FINISHED,), "the end is decided"),
        (Phase.FINISHED, ProgressRead): Row("ignore", (Phase.FINISHED,), "the end is decided"),
        (Phase.FINISHED, Tick): Row("on_tick_finished", (Phase.CLOSED,), "nobody waits for ever"),
    }
    # fmt: on

    # --- leaving -----------------------------------------------------------------------------------------

    def on_joined_finished(self, event: Joined, now: float) -> None:
        """A late agent learns that the job is over."""
        node = event.message.node
        self._away.pop(node.node_id, None)
        self._back_by = None
        self.members.put(node, event.message.port, READY)
        assert self._end is not None
        self.emit(SendTo(node.node_id, self._end))

    def on_lost(self, event: Lost, now: float) -> None:
        """A stream broke: a fault if the node was active in a running cycle."""
        member = self.members.remove(event.node_id)
        if member is None:
            return
        if self.assignment.group_rank(event.node_id) is not None:
            self._away[event.node_id] = now
        self.after_loss(member.node, lost(member.node, event.why), now)

    def on_lost_finished(self, event: Lost, now: float) -> None:
        """An agent has left; the last one turns off the light."""
        self.members.remove(event.node_id)
        self.close_if_alone(now)

    def after_loss(self, node: Node, fault: RankFault, now: float) -> None:
        """What the loss of a member, already removed, means in this phase."""
        if self.state is Phase.GATHERING:
            self._inherited.stopped(node.node_id)
            self.wait_for_nodes(now)
            return
        group_rank = self.assignment.group_rank(node.node_id)
        if group_rank is None and fault.kind is FaultKind.NODE_LOST:
            self.emit(Say(f"spare node {node.host} left: {fault.message}"))
        elif group_rank is None:
            return
        elif self.state is Phase.RUNNING and not self._is_past(group_rank):
            self.node_failed(group_rank, (fault,), now, gone=True)
        elif self.state is Phase.STOPPING and node.node_id in self._pending:
            self.faults.append(fault)
            self._pending.discard(node.node_id)
            self.gather_if_stopped(now)

    def _is_past(self, group_rank: int) -> bool:
        """Nothing is expected of this node in the running cycle any more."""
        return group_rank in self.assignment.succeeded or group_rank in self.assignment.gone

    # --- running and stopping -------------------------------------------------------------------------------

    def on_failed(self, event: GotFailed, now: float) -> None:
        """Ranks failed on an active node."""
        group_rank = self.assignment.group_rank(event.node_id)
        if event.message.cycle == self.cycle and group_rank is not None and group_rank not in self.assignment.gone:
            self.node_failed(group_rank, event.message.faults, now)

    def on_more_faults(self, event: GotFailed, now: float) -> None:
        """Failures that came in after the first one."""
        if event.message.cycle == self.cycle and self.assignment.group_rank(event.node_id) is not None:
            self.faults.extend(event.message.faults)

    def on_succeeded(self, event: GotSucceeded, now: float) -> None:
        """One node is done."""
        group_rank = self.assignment.group_rank(event.node_id)
        if group_rank is not None and event.message.cycle == self.cycle and group_rank not in self.assignment.gone:
            self.note_success(group_rank, event.message.early, now)

    def on_stopped_running(self, event: GotStopped, now: float) -> None:
        """A node that came back with old workers has stopped them: a spare from now on. Or an active one has
        stopped by itself, or (min-healthy) has lost its last worker."""
        if not self.note_stopped(event):
            return
        group_rank = self.assignment.group_rank(event.node_id)
        if group_rank is None:
            self.emit(SendTo(event.node_id, self.assignment.plan_for(event.node_id)))
        elif group_rank in self.assignment.broken:
            self.finish_if_done(now)
        elif group_rank not in self.assignment.succeeded:
            node = self.members[event.node_id].node
            self.node_failed(group_rank, (lost(node, "it stopped its workers unasked"),), now, gone=True)

    def on_stopped_stopping(self, event: GotStopped, now: float) -> None:
        """One node fewer to wait for."""
        if self.note_stopped(event) and event.node_id in self._pending:
            self._pending.discard(event.node_id)
            self.gather_if_stopped(now)

    def on_tick_running(self, event: Tick, now: float) -> None:
        """The job's clock, or (min-healthy) the last ranks of broken nodes take too long to end."""
        if not self.tell_time(self._clock.look(now), now):
            self.finish_if_done(now)

    def on_tick_stopping(self, event: Tick, now: float) -> None:
        """Nodes whose workers do not end are taken out of the job, so that the others can go on."""
        if self.tell_time(self._clock.look(now), now):
            return
        for node_id in sorted(self._pending):
            why = f"its workers did not end within {self.settings.stop_timeout_s:g} s"
            self.emit(Say(f"node {self.members[node_id].node.host} is given up: {why}"))
            self.refuse(node_id, why)
        self._pending = set()
        self.gather_if_stopped(now)

    # --- requests, progress, time ---------------------------------------------------------------------------

    def on_asked(self, event: GotAsked, now: float) -> None:
        """A rank wants its node out, or the job to end."""
        member, asked = self.members.get(event.node_id), event.message
        if member is None:
            return
        by = f"rank {asked.rank}" if asked.rank >= 0 else "a health check"
        who = f"{by} on node {member.node.host}"
        if asked.action is WorkloadAction.ShutdownWorkload:
            why = f"{who} asked to shut down the workload: {asked.description}"
            self.finish(Finish(self.settings.limits.no_restart_code, why), now)
        elif asked.action is WorkloadAction.ExcludeThisNode:
            self._exclude(member.node, asked.rank, asked.description, now)
        else:
            self.emit(Say(f"{who} asked to continue: {asked.description}"))

    def _exclude(self, node: Node, rank: int, why: str, now: float) -> None:
        """The node leaves at once and is not taken again; the job ends if nobody can ever take its place. `rank`: who
        asked; -1 = a health check of the node failed."""
        kind = FaultKind.EXCLUDED if rank >= 0 else FaultKind.UNHEALTHY
        fault = RankFault(kind, node.host, node.infra_rank, rank, message=why)
        self.budget.exclude(place_of(node))
        self.refuse(node.node_id, headline(fault))
        left = self.settings.max_nodes - len(self.budget.history.excluded)
        if left < self.settings.min_nodes:
            self.faults.append(fault)
            some = f"{left} nodes are left after the exclusion of {node.host}, {self.settings.min_nodes} are needed"
            self.finish(Finish(ExitCode.TOO_FEW_NODES, f"{some}: {headline(fault)}"), now)
            return
        if self.state is not Phase.RUNNING or self.assignment.group_rank(node.node_id) is None:
            self.emit(Say(headline(fault)))  # otherwise that is why the cycle has failed
        self.after_loss(node, fault, now)
        if self.state is Phase.GATHERING:
            self.try_plan(now)

    def on_progress(self, event: ProgressRead, now: float) -> None:
        """Has the job come further since the cycle before? What comes too late is not scored."""
        if event.cycle < 0:
            self.budget.begin_at(event.iteration)
        elif self._progress_by is not None:
            verdict = self.budget.score(event.iteration)
            if verdict is not None:
                self.faults = self.faults or self.last_faults
                self.finish(Finish(verdict.code, verdict.why), now)
            else:
                self.scored(now)

    def on_time_left(self, event: TimeLeft, now: float) -> None:
        """Say it once; warn or stop when it is time."""
        if event.left_s is not None and not self._clock.known:
            self.emit(Say(f"the allocation ends in {in_words(event.left_s)}"))
        self.tell_time(self._clock.answer(event.left_s, now), now)

    def on_warn_job(self, event: GotWarnJob, now: float) -> None:
        """One agent was warned: all ranks should know."""
        self.warn(Warn(event.message.signum, event.message.reason))

    # --- the end ----------------------------------------------------------------------------------------------

    def on_end(self, event: GotEndJob, now: float) -> None:
        """Slurm or a person told an agent to end the job."""
        told = event.message
        self.finish(Finish(told.code, told.reason, told.signum), now)

    def on_tick_finished(self, event: Tick, now: float) -> None:
        """Agents that have not left, or not come back, by now are left behind."""
        if len(self.members):
            left = ", ".join(node.host for node in self.members.in_order()[:16])
            self.emit(Say(f"not waiting any longer for {left} to leave"))
        self.members.clear()
        self._away.clear()
        self.close_if_alone(now)
