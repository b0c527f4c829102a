"""The agent of one node: runs what plans say, reports, stops, leaves. Pure; see `core.machine`.

PREPARING -> IDLE -> RUNNING -> SUCCEEDED -> GONE     RUNNING -> STOPPING -> PREPARING
(from anywhere, on signals and at the end: LEAVING -> GONE)

Workers start in IDLE and PREPARING only, and from PREPARING only by the event that the preflight has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar

from nvrx_slurm.core.job import agent_events as ev
from nvrx_slurm.core.job.agent_state import SIGTERM, AgentState, State
from nvrx_slurm.core.machine import Row, Say, Tick
from nvrx_slurm.types import (
    Asked,
    Doing,
    Failed,
    Finish,
    Plan,
    RankFault,
    RanksGone,
    Refused,
    Register,
    RestartPolicy,
    Stop,
    Stopped,
    Succeeded,
    Warn,
    WorkloadAction,
)

__all__ = ["Agent", "State"]

_DOING: dict[Enum, Doing] = {
    State.PREPARING: Doing.STOPPING,
    State.IDLE: Doing.IDLE,
    State.RUNNING: Doing.RUNNING,
    State.SUCCEEDED: Doing.SUCCEEDED,
    State.STOPPING: Doing.STOPPING,
}
_STOP = (State.STOPPING, State.PREPARING)
_END = (State.LEAVING, State.GONE)
_OUT = (State.GONE,)
_LEAVE = (State.LEAVING,)


class Agent(AgentState):
    """The agent's core: `step(event, now)` -> commands; `deadline()` says when it wants a Tick."""

    commands = ev.COMMANDS
    # fmt: off
    table: ClassVar[Mapping[tuple[Enum, type], Row]] = {
        (State.PREPARING, ev.Connected): Row("on_connected", (State.PREPARING,), "register"),
        (State.PREPARING, ev.Disconnected): Row("on_disconnected", (State.PREPARING,), "look for the coordinator"),
        (State.PREPARING, Plan): Row("on_plan_early", (State.PREPARING,), "keep it until the preflight has passed"),
        (State.PREPARING, Stop): Row("on_stop_preparing", (State.PREPARING,), "answer when the preflight has passed"),
        (State.PREPARING, Finish): Row("on_finish", _OUT, "the end"),
        (State.PREPARING, Refused): Row("on_finish", _OUT, "not wanted"),
        (State.PREPARING, ev.HangSeen): Row("ignore", (State.PREPARING,), "the rank is gone"),
        (State.PREPARING, ev.RankAsked): Row("on_asked", (State.PREPARING,), "a request of a rank that is gone counts"),
        (State.PREPARING, RanksGone): Row("ignore", (State.PREPARING,), "no wrappers to tell"),
        (State.PREPARING, ev.Signalled): Row("on_signalled", _OUT, "end the job"),
        (State.PREPARING, ev.Warned): Row("on_warned", (State.PREPARING, State.GONE), "for the ranks that will run"),
        (State.PREPARING, Warn): Row("on_warn", (State.PREPARING,), "for the ranks that will run"),
        (State.PREPARING, ev.Prepared): Row(
            "on_prepared", (State.PREPARING, State.IDLE, State.RUNNING), "passed: offer the node; unfit: say so"
        ),
        (State.PREPARING, ev.Sick): Row("on_sick", (State.PREPARING,), "ask to be left out"),
        (State.PREPARING, Tick): Row("on_tick_alone", _OUT, "no coordinator in time"),
        (State.IDLE, ev.Connected): Row("on_connected", (State.IDLE,), "register"),
        (State.IDLE, ev.Disconnected): Row("on_disconnected", (State.IDLE,), "look for the coordinator"),
        (State.IDLE, Plan): Row("on_plan_idle", (State.IDLE, State.RUNNING), "active: start; spare: wait"),
        (State.IDLE, Stop): Row("on_stop_idle", (State.IDLE, State.PREPARING), "a spare is checked first"),
        (State.IDLE, Finish): Row("on_finish", _OUT, "the end"),
        (State.IDLE, Refused): Row("on_finish", _OUT, "not wanted"),
        (State.IDLE, ev.HangSeen): Row("ignore", (State.IDLE,), "the rank is gone"),
        (State.IDLE, ev.RankAsked): Row("on_asked", (State.IDLE,), "a request of a rank that is gone counts"),
        (State.IDLE, RanksGone): Row("ignore", (State.IDLE,), "no wrappers to tell"),
        (State.IDLE, ev.Signalled): Row("on_signalled", _OUT, "end the job"),
        (State.IDLE, ev.Warned): Row("on_warned", (State.IDLE, State.GONE), "for the ranks that will run"),
        (State.IDLE, Warn): Row("on_warn", (State.IDLE,), "for the ranks that will run"),
        (State.IDLE, Tick): Row("on_tick_alone", _OUT, "no coordinator in time"),
        (State.IDLE, ev.Sick): Row("on_sick", (State.PREPARING,), "ask to be left out"),
        (State.RUNNING, ev.Connected): Row("on_connected", (State.RUNNING,), "register with what runs"),
        (State.RUNNING, ev.Disconnected): Row("on_disconnected", (State.RUNNING,), "workers go on for a while"),
        (State.RUNNING, Plan): Row("on_plan_running", (State.RUNNING, State.STOPPING), "a new term, or a new cycle"),
        (State.RUNNING, Stop): Row("on_stop", (State.RUNNING, State.STOPPING), "stop them"),
        (State.RUNNING, Finish): Row("on_finish", _LEAVE, "the end"),
        (State.RUNNING, Refused): Row("on_finish", _LEAVE, "not wanted any more"),
        (State.RUNNING, ev.WorkerExited): Row(
            "on_exit_running", (State.RUNNING, State.SUCCEEDED, *_STOP), "any-failed: one fault stops all"
        ),
        (State.RUNNING, ev.RankAsked): Row("on_asked", (State.RUNNING,), "pass it on"),
        (State.RUNNING, RanksGone): Row("on_ranks_gone", (State.RUNNING,), "pass it on"),
        (State.RUNNING, ev.HangSeen): Row("on_hang", (State.RUNNING,), "it should be dead in a moment"),
        (State.RUNNING, ev.Signalled): Row("on_signalled", _LEAVE, "end the job"),
        (State.RUNNING, ev.Warned): Row("on_warned", (State.RUNNING, State.LEAVING), "pass on; the second ends it"),
        (State.RUNNING, Warn): Row("on_warn", (State.RUNNING,), "warn the ranks"),
        (State.RUNNING, ev.Sick): Row("on_sick", (State.RUNNING,), "ask to be left out"),
        (State.RUNNING, Tick): Row("on_tick_running", (State.RUNNING, State.STOPPING), "orphan, or a hung rank lives"),
        (State.SUCCEEDED, ev.Connected): Row("on_connected", (State.SUCCEEDED,), "register with the success"),
        (State.SUCCEEDED, ev.Disconnected): Row("on_disconnected", (State.SUCCEEDED,), "look for the coordinator"),
        (State.SUCCEEDED, Plan): Row("on_plan_succeeded", (State.SUCCEEDED, State.PREPARING), "once more"),
        (State.SUCCEEDED, Stop): Row("on_stop_succeeded", (State.SUCCEEDED, State.PREPARING), "others failed"),
        (State.SUCCEEDED, Finish): Row("on_finish", _OUT, "the end"),
        (State.SUCCEEDED, Refused): Row("on_finish", _OUT, "not wanted any more"),
        (State.SUCCEEDED, ev.HangSeen): Row("ignore", (State.SUCCEEDED,), "it finished after all"),
        (State.SUCCEEDED, ev.RankAsked): Row("on_asked", (State.SUCCEEDED,), "a request of a rank that is gone counts"),
        (State.SUCCEEDED, RanksGone): Row("ignore", (State.SUCCEEDED,), "no wrappers to tell"),
        (State.SUCCEEDED, ev.Signalled): Row("on_signalled", _OUT, "end the job"),
        (State.SUCCEEDED, ev.Warned): Row("on_warned", (State.SUCCEEDED, State.GONE), "for the ranks that will run"),
        (State.SUCCEEDED, Warn): Row("on_warn", (State.SUCCEEDED,), "for the ranks that will run"),
        (State.SUCCEEDED, ev.Sick): Row("on_sick_succeeded", (State.SUCCEEDED,), "its work is done; not once more"),
        (State.SUCCEEDED, Tick): Row("on_tick_alone", _OUT, "no coordinator in time"),
        (State.STOPPING, ev.Connected): Row("on_connected", (State.STOPPING,), "register with what still runs"),
        (State.STOPPING, ev.Disconnected): Row("on_disconnected", (State.STOPPING,), "finish stopping first"),
        (State.STOPPING, Plan): Row("on_plan_early", (State.STOPPING,), "for when they are gone"),
        (State.STOPPING, Stop): Row("ignore", (State.STOPPING,), "doing it"),
        (State.STOPPING, Finish): Row("on_finish", _LEAVE, "the end"),
        (State.STOPPING, Refused): Row("on_finish", _LEAVE, "not wanted any more"),
        (State.STOPPING, ev.WorkerExited): Row("on_exit_stopping", _STOP, "one fewer"),
        (State.STOPPING, ev.HangSeen): Row("ignore", (State.STOPPING,), "it is being stopped anyway"),
        (State.STOPPING, ev.RankAsked): Row("on_asked", (State.STOPPING,), "pass it on"),
        (State.STOPPING, RanksGone): Row("ignore", (State.STOPPING,), "they are being stopped"),
        (State.STOPPING, ev.Signalled): Row("on_signalled", _LEAVE, "end the job"),
        (State.STOPPING, ev.Warned): Row("on_warned", (State.STOPPING, State.LEAVING), "for the ranks that will run"),
        (State.STOPPING, Warn): Row("on_warn", (State.STOPPING,), "for the ranks that will run"),
        (State.STOPPING, ev.Sick): Row("on_sick", (State.STOPPING,), "ask to be left out"),
        (State.STOPPING, Tick): Row("on_tick_ladder", (State.STOPPING, State.GONE), "next rung of the stop ladder"),
        (State.LEAVING, ev.Connected): Row("ignore", (State.LEAVING,), "too late"),
        (State.LEAVING, ev.Disconnected): Row("ignore", (State.LEAVING,), "leaving anyway"),
        (State.LEAVING, Plan): Row("ignore", (State.LEAVING,), "too late"),
        (State.LEAVING, Stop): Row("ignore", (State.LEAVING,), "doing it"),
        (State.LEAVING, Finish): Row("on_finish_leaving", (State.LEAVING,), "the same end for all"),
        (State.LEAVING, Refused): Row("ignore", (State.LEAVING,), "leaving anyway"),
        (State.LEAVING, ev.WorkerExited): Row("on_exit_leaving", _END, "one fewer"),
        (State.LEAVING, ev.HangSeen): Row("ignore", (State.LEAVING,), "it is being stopped anyway"),
        (State.LEAVING, ev.Signalled): Row("on_signalled_again", (State.LEAVING,), "a second signal: kill now"),
        (State.LEAVING, ev.RankAsked): Row("ignore", (State.LEAVING,), "too late"),
        (State.LEAVING, RanksGone): Row("ignore", (State.LEAVING,), "they are being stopped"),
        (State.LEAVING, ev.Warned): Row("ignore", (State.LEAVING,), "they are being stopped"),
        (State.LEAVING, Warn): Row("ignore", (State.LEAVING,), "they are being stopped"),
        (State.LEAVING, ev.Sick): Row("ignore", (State.LEAVING,), "leaving anyway"),
        (State.LEAVING, Tick): Row("on_tick_ladder", _END, "next rung of the stop ladder"),
    }
    # fmt: on

    # --- the stream ---------------------------------------------------------------------------------------

    def on_connected(self, event: ev.Connected, now: float) -> None:
        """Tell the coordinator who we are and what we run."""
        self._met = self._connected = True
        self._connect_by = self._orphan_by = None
        self.send(Register(self.node, 0, self.plan, self._doing(), tuple(self._faults), self._early))
        for message in (self._request, self._warn_job):
            if message is not None:
                self.send(message)

    def _doing(self) -> Doing:
        if self.plan is not None and self.plan.active:
            return _DOING[self.state]
        return Doing.PREPARING if self.state is State.PREPARING else Doing.IDLE

    # --- plans ----------------------------------------------------------------------------------------------

    def on_plan_idle(self, event: Plan, now: float) -> None:
        """Start, or be a spare."""
        if self._is_new(event):
            self._take(event, now)

    def on_plan_succeeded(self, event: Plan, now: float) -> None:
        """The others failed and the cycle is run again, or a new coordinator took over."""
        if self._carries_on(event):
            self._carry_on(event)
        elif self._is_new(event):
            self._next_plan = event
            self._stopped(now)

    def on_plan_running(self, event: Plan, now: float) -> None:
        """A new coordinator carries on with our cycle; or a later cycle, for which ours has to end first."""
        if self._carries_on(event):
            self._carry_on(event)
        elif self._is_new(event):
            self._next_plan = event
            self._stop(f"cycle {event.cycle} is planned", now)

    def on_plan_early(self, event: Plan, now: float) -> None:
        """Keep the newest plan until the workers are gone and the preflight has passed."""
        kept = self._next_plan
        if self._is_new(event) and (kept is None or (event.term, event.cycle) >= (kept.term, kept.cycle)):
            self._next_plan = event

    def _is_new(self, plan: Plan) -> bool:
        return plan.term >= self.term and (self.plan is None or plan.cycle > self.plan.cycle or self._respare(plan))

    def _respare(self, plan: Plan) -> bool:
        """A node that lost its place in this very cycle may be told that it is a spare of it."""
        assert self.plan is not None
        return plan.cycle == self.plan.cycle and not plan.active and self.state in (State.IDLE, State.PREPARING)

    def _carries_on(self, plan: Plan) -> bool:
        mine = self.plan
        assert mine is not None
        return plan.term >= self.term and plan.cycle == mine.cycle and plan.group_rank == mine.group_rank

    def _carry_on(self, plan: Plan) -> None:
        self.plan, self.term = plan, plan.term

    def _take(self, plan: Plan, now: float) -> None:
        again = self.plan is not None and plan.cycle == self.plan.cycle
        self.plan, self.term = plan, plan.term
        self._next_plan = None
        if not plan.active:
            self.state = State.IDLE
            self.emit(ev.EndHeld())
            if not again:
                self.emit(Say(f"cycle {plan.cycle}: this node is a hot spare"))
            return
        self._alive = set(range(self.node.nproc))
        self._hung, self._faults, self._early, self._continues = {}, [], False, 0
        self.state = State.RUNNING
        last = plan.rank_offset + self.node.nproc - 1
        self.emit(Say(f"cycle {plan.cycle}: group rank {plan.group_rank}, ranks {plan.rank_offset}..{last}"))
        self.emit(ev.StartWorkers(plan))
        if self._warned:
            self.emit(ev.WarnRanks())

    # --- workers ----------------------------------------------------------------------------------------------

    def on_exit_running(self, event: ev.WorkerExited, now: float) -> None:
        """A success is counted; a fault is reported at once and, under any-failed, stops the other workers."""
        self._alive.discard(event.local_rank)
        self._hung.pop(event.local_rank, None)
        known = any(fault.local_rank == event.local_rank for fault in self._faults)
        assert self.plan is not None
        self._early = self._early or event.early
        if event.fault is not None and not known:
            self._fail(event.fault, now)
        if self._alive or self.state is not State.RUNNING:
            return
        if self._faults:
            self._stopped(now)
            return
        self.state = State.SUCCEEDED
        self.emit(Say(f"cycle {self.plan.cycle}: all workers of this node finished"))
        self.send(Succeeded(self.plan.term, self.plan.cycle, self._early))

    def on_hang(self, event: ev.HangSeen, now: float) -> None:
        """The monitor kills the rank; if that does not work within the kill timeout, go on without waiting."""
        if event.fault.local_rank not in self._alive:
            return  # late word: it has ended
        self.emit(Say(f"local rank {event.fault.local_rank} hangs: its monitor ends it"))
        self._hung[event.fault.local_rank] = now + self.settings.kill_timeout_s, event.fault

    def on_tick_running(self, event: Tick, now: float) -> None:
        """A hung rank that cannot be killed, or no coordinator for too long."""
        stuck = [rank for rank, (by, _) in self._hung.items() if now >= by]
        if stuck:
            _, fault = self._hung.pop(stuck[0])
            self._fail(fault, now)
        elif self._orphan_by is not None and now >= self._orphan_by:
            self._orphan_by = None
            self._stop(f"no coordinator for {self.settings.orphan_grace_s:g} s", now)

    def on_exit_stopping(self, event: ev.WorkerExited, now: float) -> None:
        """When the last one is gone we are ready for the next cycle."""
        self._alive.discard(event.local_rank)
        if not self._alive:
            self._stopped(now)

    def on_exit_leaving(self, event: ev.WorkerExited, now: float) -> None:
        """When the last one is gone we go, too."""
        self._alive.discard(event.local_rank)
        if not self._alive:
            self._gone()

    def _fail(self, fault: RankFault, now: float) -> None:
        assert self.plan is not None
        self._faults.append(fault)
        self.send(Failed(self.plan.term, self.plan.cycle, (fault,)))
        if self.settings.policy is RestartPolicy.ANY_FAILED:
            self._stop(f"local rank {fault.local_rank} failed", now)
        else:
            self.emit(Say(f"local rank {fault.local_rank} failed"))  # the coordinator tells why, and what follows

    # --- stopping -----------------------------------------------------------------------------------------------

    def on_stop(self, event: Stop, now: float) -> None:
        """Stop our workers, unless the message is about a cycle that was over before ours."""
        assert self.plan is not None
        if event.term >= self.term and event.cycle >= self.plan.cycle:
            self._stop(event.reason, now)

    def on_stop_succeeded(self, event: Stop, now: float) -> None:
        """The others failed after we were done; we are ready for another cycle."""
        assert self.plan is not None
        if event.term >= self.term and event.cycle >= self.plan.cycle:
            self._stopped(now)

    def on_stop_idle(self, event: Stop, now: float) -> None:
        """Nothing runs here. A spare is checked before it may be promoted."""
        if self.plan is None or not self.plan.active:
            self._offer = Stopped(event.term, event.cycle, 0)
            self._prepare()
        else:
            self.send(Stopped(event.term, event.cycle, 0))

    def on_stop_preparing(self, event: Stop, now: float) -> None:
        """The answer waits until the preflight has passed."""
        self._offer = Stopped(event.term, event.cycle, 0)

    def _stop(self, why: str, now: float) -> None:
        assert self.plan is not None
        if not self._alive:
            self._stopped(now)
            return
        self.state = State.STOPPING
        some = f"{len(self._alive)} worker{'s' if len(self._alive) > 1 else ''}"
        self.emit(Say(f"cycle {self.plan.cycle}: stopping {some}: {why}"))
        self._start_ladder(SIGTERM, self.settings.stop_timeout_s, now)

    def _stopped(self, now: float) -> None:
        assert self.plan is not None
        self._kill_at = self._give_up_at = None
        self._hung = {}
        if self._connect_by is not None:
            self._connect_by = now + self.settings.reconnect_timeout_s
        self._offer = Stopped(self.plan.term, self.plan.cycle, 0)
        self._prepare()

    # --- fit for another cycle? ---------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self.state = State.PREPARING
        if self._unfit:
            self._declare_unfit()
        else:
            used, cycle = (self.plan.active, self.plan.cycle + 1) if self.plan is not None else (False, 0)
            self.emit(ev.Prepare(used, cycle))

    def on_prepared(self, event: ev.Prepared, now: float) -> None:
        """The preflight has ended. A node that passed is ready for the next plan, which may be here already."""
        self._unfit = self._unfit or event.unfit
        if self._unfit:
            self._declare_unfit()
            return
        self.state = State.IDLE
        offer, self._offer = self._offer, None
        self.send(offer or Stopped(0, 0, 0))  # term 0: it has never run anything
        if self._next_plan is not None:
            self._take(self._next_plan, now)

    def on_sick(self, event: ev.Sick, now: float) -> None:
        """A check of the node failed while it runs workers, or waits: the job has to do without this node."""
        if not self._unfit:
            self._unfit = event.why
            self._declare_unfit()
        if self.state is State.IDLE:
            self.state = State.PREPARING

    def on_sick_succeeded(self, event: ev.Sick, now: float) -> None:
        """Its work is done, but the node is not to be used once more."""
        self._unfit = event.why

    def _declare_unfit(self) -> None:
        term, cycle = (self.plan.term, self.plan.cycle) if self.plan is not None else (0, 0)
        self._request = Asked(term, cycle, WorkloadAction.ExcludeThisNode, -1, self._unfit)
        self.emit(ev.EndHeld())
        self.emit(Say(f"this node is not fit for the job: {self._unfit}"))
        self.send(self._request)
