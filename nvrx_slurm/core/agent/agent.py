"""The agent of one node: runs what plans say, reports, stops, leaves. Pure; see `core.machine`.

PREPARING -> IDLE -> RUNNING -> SUCCEEDED -> GONE     RUNNING -> STOPPING -> PREPARING
(from anywhere, on signals and at the end: LEAVING -> GONE)

Workers start in IDLE and PREPARING only, and from PREPARING only by the event that the preflight has ended.
"""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ev
from nvrx_slurm.core.agent.agent_state import SIGKILL, SIGTERM, AgentState, State
from nvrx_slurm.core.machine import Say, Tick, rows
from nvrx_slurm.errors import ExitCode, signal_exit_code

__all__ = ["Agent", "State"]

_MAX_CONTINUES = 100  # per cycle
_EMPTY = (State.PREPARING, State.IDLE, State.SUCCEEDED)  # without workers
_BUSY = (State.RUNNING, State.STOPPING)
_STAYS = (*_EMPTY, *_BUSY)
_AFTER = (State.SUCCEEDED, State.STOPPING, State.PREPARING)
_LATE = (
    *(ev.HangSeen, ev.Inspected, ev.RankAsked, ev.Warned, ev.Sick),
    *(t.Plan, t.Stop, t.CheckNode, t.Collect, t.RanksGone, t.Warn, t.Lead, ev.LeaseOver),
)


