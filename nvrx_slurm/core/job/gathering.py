"""How the coordinator gets its nodes together: joining, planning, and carrying on what an earlier term began."""

from __future__ import annotations

from nvrx_slurm.core.job.assignment import Assignment, Slot
from nvrx_slurm.core.job.coordinator_events import (
    Drop,
    GotFailed,
    GotStopped,
    GotSucceeded,
    Joined,
    ReadProgress,
    SendTo,
)
from nvrx_slurm.core.job.coordinator_state import CoordinatorState, Phase, lost
from nvrx_slurm.core.job.inherited import busy_cycle, is_busy
from nvrx_slurm.core.job.members import JOINING, PREPARING, READY
from nvrx_slurm.core.job.placement import place
from nvrx_slurm.core.job.restarts import first_cause
from nvrx_slurm.core.machine import Say, Tick, earliest
from nvrx_slurm.errors import ExitCode
from nvrx_slurm.types import Doing, FaultKind, Finish, Node, Plan, RankFault, Refused, Register, Stop


class Gathering(CoordinatorState):
    """The coordinator's handlers for agents that come, and for the phase GATHERING."""

    # --- joining ---------------------------------------------------------------------------------------

    def on_joined(self, event: Joined, now: float) -> None:
        """A new agent, a returning one, or one that reports what it runs to a new coordinator."""
        message, node = event.message, event.message.node
        if self.is_excluded(node):
            self.refuse(node.node_id, f"node {node.host} was excluded from this job")
            return
        old = self.members.same_place(node)
        self._away.pop(node.node_id, None)
        self._learn(message, now)
        self.members.put(node, message.port, JOINING)
        if self._warning is not None:
            self.emit(SendTo(node.node_id, self._warning))
        if old is not None and old.node.node_id != node.node_id:
            self._replace(old.node, node, now)
        if self.state is Phase.FINISHED:
            return  # it was told with all the others
        self.members.set_busy(node.node_id, busy_cycle(message))
        if self.state is Phase.RUNNING:
            self._joined_running(message, now)
        elif self.state is Phase.STOPPING:
            self._joined_stopping(message, now)
        else:
            self._joined_gathering(message, now)

    def _refuse_excluded(self, now: float) -> None:
        """An earlier term had excluded somebody whom we took before we could know."""
        self._excluded_seen = len(self.budget.history.excluded)
        for node in self.members.in_order():
            if self.is_excluded(node):
                why = "it was excluded in an earlier term"
                self.refuse(node.node_id, why)
                self.after_loss(node, lost(node, why), now)

    def _learn(self, message: Register, now: float) -> None:
        self._inherited.stopped(message.node.node_id)  # unless it says otherwise in a moment
        if message.plan is None:
            return
        self.budget.inherit(message.plan.history)
        if len(self.budget.history.excluded) > self._excluded_seen:
            self._refuse_excluded(now)
        for node_id in self._inherited.learn(message.plan):
            self._stop_stranger(node_id, self._inherited.last_cycle)

    def _joined_running(self, message: Register, now: float) -> None:
        node, plan, assignment = message.node, message.plan, self.assignment
        group_rank = assignment.group_rank(node.node_id)
        if group_rank is None:
            self._joined_as_spare(message)
            return
        current = plan is not None and plan.cycle == self.cycle
        goes_on = current and message.doing in (Doing.RUNNING, Doing.SUCCEEDED) and group_rank not in assignment.gone
        if goes_on:  # it merely lost and re-made its stream
            self.emit(SendTo(node.node_id, assignment.plan_for(node.node_id)))
            if message.doing is Doing.SUCCEEDED:
                self.note_success(group_rank, message.early, now)
            elif message.faults:
                self.node_failed(group_rank, message.faults, now)
        elif group_rank in assignment.gone:  # the others were told that its ranks are dead
            if is_busy(message):
                self._stop_stranger(node.node_id, self.cycle)
        elif group_rank not in assignment.succeeded:
            unseen = lost(node, "its agent had no coordinator for a while and stopped its workers")
            self.node_failed(group_rank, (current and message.faults) or (unseen,), now, gone=True)

    def _joined_as_spare(self, message: Register) -> None:
        node = message.node
        if is_busy(message) and message.plan is not None:
            self._stop_stranger(node.node_id, message.plan.cycle)
            return
        self.emit(Say(f"node {node.host} joined as a spare"))
        self.emit(SendTo(node.node_id, self.assignment.plan_for(node.node_id)))

    def _joined_stopping(self, message: Register, now: float) -> None:
        """An agent that re-made its stream may have stopped meanwhile: that is all we are waiting for."""
        node_id = message.node.node_id
        if is_busy(message) and message.plan is not None:
            self._stop_stranger(node_id, message.plan.cycle)
        elif node_id in self._pending:
            self._pending.discard(node_id)
            self.gather_if_stopped(now)

    def _joined_gathering(self, message: Register, now: float) -> None:
        mine = self._fresh and self._inherited.claim(message)
        if not is_busy(message):
            if mine:
                self.faults.extend(message.faults)
            self.try_plan(now)
        elif mine:
            self._try_adopt(now)
        else:
            assert message.plan is not None
            self._stop_stranger(message.node.node_id, message.plan.cycle)

    def _stop_stranger(self, node_id: str, cycle: int) -> None:
        self.emit(SendTo(node_id, Stop(self.settings.term, cycle, f"its part in cycle {cycle} is over")))

    def _replace(self, old: Node, new: Node, now: float) -> None:
        why = f"a newer agent of node {new.host} has joined in its place"
        self.emit(SendTo(old.node_id, Refused(ExitCode.NODE_REFUSED, why)))
        self.emit(Drop(old.node_id))
        self.members.remove(old.node_id)
        self.after_loss(old, lost(old, "a newer agent of this node has joined"), now)

    def after_loss(self, node: Node, fault: RankFault, now: float) -> None:
        """In `core.job.coordinator`."""
        raise NotImplementedError

    def note_success(self, group_rank: int, early: bool, now: float) -> None:
        """One node is done with the running cycle."""
        self.assignment.succeeded.add(group_rank)
        self.assignment.early = self.assignment.early or early
        self.finish_if_done(now)

    # --- gathering ---------------------------------------------------------------------------------------

    def on_stopped_gathering(self, event: GotStopped, now: float) -> None:
        """A node that still had workers of an older cycle is ready now."""
        if self.note_stopped(event):
            self._inherited.stopped(event.node_id)
            self.try_plan(now)

    def note_stopped(self, event: GotStopped) -> bool:
        """Whether this message makes a busy member ready; a repeated or stale one does not."""
        member, message = self.members.get(event.node_id), event.message
        if member is None or member.busy == READY:
            return False
        first = message.term == 0  # it has never run anything
        if member.busy != PREPARING and (first or message.cycle < member.busy):
            return False
        self.members.set_busy(event.node_id, READY)
        member.port = message.port
        return True

    def on_failed_gathering(self, event: GotFailed, now: float) -> None:
        """The cycle that we are about to carry on has failed; anything else is of a cycle that is over."""
        if event.node_id not in self._inherited.running:
            return
        self.faults.extend(event.message.faults)
        if self.min_healthy:
            self._inherited.failed(event.node_id)
        else:
            self._fail_inherited(now)

    def on_succeeded_gathering(self, event: GotSucceeded, now: float) -> None:
        """The cycle that we are about to carry on is done on one node; anything else is of a cycle that is over."""
        self._inherited.finished(event.node_id, event.message.early)

    def on_tick_gathering(self, event: Tick, now: float) -> None:
        """Announce who is missing, start without the rest, or give up."""
        if self.tell_time(self._clock.look(now), now):
            return
        if self._progress_by is not None and now >= self._progress_by:
            self.scored(now)
        elif self._pause_until is not None and now >= self._pause_until:
            self._pause_until = None
            self.try_plan(now)
        elif self._last_call_at is not None and now >= self._last_call_at:
            self._last_call_at = None
            self._start(now)
        elif self._announce_at is not None and now >= self._announce_at:
            self._announce_at = None
            self.emit(Say(self._missing()))
        elif self._join_by is not None and now >= self._join_by:
            waited = f"{self.settings.join_timeout_s:g} s (join timeout) are over"
            self.finish(Finish(ExitCode.TOO_FEW_NODES, f"{waited}; {self._missing()}"), now)

    def try_plan(self, now: float) -> None:
        """Plan as soon as that is the right thing: everybody is here, or this is a restart with enough nodes."""
        if self._inherited.running or self._progress_by is not None:
            return
        if self.members.ready < self.settings.min_nodes:
            self.wait_for_nodes(now)
        elif self._pause_until is not None:
            self._join_by = None
        elif not self._fresh or self.members.ready >= self.settings.max_nodes - len(self.budget.history.excluded):
            self._start(now)
        elif self._last_call_at is None:
            self._set_last_call(now)

    def scored(self, now: float) -> None:
        """Progress has nothing against another cycle; perhaps the budget has."""
        self._progress_by = None
        end, self._end_unless_scored = self._end_unless_scored, None
        if end is not None:
            self.faults = self.faults or self.last_faults
            self.finish(end, now)
        elif self.state is Phase.GATHERING:
            self.try_plan(now)

    def _set_last_call(self, now: float) -> None:
        self._last_call_at = earliest(now + self.settings.last_call_s, self._join_by)

    def wait_for_nodes(self, now: float) -> None:
        """Give the nodes that are missing the join timeout from now on."""
        if self.members.ready >= self.settings.min_nodes:
            return
        if not self._inherited.running:
            self._last_call_at = None
        if self._join_by is None:
            self._join_by = now + self.settings.join_timeout_s
            if self.members.ready < len(self.members):  # spares that are being checked, as a rule for milliseconds
                self._announce_at = now + self.settings.announce_s
            else:
                self.emit(Say(f"{self._missing()}; waiting up to {self.settings.join_timeout_s:g} s"))

    def _start(self, now: float) -> None:
        """Plan; but a cycle of an older term that we could not carry on costs a restart like any other."""
        if self._fresh and self._inherited.last_cycle >= 0:
            if self.min_healthy and self._inherited.good >= self.settings.min_nodes:
                self._adopt(now)
            else:
                self._fail_inherited(now)
        else:
            self._make_plan(now)

    def _missing(self) -> str:
        return self.members.missing(self.settings.expected, self.settings.min_nodes)

    def _make_plan(self, now: float) -> None:
        ready, least = self.members.ready_nodes(), self.settings.min_nodes
        most = self.settings.max_active or len(ready)
        wanted = min(len(ready), most) if self.min_healthy else least
        placement = place(ready, self.assignment.places, max(wanted, least))
        if placement is None:
            self.wait_for_nodes(now)
            return
        self.cycle = max(self.cycle, self._inherited.last_cycle + 1)
        if self._fresh and self.settings.tracks_progress:
            self.emit(ReadProgress(-1))
        self._begin(self._new_assignment(placement.active), now)
        self.faults = []
        self.emit(Say(f"cycle {self.cycle}: {placement.why}"))
        for node_id in (*placement.active, *placement.spares):
            self.emit(SendTo(node_id, self.assignment.plan_for(node_id)))
        for node_id in placement.active:
            self.members.set_busy(node_id, self.cycle)

    def _new_assignment(self, active: tuple[str, ...]) -> Assignment:
        slots: dict[int, Slot] = {}
        world_size = 0
        for group_rank, node_id in enumerate(active):
            nproc = self.members[node_id].node.nproc
            slots[group_rank] = Slot(node_id, world_size, nproc)
            world_size += nproc
        first = self.members[active[0]]
        shared = Plan(
            term=self.settings.term,
            cycle=self.cycle,
            history=self.budget.history,
            max_restarts=self.settings.max_restarts,
            active_nodes=len(active),
            world_size=world_size,
            master_addr=first.node.addr or first.node.host,
            master_port=first.port,
        )
        return Assignment(shared, slots)

    def _begin(self, assignment: Assignment, now: float) -> None:
        self._fresh = False
        self.assignment = assignment
        self._started_at = now
        self._join_by = self._announce_at = self._last_call_at = None
        self._pause_until = self._last_ranks_by = None
        self.state = Phase.RUNNING

    # --- a new term: carry on with what the agents run -----------------------------------------------------

    def _try_adopt(self, now: float) -> None:
        """Once every group rank of the last cycle has registered, that cycle goes on under our term."""
        least = self.settings.min_nodes
        sizes = range(least, max(least, self.settings.max_nodes) + 1) if self.min_healthy else (least,)
        if self._inherited.complete(sizes) and (not self.min_healthy or self._inherited.good >= least):
            self._adopt(now)
        else:
            self._set_last_call(now)

    def _adopt(self, now: float) -> None:
        self.cycle = self._inherited.last_cycle
        self._begin(self._inherited.assignment(self.settings.term, self.budget.history), now)
        self._inherited.forget()
        self.emit(Say(f"term {self.settings.term} carries on with cycle {self.cycle}"))
        for node in self.members.in_order():
            self.emit(SendTo(node.node_id, self.assignment.plan_for(node.node_id)))
        self.finish_if_done(now)

    def _fail_inherited(self, now: float) -> None:
        """Not all who ran the last cycle came to this coordinator in time: that is a fault of that cycle."""
        self._fresh = False
        self.cycle = self._inherited.last_cycle
        still = len(self._inherited.running)
        self.assignment = Assignment.of(self._inherited.places)
        self._inherited.forget()
        if not self.faults:
            why = f"cycle {self.cycle} of an older term cannot be carried on: {still} of its nodes still run it"
            self.faults.append(RankFault(FaultKind.NODE_LOST, "", -1, message=why))
        self.cycle_failed(first_cause(self.faults), now)
