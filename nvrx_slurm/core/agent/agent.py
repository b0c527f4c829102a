"""The agent of one node: runs what plans say, reports, stops, leaves. Pure; see `core.machine`.

PREPARING -> IDLE -> RUNNING -> SUCCEEDED -> GONE     RUNNING -> STOPPING -> PREPARING
(from anywhere, on signals and at the end: LEAVING -> GONE, see `leaving`)

Workers start in IDLE and PREPARING only, and from PREPARING only by the event that the preflight has ended.
"""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ev
from nvrx_slurm.core.agent.fitness import Fitness
from nvrx_slurm.core.agent.leaving import BUSY, EMPTY, SIGTERM, STAYS, AgentState, Leaving
from nvrx_slurm.core.agent.ranks import Ranks
from nvrx_slurm.core.attribution.recurrence import grace_s
from nvrx_slurm.core.machine import Machine, Say, Tick, earliest, rows
from nvrx_slurm.errors import ExitCode

__all__ = ["Agent", "AgentState"]

_IDLE = AgentState.IDLE
_PREPARING = AgentState.PREPARING
_RUNNING = AgentState.RUNNING
_STOPPING = AgentState.STOPPING
_SUCCEEDED = AgentState.SUCCEEDED
_LEAVING = AgentState.LEAVING
_AFTER = (_SUCCEEDED, _STOPPING, _PREPARING)