class Agent(AgentState):
    """The agent's core: `step(event, now)` -> commands; `deadline()` says when it wants a Tick."""

    last = State.GONE
    commands = ev.COMMANDS
    table = rows(
        (_STAYS, ev.Connected, "on_connected", (), "register with what runs"),
        (_STAYS, t.Lead, "on_lead", (), "the coordinator is elected"),
        (_STAYS, ev.Disconnected, "on_disconnected", (), "look for the coordinator; workers go on for a while"),
        ((State.PREPARING, State.STOPPING), t.Plan, "on_plan_early", (), "keep it until the preflight has passed"),
        (State.IDLE, t.Plan, "on_plan_idle", (State.RUNNING,), "active: start; spare: wait"),
        (State.RUNNING, t.Plan, "on_plan", (State.STOPPING,), "a new term, or a new cycle"),
        (State.SUCCEEDED, t.Plan, "on_plan", (State.PREPARING,), "a new term, or once more"),
        (State.PREPARING, (t.Stop, t.CheckNode), "on_stop_preparing", (), "answer when the preflight has passed"),
        (
            State.IDLE,
            (t.Stop, t.CheckNode),
            "on_stop_idle",
            (State.PREPARING,),
            "a spare is checked first",
        ),
        (State.RUNNING, t.Stop, "on_stop", (State.STOPPING,), "stop them"),
        (State.SUCCEEDED, t.Stop, "on_stop", (State.PREPARING,), "others failed"),
        (State.STOPPING, t.Stop, "ignore", (), "doing it"),
        ((*_BUSY, State.SUCCEEDED), t.CheckNode, "ignore", (), "it is no spare any more"),
        (State.RUNNING, ev.LeaseOver, "on_lease_over", (State.STOPPING,), "kill them"),
        (State.STOPPING, ev.LeaseOver, "on_lease_over", (), "no time for a clean end"),
        (_EMPTY, ev.LeaseOver, "ignore", (), "nothing runs"),
        (_EMPTY, t.Finish, "on_finish", (State.ENDED, State.GONE), "the end"),
        (_EMPTY, t.Refused, "on_finish", (State.GONE,), "this agent is not taken"),
        (_BUSY, (t.Finish, t.Refused), "on_finish", (State.LEAVING,), "the end"),
        (State.LEAVING, t.Finish, "on_finish_leaving", (), "the same end for all"),
        (State.RUNNING, ev.WorkerExited, "on_exit_running", _AFTER, "any-failed: one fault stops all"),
        (State.STOPPING, ev.WorkerExited, "on_exit_stopping", (State.PREPARING,), "one fewer"),
        (State.LEAVING, ev.WorkerExited, "on_exit_stopping", (State.ENDED, State.GONE), "one fewer"),
        (State.RUNNING, ev.HangSeen, "on_hang", (), "it should be dead in a moment"),
        ((*_EMPTY, State.STOPPING), ev.HangSeen, "ignore", (), "the rank is gone, or is being stopped"),
        (State.RUNNING, t.Collect, "on_collect", (), "look at the ranks"),
        (_STAYS, ev.Inspected, "on_inspected", (), "pass it on"),
        (_EMPTY, t.Collect, "on_collect_empty", (), "no rank is here"),
        (State.STOPPING, t.Collect, "ignore", (), "too late"),
        (_STAYS, ev.RankAsked, "on_asked", (), "pass it on, also if the rank is gone"),
        (State.RUNNING, t.RanksGone, "on_ranks_gone", (), "pass it on"),
        ((*_EMPTY, State.STOPPING), t.RanksGone, "ignore", (), "no wrappers to tell"),
        (_EMPTY, ev.Signalled, "on_signalled", (State.GONE,), "end the job"),
        (_BUSY, ev.Signalled, "on_signalled", (State.LEAVING,), "end the job"),
        (State.LEAVING, ev.Signalled, "on_signalled_again", (), "a second signal: kill now"),
        (_EMPTY, ev.Warned, "on_warned", (State.GONE,), "for the ranks that will run; the second ends it"),
        (_BUSY, ev.Warned, "on_warned", (State.LEAVING,), "pass on; the second ends it"),
        (_STAYS, t.Warn, "on_warn", (), "warn the ranks, also those that will run"),
        (State.PREPARING, ev.Prepared, "on_prepared", (State.IDLE, State.RUNNING), "offer the node; unfit: say so"),
        ((State.PREPARING, *_BUSY), ev.Sick, "on_sick", (), "ask to be left out"),
        (State.IDLE, ev.Sick, "on_sick", (State.PREPARING,), "ask to be left out"),
        (State.SUCCEEDED, ev.Sick, "on_sick_succeeded", (), "its work is done; not once more"),
        (_EMPTY, Tick, "on_tick_alone", (State.GONE,), "no coordinator in time"),
        (State.RUNNING, Tick, "on_tick_running", (State.STOPPING,), "orphan, or a hung rank lives"),
        ((State.STOPPING, State.LEAVING), ev.Idle, "on_idle", (), "kill them: waiting is of no use"),
        (State.STOPPING, Tick, "on_tick_ladder", (State.GONE,), "next rung of the stop ladder"),
        (State.LEAVING, Tick, "on_tick_ladder", (State.ENDED, State.GONE), "next rung of the stop ladder"),
        (State.LEAVING, (*_LATE, t.Refused, t.Leave), "ignore", (), "leaving anyway"),
        ((State.LEAVING, State.ENDED), ev.Connected, "on_connected_again", (), "tell the end to a new coordinator"),
        ((State.LEAVING, State.ENDED), ev.Disconnected, "on_disconnected_again", (), "leaving anyway"),
        (State.ENDED, (t.Leave, Tick, t.Refused), "on_leave", (State.GONE,), "all agents know the end"),
        (State.ENDED, t.Finish, "on_finish_ended", (), "a new coordinator tells the end again"),
        (State.ENDED, (*_LATE, ev.WorkerExited, ev.Signalled, ev.Prepared), "ignore", (), "nothing runs"),
        (_STAYS, t.Leave, "ignore", (), "of an end that this agent has not heard"),
    )

    # --- the stream ---------------------------------------------------------------------------------------

    def on_connected(self, event: ev.Connected, now: float) -> None:
        """Register at the coordinator with what this node runs."""
        self._connected = True
        if not self.settings.elects:
            self.on_lead(t.Lead(self.term), now)
        self.send(t.Register(self.node, 0, self.plan, self._doing(), tuple(self._faults), self._early))
        for message in (self._request, self._warn_job):
            if message is not None:
                self.send(message)

    def on_lead(self, event: t.Lead, now: float) -> None:
        """From now on this coordinator decides, and renews the lease of our workers."""
        self._met = True
        self._connect_by = self._orphan_by = None

    def on_lease_over(self, event: ev.LeaseOver, now: float) -> State:
        """They must be gone before another node starts the same ranks."""
        assert self.plan is not None
        if self.state is State.RUNNING:
            self.emit(Say(f"cycle {self.plan.cycle}: the lease of this node is over: its workers are killed"))
        if self._before_kill() or not self._ladder:
            self._start_ladder(SIGKILL, self.settings.kill_timeout_s, now)
            self._ladder = [(by, 0) for by, _ in self._ladder]
        return State.STOPPING

    def _doing(self) -> t.Activity:
        active = self.plan is not None and self.plan.active
        if self.state is State.PREPARING:
            return t.Activity.STOPPING if active else t.Activity.PREPARING
        return t.Activity[self.state.name] if active else t.Activity.IDLE

    def on_disconnected(self, event: ev.Disconnected, now: float) -> None:
        """The shell keeps looking for a coordinator; we bound how long that is any use."""
        self._connected = False
        self.emit(Say(f"no coordinator: {event.why}"))
        if self._connect_by is None:
            self._connect_by = now + self.settings.reconnect_timeout_s
            self._orphan_by = now + self.settings.orphan_grace_s

    def on_tick_alone(self, event: Tick, now: float) -> State | None:
        """Without workers and without a coordinator there is nothing left to do."""
        s = self.settings
        if self._connect_by is None or now < self._connect_by:
            return None  # a tick of the state before
        within = f"{s.reconnect_timeout_s:g} s" if self._met else f"{s.join_timeout_s:g} s (join timeout)"
        why = f"no coordinator could be reached within {within}"
        return self._leave(ev.Exit(ExitCode.COORDINATOR_LOST, why), SIGTERM, 0.0, now)

    # --- plans ----------------------------------------------------------------------------------------------

    def on_plan_idle(self, event: t.Plan, now: float) -> State | None:
        """Start, or be a spare."""
        return self._take(event) if self._is_new(event) else None

    def on_plan(self, event: t.Plan, now: float) -> State | None:
        """A new coordinator carries on with this cycle; or a later cycle is planned, and this one has to end first."""
        mine = self.plan
        assert mine is not None
        if event.term >= self.term and (event.cycle, event.group_rank) == (mine.cycle, mine.group_rank):
            self.plan, self.term = event, event.term
        elif self._is_new(event):
            self._next_plan = event
            return self._stop(f"cycle {event.cycle} is planned", now)
        return None

    def on_plan_early(self, event: t.Plan, now: float) -> None:
        """Keep the newest plan until the workers are gone and the preflight has passed."""
        kept = self._next_plan
        if self._is_new(event) and (kept is None or (event.term, event.cycle) >= (kept.term, kept.cycle)):
            self._next_plan = event

    def _is_new(self, plan: t.Plan) -> bool:
        """A later cycle; or a node that lost its place in this very cycle is told that it is a spare of it."""
        if self.plan is None or plan.term < self.term:
            return plan.term >= self.term
        spare_now = not plan.active and self.state in (State.IDLE, State.PREPARING)
        return plan.cycle > self.plan.cycle or (plan.cycle == self.plan.cycle and spare_now)

    def _take(self, plan: t.Plan) -> State:
        again = self.plan is not None and plan.cycle == self.plan.cycle
        self.plan, self.term = plan, plan.term
        self._next_plan = None
        if not plan.active:
            self.emit(ev.EndHeld())
            if not again:
                self.emit(Say(f"cycle {plan.cycle}: this node is a hot spare"))
            return State.IDLE
        self._alive = set(range(self.node.nproc))
        self._hung, self._faults, self._early, self._continues = {}, [], False, 0
        last = plan.rank_offset + self.node.nproc - 1
        self.emit(Say(f"cycle {plan.cycle}: group rank {plan.group_rank}, ranks {plan.rank_offset}..{last}"))
        self.emit(ev.StartWorkers(plan))
        if self._warned:
            self.emit(ev.WarnRanks())
        return State.RUNNING

    # --- workers ----------------------------------------------------------------------------------------------

    def on_exit_running(self, event: ev.WorkerExited, now: float) -> State | None:
        """A success is counted; a fault is reported at once and, under any-failed, stops the other workers."""
        self._alive.discard(event.local_rank)
        self._hung.pop(event.local_rank, None)
        known = any(fault.local_rank == event.local_rank for fault in self._faults)
        assert self.plan is not None
        self._early = self._early or event.early
        to = self._fail(event.fault, now) if event.fault is not None and not known else None
        if to is not None or self._alive:
            return to
        if self._faults:
            return self._stopped(now)
        self.emit(Say(f"cycle {self.plan.cycle}: all workers of this node finished"))
        self.send(t.Succeeded(self.plan.term, self.plan.cycle, self._early))
        return State.SUCCEEDED

    def on_asked(self, event: ev.RankAsked, now: float) -> None:
        """The coordinator decides; what changes something is told again should the stream break."""
        plan = self.plan
        if plan is None or not plan.active:
            return
        rank = plan.rank_offset + event.local_rank
        why = "".join(c if c.isprintable() else " " for c in event.description)  # it goes to terminals and logs
        request = t.Asked(plan.term, plan.cycle, event.action, rank, why)
        if event.action is not t.WorkloadAction.Continue:
            self._request = request
        elif self._continues >= _MAX_CONTINUES:
            return  # a rank that asks in a loop shall not fill everybody's log
        else:
            self._continues += 1
        what = "reports" if event.action is t.WorkloadAction.Continue else f"asks: {event.action.name}"
        self.emit(Say(f"rank {rank} {what}: {why}"))
        self.send(request)

    def on_ranks_gone(self, event: t.RanksGone, now: float) -> None:
        """For the in-process wrappers of this cycle."""
        if self.plan is not None and event.cycle == self.plan.cycle:
            self.emit(ev.PostGone(event.cycle, event.ranks, event.reason))

    def on_warned(self, event: ev.Warned, now: float) -> State | None:
        """The warning signal reaches every rank of the job once; a second one ends the job. Other user
        signals go to the workers unchanged."""
        if event.signum != self.settings.warning_signum:
            if self._alive and self.state is State.RUNNING and not event.everybody:
                self.emit(Say(f"passing signal {event.signum} on to the workers"))
                self.emit(ev.PassOn(event.signum))
        elif self._warned_at is None:
            self._warned_at = now
            if not event.everybody:
                self._warn_job = t.WarnJob(event.signum, self._got(event.signum))
                self.send(self._warn_job)
            self._warn(event.signum, self._got(event.signum), event.everybody)
        elif now >= self._warned_at + self.settings.same_signal_s:  # a warning alone ends no workers
            code, why = signal_exit_code(SIGTERM), f"{self._got(event.signum)} a second time"
            self.send(t.EndJob(code, why))
            return self._leave(ev.Exit(code, why), SIGTERM, self.settings.term_timeout_s, now)
        return None

    def on_warn(self, event: t.Warn, now: float) -> None:
        """The coordinator has it from another node, or from the clock."""
        self._warn(event.signum, event.reason, False)

    def _warn(self, signum: int, why: str, everybody: bool) -> None:
        if self._warned:
            return
        self._warned = True
        self.emit(Say(f"{why}: the job is about to end, ranks are told to save their work"))
        if self._alive and self.state is State.RUNNING:
            self.emit(ev.WarnRanks())
            if not everybody:
                self.emit(ev.PassOn(signum))

    def on_tick_running(self, event: Tick, now: float) -> State | None:
        """A hung rank that cannot be killed, or no coordinator for too long."""
        stuck = [rank for rank, (by, _) in self._hung.items() if now >= by]
        if stuck:
            _, fault = self._hung.pop(stuck[0])
            return self._fail(fault, now)
        if self._orphan_by is not None and now >= self._orphan_by:
            self._orphan_by = None
            return self._stop(f"no coordinator for {self.settings.orphan_grace_s:g} s", now)
        return None

    def on_exit_stopping(self, event: ev.WorkerExited, now: float) -> State | None:
        """When the last worker is gone, the agent ends, or is ready for the next cycle."""
        self._alive.discard(event.local_rank)
        hung = event.fault is not None and event.fault.kind is t.FaultKind.HANG
        if hung and event.fault is not None and self.plan is not None:  # it may be the one that the others waited for
            self.send(t.RanksFailed(self.plan.term, self.plan.cycle, (event.fault,)))
        if self._alive:
            return None
        return self._gone(now) if self.state is State.LEAVING else self._stopped(now)

    def _fail(self, fault: t.RankFault, now: float) -> State | None:
        assert self.plan is not None
        self._faults.append(fault)
        self.send(t.RanksFailed(self.plan.term, self.plan.cycle, (fault,)))
        if self.settings.policy is t.RestartPolicy.ANY_FAILED:
            return self._stop(f"local rank {fault.local_rank} failed", now)
        self.emit(Say(f"local rank {fault.local_rank} failed"))  # the coordinator tells why, and what follows
        return None

    # --- stopping -----------------------------------------------------------------------------------------------

    def on_stop(self, event: t.Stop, now: float) -> State | None:
        """Stop our workers, if any is left, unless the message is about a cycle that was over before ours."""
        assert self.plan is not None
        if event.term >= self.term and event.cycle >= self.plan.cycle:
            return self._stop(event.reason, now)
        return None

    def on_stop_idle(self, event: t.Stop | t.CheckNode, now: float) -> State | None:
        """Nothing runs here. A spare is checked before it may be promoted."""
        if self.plan is None or not self.plan.active:
            self._offer = t.Ready(event.term, event.cycle, 0)
            return self._prepare()
        self.send(t.Ready(event.term, event.cycle, 0))
        return None

    def on_stop_preparing(self, event: t.Stop | t.CheckNode, now: float) -> None:
        """The answer waits until the preflight has passed."""
        self._offer = t.Ready(event.term, event.cycle, 0)

    def _stop(self, why: str, now: float) -> State:
        assert self.plan is not None
        if not self._alive:
            return self._stopped(now)
        some = f"{len(self._alive)} worker{'s' if len(self._alive) > 1 else ''}"
        self.emit(Say(f"cycle {self.plan.cycle}: stopping {some}: {why}"))
        self._start_ladder(SIGTERM, self.settings.stop_timeout_s, now, self.settings.idle_s)
        return State.STOPPING

    def _stopped(self, now: float) -> State:
        assert self.plan is not None
        self._ladder = []
        self._hung = {}
        if self._connect_by is not None:
            self._connect_by = now + self.settings.reconnect_timeout_s
        self._offer = t.Ready(self.plan.term, self.plan.cycle, 0)
        return self._prepare()

    # --- fit for another cycle? ---------------------------------------------------------------------------------

    def _prepare(self) -> State:
        if self._unfit:
            self._declare_unfit()
        else:
            used, cycle = (self.plan.active, self.plan.cycle + 1) if self.plan is not None else (False, 0)
            self.emit(ev.Prepare(used, cycle))
        return State.PREPARING

    def on_prepared(self, event: ev.Prepared, now: float) -> State | None:
        """The preflight has ended. A node that passed is ready for the next plan, which may be here already."""
        self._unfit = self._unfit or event.unfit
        if self._unfit:
            self._declare_unfit()
            return None
        offer, self._offer = self._offer, None
        self.send(offer or t.Ready(0, 0, 0))  # term 0: it has never run anything
        return State.IDLE if self._next_plan is None else self._take(self._next_plan)

    def on_sick(self, event: ev.Sick, now: float) -> State | None:
        """A check of the node failed while it runs workers, or waits: the job has to do without this node."""
        if not self._unfit:
            self._unfit = event.why
            self._declare_unfit()
        return State.PREPARING if self.state is State.IDLE else None

    def on_sick_succeeded(self, event: ev.Sick, now: float) -> None:
        """Its work is done, but the node is not to be used once more."""
        self._unfit = event.why

    def _declare_unfit(self) -> None:
        term, cycle = (self.plan.term, self.plan.cycle) if self.plan is not None else (0, 0)
        self._request = t.NodeUnfit(term, cycle, self._unfit)
        self.emit(ev.EndHeld())
        self.emit(Say(f"this node is not fit for the job: {self._unfit}"))
        self.send(self._request)
