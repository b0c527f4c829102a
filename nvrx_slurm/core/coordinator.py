"""The coordinator: gathers agents, makes plans, decides about restarts and the end. Pure; see `core.machine`.

    GATHERING -> RUNNING -> STOPPING -> GATHERING ... -> FINISHED -> CLOSED

Cycles only grow, also across terms, so a delayed or repeated message about an old cycle is recognised by its cycle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from nvrx_slurm.core.coordinator_events import (
    Done,
    Drop,
    GotEndJob,
    GotFailed,
    GotStopped,
    GotSucceeded,
    Joined,
    Lost,
    SendTo,
)
from nvrx_slurm.core.inherited import STOPPING as AGENT_STOPS
from nvrx_slurm.core.inherited import Inherited
from nvrx_slurm.core.machine import Machine, Row, Say, Tick, earliest
from nvrx_slurm.core.members import JOINING, READY, Members
from nvrx_slurm.core.placement import place
from nvrx_slurm.core.restarts import decide, first_cause
from nvrx_slurm.errors import ExitCode
from nvrx_slurm.types import FaultKind, Finish, Node, Plan, RankFault, Refused, Running, Stop


class Phase(Enum):
    """States of the coordinator."""

    GATHERING = "waiting for enough nodes"
    RUNNING = "a cycle is running"
    STOPPING = "waiting until the workers of a failed cycle are gone"
    FINISHED = "the end is decided; waiting for the agents to leave"
    CLOSED = "done"


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """What the coordinator is told once. All times in seconds."""

    term: int = 1
    min_nodes: int = 1  # active nodes of every cycle, >= 1
    max_nodes: int = 1  # how many are expected at the start; waiting for more makes no sense
    max_restarts: int = 0  # per job
    join_timeout_s: float = 300.0  # how long to wait for min_nodes
    last_call_s: float = 1.0  # first cycle: how long to wait for the rest once min_nodes are here
    announce_s: float = 3.0  # first cycle: after how long to say who is missing
    stop_timeout_s: float = 60.0  # agents that still run workers this long after a stop are given up
    drain_timeout_s: float = 60.0  # how long the end waits for agents to leave
    expected: tuple[str, ...] = ()  # host names by infra rank, to say who is missing


_ALL = (Phase.GATHERING, Phase.RUNNING, Phase.STOPPING, Phase.FINISHED)
_NEXT = (Phase.STOPPING, Phase.GATHERING, Phase.RUNNING)
_FAULT = (Phase.STOPPING, Phase.FINISHED)


def _lost(node: Node, why: str) -> RankFault:
    return RankFault(FaultKind.NODE_LOST, node.host, node.infra_rank, message=why)


class Coordinator(Machine):
    """The coordinator's core: `step(event, now)` -> commands; `deadline()` says when it wants a Tick."""

    # fmt: off
    table: ClassVar[Mapping[tuple[Enum, type], Row]] = {
        (Phase.GATHERING, Joined): Row("on_joined", _ALL, "count it; plan when there are enough"),
        (Phase.GATHERING, Lost): Row("on_lost", (Phase.GATHERING,), "one fewer"),
        (Phase.GATHERING, GotFailed): Row("on_failed_gathering", (Phase.GATHERING, *_FAULT), "of an older term?"),
        (Phase.GATHERING, GotSucceeded): Row("on_succeeded_gathering", (Phase.GATHERING,), "one that we may carry on"),
        (Phase.GATHERING, GotStopped): Row("on_stopped_gathering", _ALL, "one more is ready"),
        (Phase.GATHERING, GotEndJob): Row("on_end", (Phase.FINISHED, Phase.CLOSED), "told to end"),
        (Phase.GATHERING, Tick): Row("on_tick_gathering", (*_ALL, Phase.CLOSED), "last call or join timeout"),
        (Phase.RUNNING, Joined): Row("on_joined", _ALL, "a new spare, or an old friend"),
        (Phase.RUNNING, Lost): Row("on_lost", (*_ALL, Phase.CLOSED), "a fault if it was active"),
        (Phase.RUNNING, GotFailed): Row("on_failed", (Phase.RUNNING, *_FAULT), "restart, or the end"),
        (Phase.RUNNING, GotSucceeded): Row("on_succeeded", (Phase.RUNNING, Phase.FINISHED), "the end when all have"),
        (Phase.RUNNING, GotStopped): Row("on_stopped_running", _ALL, "a returned node is a spare now"),
        (Phase.RUNNING, GotEndJob): Row("on_end", (Phase.FINISHED,), "told to end"),
        (Phase.STOPPING, Joined): Row("on_joined", _NEXT, "it may be needed at once"),
        (Phase.STOPPING, Lost): Row("on_lost", _NEXT, "nobody waits for it any more"),
        (Phase.STOPPING, GotFailed): Row("on_more_faults", (Phase.STOPPING,), "for the first-cause report"),
        (Phase.STOPPING, GotSucceeded): Row("ignore", (Phase.STOPPING,), "too late: the cycle is being stopped"),
        (Phase.STOPPING, GotStopped): Row("on_stopped_stopping", _NEXT, "next cycle when all are"),
        (Phase.STOPPING, GotEndJob): Row("on_end", (Phase.FINISHED,), "told to end"),
        (Phase.STOPPING, Tick): Row("on_tick_stopping", (Phase.GATHERING, Phase.RUNNING), "give up on the stubborn"),
        (Phase.FINISHED, Joined): Row("on_joined_finished", (Phase.FINISHED,), "it learns the end, too"),
        (Phase.FINISHED, Lost): Row("on_lost_finished", (Phase.FINISHED, Phase.CLOSED), "it has left"),
        (Phase.FINISHED, GotFailed): Row("on_more_faults", (Phase.FINISHED,), "for the first-cause report"),
        (Phase.FINISHED, GotSucceeded): Row("ignore", (Phase.FINISHED,), "the end is decided"),
        (Phase.FINISHED, GotStopped): Row("ignore", (Phase.FINISHED,), "the end is decided"),
        (Phase.FINISHED, GotEndJob): Row("ignore", (Phase.FINISHED,), "the end is decided"),
        (Phase.FINISHED, Tick): Row("on_tick_finished", (Phase.CLOSED,), "nobody waits for ever"),
    }
    # fmt: on

    def __init__(self, settings: CoordinatorSettings, now: float) -> None:
        super().__init__(Phase.GATHERING, now)
        self.settings = settings
        self.cycle = 0  # the running one, or the next one while GATHERING
        self.restarts_used = 0
        self.members = Members()
        self.active: dict[int, str] = {}  # group rank -> node_id of the last plan
        self.faults: list[RankFault] = []  # of the current cycle
        self._group_rank: dict[str, int] = {}  # inverse of `active`
        self._succeeded: set[int] = set()  # group ranks
        self._pending: set[str] = set()  # node_ids that have yet to stop
        self._inherited = Inherited()
        self._fresh = True  # nothing has been planned, carried on or given up in this term
        self._end: Finish | None = None
        self._join_by: float | None = now + settings.join_timeout_s
        self._announce_at: float | None = now + settings.announce_s
        self._last_call_at: float | None = None
        self._stop_by: float | None = None
        self._drain_by: float | None = None

    def deadline(self) -> float | None:
        """When the next Tick is due (monotonic seconds), or None."""
        if self.state is Phase.GATHERING:
            return earliest(self._join_by, self._announce_at, self._last_call_at)
        return self._stop_by if self.state is Phase.STOPPING else self._drain_by

    # --- joining and leaving ---------------------------------------------------------------------------

    def on_joined(self, event: Joined, now: float) -> None:
        """A new agent, a returning one, or one that reports what it runs to a new coordinator."""
        message, node = event.message, event.message.node
        old = self.members.same_place(node)
        self._inherited.stopped(node.node_id)  # unless it says otherwise in a moment
        for node_id in self._inherited.learn(message):
            self._stop_stranger(node_id, self._inherited.last_cycle)
        self.members.put(node, message.port, JOINING)
        if old is not None and old.node.node_id != node.node_id:
            self._replace(old.node, node, now)
        if self.state is Phase.FINISHED:
            return  # it was told with all the others
        self.members.set_busy(node.node_id, READY if message.running is None else message.running.cycle)
        if self.state is Phase.RUNNING:
            self._joined_running(node, message.running, now)
        elif self.state is Phase.STOPPING:
            self._joined_stopping(node, message.running, now)
        else:
            self._joined_gathering(node, message.running, now)

    def _joined_running(self, node: Node, running: Running | None, now: float) -> None:
        group_rank = self._group_rank.get(node.node_id)
        if group_rank is None:
            self._joined_as_spare(node, running)
        elif running is not None and running.cycle == self.cycle and running.active_nodes != AGENT_STOPS:
            self.emit(SendTo(node.node_id, self._plan_for(node.node_id)))  # it merely lost and re-made its stream
            if running.succeeded:
                self._note_success(group_rank, now)
        elif group_rank not in self._succeeded:
            self._on_fault((_lost(node, "its agent had no coordinator for a while and stopped its workers"),), now)

    def _joined_as_spare(self, node: Node, running: Running | None) -> None:
        if running is not None:
            self._stop_stranger(node.node_id, running.cycle)
            return
        self.emit(Say(f"node {node.host} joined as a spare"))
        self.emit(SendTo(node.node_id, self._plan_for(node.node_id)))

    def _joined_stopping(self, node: Node, running: Running | None, now: float) -> None:
        """An agent that re-made its stream may have stopped meanwhile: that is all we are waiting for."""
        if running is not None:
            self._stop_stranger(node.node_id, running.cycle)
        elif node.node_id in self._pending:
            self._pending.discard(node.node_id)
            self._gather_if_stopped(now)

    def _joined_gathering(self, node: Node, running: Running | None, now: float) -> None:
        if running is None:
            self._try_plan(now)
        elif self._fresh and self._inherited.claim(node.node_id, running):
            self._try_adopt(now)
        else:
            self._stop_stranger(node.node_id, running.cycle)

    def _stop_stranger(self, node_id: str, cycle: int) -> None:
        self.emit(SendTo(node_id, Stop(self.settings.term, cycle, f"its part in cycle {cycle} is over")))

    def _replace(self, old: Node, new: Node, now: float) -> None:
        why = f"a newer agent of node {new.host} has joined in its place"
        self.emit(SendTo(old.node_id, Refused(ExitCode.NODE_REFUSED, why)))
        self.emit(Drop(old.node_id))
        self.members.remove(old.node_id)
        self._after_loss(old, "a newer agent of this node has joined", now)

    def on_joined_finished(self, event: Joined, now: float) -> None:
        """A late agent learns that the job is over."""
        node = event.message.node
        self.members.put(node, event.message.port, READY)
        assert self._end is not None
        self.emit(SendTo(node.node_id, self._end))

    def on_lost(self, event: Lost, now: float) -> None:
        """A stream broke: a fault if the node was active in a running cycle."""
        member = self.members.remove(event.node_id)
        if member is not None:
            self._after_loss(member.node, event.why, now)

    def on_lost_finished(self, event: Lost, now: float) -> None:
        """An agent has left; the last one turns off the light."""
        self.members.remove(event.node_id)
        self._close_if_alone()

    def _after_loss(self, node: Node, why: str, now: float) -> None:
        """What the loss of a member, already removed, means in this phase."""
        if self.state is Phase.GATHERING:
            self._inherited.stopped(node.node_id)
            self._wait_for_nodes(now)
            return
        group_rank = self._group_rank.get(node.node_id)
        fault = _lost(node, why)
        if group_rank is None:
            self.emit(Say(f"spare node {node.host} left: {why}"))
        elif self.state is Phase.RUNNING and group_rank not in self._succeeded:
            self._on_fault((fault,), now)
        elif self.state is Phase.STOPPING and node.node_id in self._pending:
            self.faults.append(fault)
            self._pending.discard(node.node_id)
            self._gather_if_stopped(now)

    # --- gathering ---------------------------------------------------------------------------------------

    def on_stopped_gathering(self, event: GotStopped, now: float) -> None:
        """A node that still had workers of an older cycle is ready now."""
        if self._note_stopped(event):
            self._inherited.stopped(event.node_id)
            self._try_plan(now)

    def on_failed_gathering(self, event: GotFailed, now: float) -> None:
        """The cycle that we are about to carry on has failed; anything else is of a cycle that is over."""
        if event.node_id in self._inherited.running:
            self.faults.extend(event.message.faults)
            self._fail_inherited(now)

    def on_succeeded_gathering(self, event: GotSucceeded, now: float) -> None:
        """The cycle that we are about to carry on is done on one node; anything else is of a cycle that is over."""
        self._inherited.finished(event.node_id)

    def on_tick_gathering(self, event: Tick, now: float) -> None:
        """Announce who is missing, start without the rest, or give up."""
        if self._last_call_at is not None and now >= self._last_call_at:
            self._last_call_at = None
            self._start(now)
        elif self._announce_at is not None and now >= self._announce_at:
            self._announce_at = None
            self.emit(Say(self._missing()))
        elif self._join_by is not None and now >= self._join_by:
            waited = f"{self.settings.join_timeout_s:g} s (join timeout) are over"
            self._finish(Finish(ExitCode.TOO_FEW_NODES, f"{waited}; {self._missing()}"), now)

    def _try_plan(self, now: float) -> None:
        """Plan as soon as that is the right thing: everybody is here, or this is a restart with enough nodes."""
        if self._inherited.running:
            return
        if self.members.ready < self.settings.min_nodes:
            self._wait_for_nodes(now)
        elif not self._fresh or self.members.ready >= self.settings.max_nodes:
            self._start(now)
        elif self._last_call_at is None:
            self._set_last_call(now)

    def _set_last_call(self, now: float) -> None:
        self._last_call_at = earliest(now + self.settings.last_call_s, self._join_by)

    def _wait_for_nodes(self, now: float) -> None:
        if self.members.ready >= self.settings.min_nodes:
            return
        if not self._inherited.running:
            self._last_call_at = None
        if self._join_by is None:
            self._join_by = now + self.settings.join_timeout_s
            self.emit(Say(f"{self._missing()}; waiting up to {self.settings.join_timeout_s:g} s"))

    def _start(self, now: float) -> None:
        """Plan; but a cycle of an older term that we could not carry on costs a restart like any other."""
        if self._fresh and self._inherited.last_cycle >= 0:
            self._fail_inherited(now)
        else:
            self._make_plan(now)

    def _missing(self) -> str:
        return self.members.missing(self.settings.expected, self.settings.min_nodes)

    def _make_plan(self, now: float) -> None:
        placement = place(self.members.ready_nodes(), self.active, self.settings.min_nodes)
        if placement is None:
            self._wait_for_nodes(now)
            return
        self.cycle = max(self.cycle, self._inherited.last_cycle + 1)
        self._set_active(dict(enumerate(placement.active)))
        self._join_by = self._announce_at = self._last_call_at = None
        self.faults = []
        self.state = Phase.RUNNING
        self.emit(Say(f"cycle {self.cycle}: {placement.why}"))
        for node_id in (*placement.active, *placement.spares):
            self.emit(SendTo(node_id, self._plan_for(node_id)))
        for node_id in placement.active:
            self.members.set_busy(node_id, self.cycle)

    def _set_active(self, active: dict[int, str]) -> None:
        self._fresh = False
        self.active = active
        self._group_rank = {node_id: g for g, node_id in active.items()}
        self._succeeded = set()
        offset = 0
        offsets = {}
        for group_rank in range(len(active)):
            member = self.members[active[group_rank]]
            offsets[member.node.node_id] = offset
            offset += member.node.nproc
        first = self.members[active[0]]
        self._offsets = offsets
        self._shared_plan = Plan(
            term=self.settings.term,
            cycle=self.cycle,
            restarts_used=self.restarts_used,
            max_restarts=self.settings.max_restarts,
            active_nodes=len(active),
            world_size=offset,
            master_addr=first.node.addr or first.node.host,
            master_port=first.port,
        )

    def _plan_for(self, node_id: str) -> Plan:
        group_rank = self._group_rank.get(node_id, -1)
        if group_rank < 0:
            return self._shared_plan
        return replace(self._shared_plan, group_rank=group_rank, rank_offset=self._offsets[node_id])

    # --- a new term: carry on with what the agents run -----------------------------------------------------

    def _try_adopt(self, now: float) -> None:
        """Once every group rank of the last cycle has registered, that cycle goes on under our term."""
        if not self._inherited.complete(self.settings.min_nodes):
            self._set_last_call(now)
            return
        self.cycle = self._inherited.last_cycle
        self.restarts_used = self._inherited.restarts_used
        places, succeeded = self._inherited.take()
        self._set_active(places)
        self._succeeded = succeeded
        self._join_by = self._announce_at = self._last_call_at = None
        self.state = Phase.RUNNING
        self.emit(Say(f"term {self.settings.term} carries on with cycle {self.cycle}"))
        for node in self.members.in_order():
            self.emit(SendTo(node.node_id, self._plan_for(node.node_id)))
        self._finish_if_all_succeeded(now)

    def _fail_inherited(self, now: float) -> None:
        """Not all who ran the last cycle came to this coordinator in time: that is a fault of that cycle."""
        self._fresh = False
        self.cycle = self._inherited.last_cycle
        self.restarts_used = self._inherited.restarts_used
        still = len(self._inherited.running)
        self.active, _ = self._inherited.take()
        self._group_rank = {node_id: g for g, node_id in self.active.items()}
        why = f"cycle {self.cycle} of an older term cannot be carried on: {still} of its nodes still run it"
        self._on_fault(() if self.faults else (RankFault(FaultKind.NODE_LOST, "", -1, message=why),), now)

    # --- running and stopping -------------------------------------------------------------------------------

    def on_failed(self, event: GotFailed, now: float) -> None:
        """Ranks failed on an active node."""
        if event.message.cycle == self.cycle and event.node_id in self._group_rank:
            self._on_fault(event.message.faults, now)

    def on_more_faults(self, event: GotFailed, now: float) -> None:
        """Failures that came in after the first one."""
        if event.message.cycle == self.cycle and event.node_id in self._group_rank:
            self.faults.extend(event.message.faults)

    def on_succeeded(self, event: GotSucceeded, now: float) -> None:
        """One node is done."""
        group_rank = self._group_rank.get(event.node_id)
        if group_rank is not None and event.message.cycle == self.cycle:
            self._note_success(group_rank, now)

    def _note_success(self, group_rank: int, now: float) -> None:
        self._succeeded.add(group_rank)
        self._finish_if_all_succeeded(now)

    def on_stopped_running(self, event: GotStopped, now: float) -> None:
        """A node that came back with old workers has stopped them: a spare from now on. Or an active one has
        stopped by itself."""
        if not self._note_stopped(event):
            return
        if event.node_id not in self._group_rank:
            self.emit(SendTo(event.node_id, self._plan_for(event.node_id)))
        elif self._group_rank[event.node_id] not in self._succeeded:
            node = self.members[event.node_id].node
            self._on_fault((_lost(node, "it stopped its workers unasked"),), now)

    def on_stopped_stopping(self, event: GotStopped, now: float) -> None:
        """One node fewer to wait for."""
        if self._note_stopped(event) and event.node_id in self._pending:
            self._pending.discard(event.node_id)
            self._gather_if_stopped(now)

    def on_tick_stopping(self, event: Tick, now: float) -> None:
        """Nodes whose workers do not end are taken out of the job, so that the others can go on."""
        for node_id in sorted(self._pending):
            why = f"its workers did not end within {self.settings.stop_timeout_s:g} s"
            self.emit(SendTo(node_id, Refused(ExitCode.NODE_REFUSED, why)))
            self.emit(Drop(node_id))
            self.emit(Say(f"node {self.members[node_id].node.host} is given up: {why}"))
            self.members.remove(node_id)
        self._pending = set()
        self._gather_if_stopped(now)

    def _note_stopped(self, event: GotStopped) -> bool:
        """Whether this message makes a busy member ready; a repeated or stale one does not."""
        member = self.members.get(event.node_id)
        if member is None or member.busy == READY or event.message.cycle < member.busy:
            return False
        self.members.set_busy(event.node_id, READY)
        member.port = event.message.port
        return True

    def _on_fault(self, faults: tuple[RankFault, ...], now: float) -> None:
        self.faults.extend(faults)
        cause = first_cause(self.faults)
        assert cause is not None
        decision = decide(self.restarts_used, self.settings.max_restarts, cause)
        self.emit(Say(decision.why))
        if not decision.restart:
            self._finish(Finish(decision.code, decision.why), now)
            return
        self.restarts_used += 1
        self.state = Phase.STOPPING
        self._stop_by = now + self.settings.stop_timeout_s
        self._pending = {node_id for node_id in self._group_rank if self._may_run(node_id)}
        for node_id in self.active.values():
            if node_id in self._pending:
                self.emit(SendTo(node_id, Stop(self.settings.term, self.cycle, decision.why)))
        self._gather_if_stopped(now)

    def _may_run(self, node_id: str) -> bool:
        member = self.members.get(node_id)
        return member is not None and member.busy != READY

    def _gather_if_stopped(self, now: float) -> None:
        if self._pending or self.state is not Phase.STOPPING:
            return
        self.cycle += 1
        self.state = Phase.GATHERING
        self._stop_by = None
        self._join_by = self._announce_at = None
        self._try_plan(now)

    # --- the end ----------------------------------------------------------------------------------------------

    def on_end(self, event: GotEndJob, now: float) -> None:
        """Slurm or a person told an agent to end the job."""
        self._finish(Finish(event.message.code, event.message.reason), now)

    def on_tick_finished(self, event: Tick, now: float) -> None:
        """Agents that have not left by now are left behind."""
        left = ", ".join(node.host for node in self.members.in_order()[:16])
        self.emit(Say(f"not waiting any longer for {left} to leave"))
        self.members.clear()
        self._close_if_alone()

    def _finish_if_all_succeeded(self, now: float) -> None:
        if len(self._succeeded) == len(self.active):
            self._finish(Finish(ExitCode.OK, "all ranks finished"), now)

    def _finish(self, end: Finish, now: float) -> None:
        self._end = end
        self.state = Phase.FINISHED
        self._drain_by = now + self.settings.drain_timeout_s
        for node in self.members.in_order():
            self.emit(SendTo(node.node_id, end))
        self._close_if_alone()

    def _close_if_alone(self) -> None:
        if len(self.members) or self._end is None:
            return
        self.state = Phase.CLOSED
        cause = None if self._end.code == ExitCode.OK else first_cause(self.faults)
        self.emit(Done(self._end.code, self._end.reason, cause))