class Agent(Machine):
    """The agent's core: `step(event, now)` -> commands; `deadline()` says when it wants a Tick."""

    made_of = ("node", "settings")
    last = AgentState.GONE
    commands = ev.COMMANDS
    parts = (Leaving, Ranks, Fitness)
    table = rows(
        (STAYS, ev.Connected, "on_connected", (), "register with what runs"),
        (STAYS, t.Lead, "on_lead", (), "the coordinator is elected"),
        (
            STAYS,
            ev.Disconnected,
            "on_disconnected",
            (),
            "look for the coordinator; workers go on for a while",
        ),
        (
            (_PREPARING, _STOPPING),
            t.Plan,
            "on_plan_early",
            (),
            "keep it until the preflight has passed",
        ),
        (_IDLE, t.Plan, "on_plan_idle", (_RUNNING,), "active: start; spare: wait"),
        (_RUNNING, t.Plan, "on_plan", (_STOPPING,), "a new term, or a new cycle"),
        (_SUCCEEDED, t.Plan, "on_plan", (_PREPARING,), "a new term, or once more"),
        (STAYS, t.Counted, "on_counted", (), "for the next coordinator"),
        (_RUNNING, t.Stop, "on_stop", (_STOPPING,), "stop them"),
        (_SUCCEEDED, t.Stop, "on_stop", (_PREPARING,), "others failed"),
        (_STOPPING, t.Stop, "ignore", (), "doing it"),
        ((*BUSY, _SUCCEEDED), t.CheckNode, "ignore", (), "it is no spare any more"),
        (_RUNNING, ev.LeaseOver, "on_lease_over", (_STOPPING,), "kill them"),
        (_STOPPING, ev.LeaseOver, "on_lease_over", (), "no time for a clean end"),
        (EMPTY, ev.LeaseOver, "ignore", (), "nothing runs"),
        (_RUNNING, ev.WorkerExited, "on_exit_running", _AFTER, "any-failed: one fault stops all"),
        (_STOPPING, ev.WorkerExited, "on_exit_stopping", (_PREPARING,), "one fewer"),
        (
            _LEAVING,
            ev.WorkerExited,
            "on_exit_stopping",
            (AgentState.ENDED, AgentState.GONE),
            "one fewer",
        ),
        (EMPTY, Tick, "on_tick_alone", (AgentState.GONE,), "no coordinator in time"),
        (_RUNNING, Tick, "on_tick_running", (_STOPPING,), "orphan, or a hung rank lives"),
    )

    def __init__(self, node: t.Node, settings: ev.AgentSettings, now: float) -> None:
        super().__init__(_PREPARING, now)
        self.node = node
        self.settings = settings
        self.plan: t.Plan | None = None  # the last one that was taken
        self.term = 0
        self._counted: t.Counted | None = None  # the last one
        self.alive: set[int] = set()  # local ranks
        self.connected = False
        self._met = False  # has ever had a coordinator
        self._votes = True  # as the last one said
        self._connect_by: float | None = now + settings.join_timeout_s
        self._orphan_by: float | None = None
        self._next_plan: t.Plan | None = None  # waits until the workers of the old cycle are gone
        self._faults: list[t.RankFault] = []  # of the last plan
        self._early = False  # a worker of the last plan ended because it was warned
        # of the last plan; told on every stream, as the first coordinator may die
        self._spent: t.Spent | None = None
        # that changes something: told on every stream
        self.request: t.Asked | t.NodeUnfit | None = None
        self._fitness = Fitness(self)
        self._leaving = Leaving(self)
        self._ranks = Ranks(self, self._leaving)
        self.bind(self._leaving, self._ranks, self._fitness)

    def deadline(self) -> float | None:
        """When the next Tick is due (monotonic seconds), or None."""
        if self.state is _RUNNING:
            return earliest(self._orphan_by, self._ranks.hung_by())
        if self.state in (_STOPPING, _LEAVING):
            return self._leaving.ladder.deadline()
        return self._leaving.leave_by if self.state is AgentState.ENDED else self._connect_by

    def validate(self) -> None:
        """What holds after each step."""
        super().validate()
        state = self.state
        ladder = self._leaving.ladder
        if state in (*BUSY, _LEAVING):
            assert self.alive, f"{state.name} without workers"
            assert self.plan is not None and self.plan.active, "workers without a plan"
        elif state in EMPTY:
            assert not self.alive, f"{state.name} with workers"
        stops = ladder.deadline() is not None
        leaves = self._leaving.exit is not None
        assert stops == (state in (_STOPPING, _LEAVING)), f"{state.name}: {ladder}"
        assert leaves == (state not in STAYS), f"{state.name}: {self._leaving.exit}"
        assert state is not _IDLE or not self._fitness.unfit, "an unfit node waits for a plan"

    def connects(self, connected: bool) -> None:
        """Whether there is a stream to a coordinator."""
        self.connected = connected

    def ask(self, request: t.Asked | t.NodeUnfit) -> None:
        """Ask for something that changes the job, on this stream and on each later one."""
        self.request = request
        self.send(request)

    def send(self, message: t.AgentMessage) -> None:
        """Send to the coordinator. Without a stream nothing is sent: the next Register tells the same."""
        if self.connected:
            self.emit(ev.Send(message))

    def got(self, signum: int) -> str:
        """That this agent got a signal."""
        return f"node {self.node.infra_rank} ({self.node.host}) got signal {signum}"

    # --- the stream ---------------------------------------------------------------------------------------

    def on_connected(self, event: ev.Connected, now: float) -> None:
        """Register at the coordinator with what this node runs."""
        self.connected = True
        if not self.settings.elects:
            self.on_lead(t.Lead(self.term), now)
        if self._next_plan is not None and not self.alive:
            # Known, but not to be started: this coordinator may have another.
            self.plan = self._next_plan
            self._faults = []
            self._early = False
        self._next_plan = None
        told = t.Register(
            node=self.node,
            port=0,
            plan=self.plan,
            doing=self._activity(),
            faults=tuple(self._faults),
            early=self._early,
            votes=self._votes,
            counted=self._counted,
        )
        self.send(told)
        for message in (self.request, self._ranks.warn_job, self._spent):
            if message is not None:
                self.send(message)

    def _activity(self) -> t.Activity:
        active = self.plan is not None and self.plan.active
        # told in a moment: no plan shall count on this node
        leaves = self.state is _IDLE and self.request is not None
        if self.state is _PREPARING or leaves:
            return t.Activity.STOPPING if active else t.Activity.PREPARING
        return t.Activity[self.state.name] if active else t.Activity.IDLE

    def on_lead(self, event: t.Lead, now: float) -> None:
        """From now on this coordinator decides, and renews the lease of our workers."""
        self._met = True
        self.term = event.term
        self._votes = event.votes
        self._connect_by = self._orphan_by = None

    def on_lease_over(self, event: ev.LeaseOver, now: float) -> AgentState:
        """They must be gone before another node starts the same ranks."""
        assert self.plan is not None
        if self.state is _RUNNING:
            why = "the lease of this node is over: its workers are killed"
            self.emit(Say(f"cycle {self.plan.cycle}: {why}"))
        self._leaving.kill(now)
        return _STOPPING

    def on_disconnected(self, event: ev.Disconnected, now: float) -> None:
        """The shell goes on looking for a coordinator. The agent bounds how long that is of any use."""
        self.connected = False
        self.emit(Say(f"no coordinator: {event.why}"))
        if self._connect_by is None:
            self._connect_by = now + self.settings.reconnect_timeout_s
            self._orphan_by = now + self.settings.orphan_grace_s

    def on_tick_alone(self, event: Tick, now: float) -> AgentState | None:
        """Without workers and without a coordinator there is nothing left to do."""
        s = self.settings
        if self._connect_by is None or now < self._connect_by:
            return None  # a tick of the state before
        within = f"{s.join_timeout_s:g} s (join timeout)"
        if self._met:
            within = f"{s.reconnect_timeout_s:g} s"
        why = f"no coordinator could be reached within {within}"
        return self._leaving.leave(ev.Exit(ExitCode.COORDINATOR_LOST, why), SIGTERM, 0.0, now)

    # --- plans ----------------------------------------------------------------------------------------------

    def on_plan_idle(self, event: t.Plan, now: float) -> AgentState | None:
        """Start, or be a spare."""
        return self._take(event) if self._is_new(event) else None

    def on_plan(self, event: t.Plan, now: float) -> AgentState | None:
        """A new coordinator carries on with this cycle; or a later cycle is planned, and this one has to end first."""
        mine = self.plan
        assert mine is not None
        same = event.cycle == mine.cycle and event.group_rank == mine.group_rank
        if same and event.term >= self.term:
            self.plan = event
            self.term = event.term
        elif self._is_new(event):
            self._next_plan = event
            return self._stop(f"cycle {event.cycle} is planned", now)
        return None

    def on_plan_early(self, event: t.Plan, now: float) -> None:
        """Keep the newest plan until the workers are gone and the preflight has passed."""
        kept = self._next_plan
        older = kept is not None and (event.term, event.cycle) < (kept.term, kept.cycle)
        if self._is_new(event) and not older:
            self._next_plan = event

    def begin_next(self) -> AgentState:
        """The node is fit: take the plan that has waited, if there is one."""
        return _IDLE if self._next_plan is None else self._take(self._next_plan)

    def on_counted(self, event: t.Counted, now: float) -> None:
        """Keep it."""
        self._counted = event

    def _is_new(self, plan: t.Plan) -> bool:
        """A later cycle; or a node that lost its place in this very cycle is told that it is a spare of it."""
        if self.plan is None or plan.term < self.term:
            return plan.term >= self.term
        if plan.cycle == self.plan.cycle:
            return not plan.active and self.state in (_IDLE, _PREPARING)
        return plan.cycle > self.plan.cycle

    def _take(self, plan: t.Plan) -> AgentState:
        again = self.plan is not None and plan.cycle == self.plan.cycle
        self.plan = plan
        self.term = plan.term
        self._next_plan = None
        if not plan.active:
            self.emit(ev.EndHeld())
            if not again:
                self.emit(Say(f"cycle {plan.cycle}: this node is a hot spare"))
            return _IDLE
        self.alive = set(range(self.node.nproc))
        self._faults = []
        self._early = False
        self._spent = None
        first = plan.rank_offset
        ranks = f"ranks {first}..{first + self.node.nproc - 1}"
        self.emit(Say(f"cycle {plan.cycle}: group rank {plan.group_rank}, {ranks}"))
        self.emit(ev.StartWorkers(plan))
        self._ranks.began()
        return _RUNNING

    # --- workers ----------------------------------------------------------------------------------------------

    def on_exit_running(self, event: ev.WorkerExited, now: float) -> AgentState | None:
        """A success is counted; a fault is reported at once and, under any-failed, stops the other workers."""
        self._ended(event)
        self._ranks.ended(event.local_rank)
        known = any(fault.local_rank == event.local_rank for fault in self._faults)
        assert self.plan is not None
        self._early = self._early or event.early
        to: AgentState | None = None
        if event.fault is not None and not known:
            to = self._fail(event.fault, now)
        if to is not None or self.alive:
            return to
        if self._faults:
            return self._stopped(now)
        self.emit(Say(f"cycle {self.plan.cycle}: all workers of this node finished"))
        self.send(t.Succeeded(self.plan.term, self.plan.cycle, self._early))
        return _SUCCEEDED

    def on_tick_running(self, event: Tick, now: float) -> AgentState | None:
        """A hung rank that cannot be killed, or no coordinator for too long."""
        stuck = self._ranks.stuck(now)
        if stuck is not None:
            return self._fail(stuck, now)
        if self._orphan_by is not None and now >= self._orphan_by:
            self._orphan_by = None
            return self._stop(f"no coordinator for {self.settings.orphan_grace_s:g} s", now)
        return None

    def on_exit_stopping(self, event: ev.WorkerExited, now: float) -> AgentState | None:
        """When the last worker is gone, the agent ends, or is ready for the next cycle."""
        self._ended(event)
        if event.fault is not None and self._may_be_the_cause(event.fault):
            self._report(event.fault)
        if self.alive:
            return None
        return self._leaving.gone(now) if self.state is _LEAVING else self._stopped(now)

    def _may_be_the_cause(self, fault: t.RankFault) -> bool:
        """A rank that ends while the workers are stopped may be the cause, and the first one its victim."""
        if self._leaving.ladder.signal_at is not None:
            return True  # the workers have not been told to end yet
        has_finding = fault.finding is not None and not self._leaving.is_signalled
        return has_finding or fault.kind is t.FaultKind.HANG

    def _report(self, fault: t.RankFault) -> None:
        if self.plan is not None:
            self.send(t.RanksFailed(self.plan.term, self.plan.cycle, (fault,)))

    def _ended(self, event: ev.WorkerExited) -> None:
        self.alive.discard(event.local_rank)
        if event.spent is not None:
            self._spent = event.spent
            self.send(event.spent)

    def _fail(self, fault: t.RankFault, now: float) -> AgentState | None:
        assert self.plan is not None
        self._faults.append(fault)
        self._report(fault)
        if self.settings.policy is t.RestartPolicy.ANY_FAILED:
            wait_s = grace_s(fault, self.plan.history.restarts)
            return self._stop(f"local rank {fault.local_rank} failed", now, wait_s)
        # the coordinator tells why, and what follows
        self.emit(Say(f"local rank {fault.local_rank} failed"))
        return None

    # --- stopping for the next cycle ------------------------------------------------------------------------------

    def on_stop(self, event: t.Stop, now: float) -> AgentState | None:
        """Stop our workers, if any is left, unless the message is about a cycle that was over before ours."""
        assert self.plan is not None
        if event.term >= self.term and event.cycle >= self.plan.cycle:
            return self._stop(event.reason, now, event.wait_s)
        return None

    def _stop(self, why: str, now: float, wait_s: float = 0.0) -> AgentState:
        assert self.plan is not None
        if not self.alive:
            return self._stopped(now)
        s = self.settings
        some = f"{len(self.alive)} worker{'s' if len(self.alive) > 1 else ''}"
        self.emit(Say(f"cycle {self.plan.cycle}: stopping {some}: {why}"))
        self._leaving.stop(SIGTERM, s.stop_timeout_s, now, s.idle_s, wait_s)
        return _STOPPING

    def _stopped(self, now: float) -> AgentState:
        assert self.plan is not None
        self._leaving.stopped()
        if self._connect_by is not None:
            self._connect_by = now + self.settings.reconnect_timeout_s
        return self._fitness.prepare(t.Ready(self.plan.term, self.plan.cycle, 0))
