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
from nvrx_slurm.core.machine import Machine, Row, Say, Tick, earliest
from nvrx_slurm.core.members import READY, Members
from nvrx_slurm.core.placement import place
from nvrx_slurm.core.restarts import decide, first_cause
from nvrx_slurm.errors import ExitCode
from nvrx_slurm.types import FaultKind, Finish, Node, Plan, RankFault, Refused, Register, Running, Stop


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
_ON = (Phase.RUNNING, Phase.STOPPING, Phase.GATHERING, Phase.FINISHED)


class Coordinator(Machine):
    """The coordinator's core: `step(event, now)` -> commands; `deadline()` says when it wants a Tick."""

    # fmt: off
    table: ClassVar[Mapping[tuple[Enum, type], Row]] = {
        (Phase.GATHERING, Joined): Row("on_joined", _ALL, "count it; plan when there are enough"),
        (Phase.GATHERING, Lost): Row("on_lost", (Phase.GATHERING,), "one fewer"),
        (Phase.GATHERING, GotFailed): Row("ignore", (Phase.GATHERING,), "of a cycle that is over"),
        (Phase.GATHERING, GotSucceeded): Row("ignore", (Phase.GATHERING,), "of a cycle that is over"),
        (Phase.GATHERING, GotStopped): Row("on_stopped_gathering", _ALL, "one more is ready"),
        (Phase.GATHERING, GotEndJob): Row("on_end", (Phase.FINISHED, Phase.CLOSED), "told to end"),
        (Phase.GATHERING, Tick): Row("on_tick_gathering", (*_ALL, Phase.CLOSED), "last call or join timeout"),
        (Phase.RUNNING, Joined): Row("on_joined", (Phase.RUNNING, Phase.STOPPING, Phase.FINISHED), "a new spare"),
        (Phase.RUNNING, Lost): Row("on_lost", (*_ON, Phase.CLOSED), "a fault if it was active"),
        (Phase.RUNNING, GotFailed): Row("on_failed", _ON, "restart, or the end"),
        (Phase.RUNNING, GotSucceeded): Row("on_succeeded", (Phase.RUNNING, Phase.FINISHED), "the end when all have"),
        (Phase.RUNNING, GotStopped): Row("on_stopped_running", (Phase.RUNNING,), "a returned node is a spare now"),
        (Phase.RUNNING, GotEndJob): Row("on_end", (Phase.FINISHED, Phase.CLOSED), "told to end"),
        (Phase.STOPPING, Joined): Row("on_joined", (Phase.STOPPING,), "it may be needed at once"),
        (Phase.STOPPING, Lost): Row("on_lost", _ON, "nobody waits for it any more"),
        (Phase.STOPPING, GotFailed): Row("on_more_faults", (Phase.STOPPING,), "for the first-cause report"),
        (Phase.STOPPING, GotSucceeded): Row("ignore", (Phase.STOPPING,), "too late: the cycle is being stopped"),
        (Phase.STOPPING, GotStopped): Row("on_stopped_stopping", _ON, "next cycle when all are"),
        (Phase.STOPPING, GotEndJob): Row("on_end", (Phase.FINISHED, Phase.CLOSED), "told to end"),
        (Phase.STOPPING, Tick): Row("on_tick_stopping", _ON, "give up on nodes that do not stop"),
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
        self._adopting: dict[int, tuple[str, Running]] = {}  # by group rank, under a new term
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
        message = event.message
        node_id = message.node.node_id
        replaced = self.members.same_place(message.node)
        if replaced is not None and replaced.node.node_id == node_id and self._still_runs(message):
            self.emit(SendTo(node_id, self._plan_for(node_id)))
            return
        if replaced is not None:
            self.members.remove(replaced.node.node_id)
        self.members.add(message.node, message.port)
        if message.running is not None:
            self.members.set_busy(node_id, message.running.cycle)
        if replaced is not None:
            self._replace(replaced.node, message.node, now)
        if self.state is Phase.FINISHED:
            return
        if message.running is not None:
            self._on_joined_running(message, message.running, now)
        elif self.state is Phase.RUNNING:
            self.emit(Say(f"node {message.node.host} joined as a spare"))
            self.emit(SendTo(node_id, self._plan_for(node_id)))
        elif self.state is Phase.GATHERING:
            if not self.active:
                self._learn_history(message)
            self._try_plan(now)

    def _on_joined_running(self, message: Register, running: Running, now: float) -> None:
        node_id = message.node.node_id
        fresh = not self.active and self.state is Phase.GATHERING
        if fresh and running.group_rank not in self._adopting:
            self._learn_history(message)
            self._adopting[running.group_rank] = (node_id, running)
            self._try_adopt(now)
            return
        self.emit(SendTo(node_id, Stop(self.settings.term, running.cycle, "its place in the plan is taken")))

    def _learn_history(self, message: Register) -> None:
        """Cycles and spent restarts go on where the agents saw them last, under whichever coordinator."""
        self.cycle = max(self.cycle, message.last_cycle + 1)
        self.restarts_used = max(self.restarts_used, message.restarts_used)

    def _still_runs(self, message: Register) -> bool:
        """Whether a known agent merely lost and re-made its stream while its part of the cycle went on."""
        running = message.running
        return (
            running is not None
            and self.state is Phase.RUNNING
            and running.cycle == self.cycle
            and self._group_rank.get(message.node.node_id) == running.group_rank
        )

    def _replace(self, old: Node, new: Node, now: float) -> None:
        if old.node_id != new.node_id:
            why = f"a newer agent of node {new.host} has joined in its place"
            self.emit(SendTo(old.node_id, Refused(ExitCode.NODE_REFUSED, why)))
            self.emit(Drop(old.node_id))
        self._after_loss(old, "its agent connected anew", now)

    def on_joined_finished(self, event: Joined, now: float) -> None:
        """A late agent learns that the job is over."""
        node = event.message.node
        self.members.remove(node.node_id)
        self.members.add(node, event.message.port)
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
            self._adopting = {g: held for g, held in self._adopting.items() if held[0] != node.node_id}
            self._wait_for_nodes(now)
            return
        group_rank = self._group_rank.get(node.node_id)
        fault = RankFault(FaultKind.NODE_LOST, node.host, node.infra_rank, message=why)
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
            self._try_plan(now)

    def on_tick_gathering(self, event: Tick, now: float) -> None:
        """Announce who is missing, start without the rest, or give up."""
        if self._last_call_at is not None and now >= self._last_call_at:
            self._last_call_at = None
            if self._adopting:
                self._stop_the_adopted(now)
                return
            self._make_plan(now)
        elif self._announce_at is not None and now >= self._announce_at:
            self._announce_at = None
            self.emit(Say(self._missing()))
        elif self._join_by is not None and now >= self._join_by:
            waited = f"{self.settings.join_timeout_s:g} s (join timeout) are over"
            self._finish(Finish(ExitCode.TOO_FEW_NODES, f"{waited}; {self._missing()}"), now)

    def _try_plan(self, now: float) -> None:
        """Plan as soon as that is the right thing: everybody is here, or this is a restart with enough nodes."""
        if self._adopting:
            return
        if self.members.ready < self.settings.min_nodes:
            self._wait_for_nodes(now)
        elif self.active or self.members.ready >= self.settings.max_nodes:
            self._make_plan(now)
        elif self._last_call_at is None:
            self._last_call_at = now + self.settings.last_call_s

    def _wait_for_nodes(self, now: float) -> None:
        if self.members.ready >= self.settings.min_nodes:
            return
        self._last_call_at = now + self.settings.last_call_s if self._adopting else None
        if self._join_by is None:
            self._join_by = now + self.settings.join_timeout_s
            self.emit(Say(f"{self._missing()}; waiting up to {self.settings.join_timeout_s:g} s"))

    def _missing(self) -> str:
        return self.members.missing(self.settings.expected, self.settings.min_nodes)

    def _make_plan(self, now: float) -> None:
        placement = place(self.members.ready_nodes(), self.active, self.settings.min_nodes)
        if placement is None:
            self._wait_for_nodes(now)
            return
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
        """Once every group rank of one running cycle has registered, that cycle goes on under our term."""
        reports = [running for _, running in self._adopting.values()]
        cycle = max(r.cycle for r in reports)
        same = {g: held for g, held in self._adopting.items() if held[1].cycle == cycle}
        if len(same) < reports[0].active_nodes or len(same) != self.settings.min_nodes:
            self._last_call_at = now + self.settings.last_call_s
            return
        self._adopting = {}
        self.cycle = cycle
        self._set_active({g: node_id for g, (node_id, _) in same.items()})
        self._succeeded = {g for g, (_, running) in same.items() if running.succeeded}
        self._join_by = self._announce_at = self._last_call_at = None
        self.state = Phase.RUNNING
        self.emit(Say(f"term {self.settings.term} carries on with cycle {cycle}"))
        for node in self.members.in_order():
            self.emit(SendTo(node.node_id, self._plan_for(node.node_id)))
        self._finish_if_all_succeeded(now)

    def _stop_the_adopted(self, now: float) -> None:
        """Some of the running nodes did not come to this coordinator in time: that is a fault of the old cycle."""
        self.cycle = max(running.cycle for _, running in self._adopting.values())
        self.active = {g: node_id for g, (node_id, _) in self._adopting.items()}
        self._group_rank = {node_id: g for g, node_id in self.active.items()}
        self._adopting = {}
        self.state = Phase.RUNNING
        fault = RankFault(FaultKind.NODE_LOST, "?", -1, message="not all active nodes came to the new coordinator")
        self._on_fault((fault,), now)

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
            self._succeeded.add(group_rank)
            self._finish_if_all_succeeded(now)

    def on_stopped_running(self, event: GotStopped, now: float) -> None:
        """A node that came back with old workers has stopped them: a spare from now on."""
        if event.node_id not in self._group_rank and self._note_stopped(event):
            self.emit(SendTo(event.node_id, self._plan_for(event.node_id)))

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
