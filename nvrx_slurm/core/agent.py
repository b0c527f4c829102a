"""The agent of one node: runs what plans say, reports, stops, leaves. Pure; see `core.machine`.

IDLE -> RUNNING -> SUCCEEDED -> GONE     RUNNING <-> STOPPING
(from anywhere, on signals and at the end: LEAVING -> GONE)
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import ClassVar

from nvrx_slurm.core import agent_events as ev
from nvrx_slurm.core.machine import Machine, Row, Say, Tick, earliest
from nvrx_slurm.core.restarts import headline
from nvrx_slurm.errors import ExitCode, signal_exit_code
from nvrx_slurm.types import (
    Asked,
    Doing,
    EndJob,
    Failed,
    Finish,
    Node,
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
    WarnJob,
    WorkloadAction,
)


class State(Enum):
    """States of the agent."""

    IDLE = "no workers; waiting for a plan"
    RUNNING = "workers run"
    SUCCEEDED = "all workers of this node ended well; waiting for the others"
    STOPPING = "workers are being stopped for the next cycle"
    LEAVING = "workers are being stopped for good"
    GONE = "done"


_SIGTERM, _SIGKILL, _SIGCONT = 15, 9, 18
_MAX_CONTINUES = 100  # per cycle
_DOING: dict[Enum, Doing] = {
    State.IDLE: Doing.IDLE,
    State.RUNNING: Doing.RUNNING,
    State.SUCCEEDED: Doing.SUCCEEDED,
    State.STOPPING: Doing.STOPPING,
}
_STOP = (State.STOPPING, State.IDLE)
_END = (State.LEAVING, State.GONE)
_OUT = (State.GONE,)
_LEAVE = (State.LEAVING,)


class Agent(Machine):
    """The agent's core: `step(event, now)` -> commands; `deadline()` says when it wants a Tick."""

    # fmt: off
    table: ClassVar[Mapping[tuple[Enum, type], Row]] = {
        (State.IDLE, ev.Connected): Row("on_connected", (State.IDLE,), "register"),
        (State.IDLE, ev.Disconnected): Row("on_disconnected", (State.IDLE,), "look for the coordinator"),
        (State.IDLE, Plan): Row("on_plan_idle", (State.IDLE, State.RUNNING), "active: start; spare: wait"),
        (State.IDLE, Stop): Row("on_stop_idle", (State.IDLE,), "nothing runs: say so again"),
        (State.IDLE, Finish): Row("on_finish", _OUT, "the end"),
        (State.IDLE, Refused): Row("on_finish", _OUT, "not wanted"),
        (State.IDLE, ev.HangSeen): Row("ignore", (State.IDLE,), "late word: it is gone"),
        (State.IDLE, ev.RankAsked): Row("on_asked", (State.IDLE,), "late word of a rank that is gone: it still counts"),
        (State.IDLE, RanksGone): Row("ignore", (State.IDLE,), "no wrappers to tell"),
        (State.IDLE, ev.Signalled): Row("on_signalled", _OUT, "end the job"),
        (State.IDLE, ev.Warned): Row("on_warned", (State.IDLE, State.GONE), "for the ranks that will run"),
        (State.IDLE, Warn): Row("on_warn", (State.IDLE,), "for the ranks that will run"),
        (State.IDLE, Tick): Row("on_tick_alone", _OUT, "no coordinator in time"),
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
        (State.RUNNING, Tick): Row("on_tick_running", (State.RUNNING, State.STOPPING), "orphan, or a hung rank lives"),
        (State.SUCCEEDED, ev.Connected): Row("on_connected", (State.SUCCEEDED,), "register with the success"),
        (State.SUCCEEDED, ev.Disconnected): Row("on_disconnected", (State.SUCCEEDED,), "look for the coordinator"),
        (State.SUCCEEDED, Plan): Row("on_plan_succeeded", (State.SUCCEEDED, State.RUNNING, State.IDLE), "once more"),
        (State.SUCCEEDED, Stop): Row("on_stop_succeeded", (State.SUCCEEDED, State.IDLE), "others failed"),
        (State.SUCCEEDED, Finish): Row("on_finish", _OUT, "the end"),
        (State.SUCCEEDED, Refused): Row("on_finish", _OUT, "not wanted any more"),
        (State.SUCCEEDED, ev.HangSeen): Row("ignore", (State.SUCCEEDED,), "it finished after all"),
        (State.SUCCEEDED, ev.RankAsked): Row("on_asked", (State.SUCCEEDED,), "late word of a rank: it still counts"),
        (State.SUCCEEDED, RanksGone): Row("ignore", (State.SUCCEEDED,), "no wrappers to tell"),
        (State.SUCCEEDED, ev.Signalled): Row("on_signalled", _OUT, "end the job"),
        (State.SUCCEEDED, ev.Warned): Row("on_warned", (State.SUCCEEDED, State.GONE), "for the ranks that will run"),
        (State.SUCCEEDED, Warn): Row("on_warn", (State.SUCCEEDED,), "for the ranks that will run"),
        (State.SUCCEEDED, Tick): Row("on_tick_alone", _OUT, "no coordinator in time"),
        (State.STOPPING, ev.Connected): Row("on_connected", (State.STOPPING,), "register with what still runs"),
        (State.STOPPING, ev.Disconnected): Row("on_disconnected", (State.STOPPING,), "finish stopping first"),
        (State.STOPPING, Plan): Row("on_plan_stopping", (State.STOPPING,), "for when they are gone"),
        (State.STOPPING, Stop): Row("ignore", (State.STOPPING,), "doing it"),
        (State.STOPPING, Finish): Row("on_finish", _LEAVE, "the end"),
        (State.STOPPING, Refused): Row("on_finish", _LEAVE, "not wanted any more"),
        (State.STOPPING, ev.WorkerExited): Row("on_exit_stopping", (*_STOP, State.RUNNING), "one fewer"),
        (State.STOPPING, ev.HangSeen): Row("ignore", (State.STOPPING,), "it is being stopped anyway"),
        (State.STOPPING, ev.RankAsked): Row("on_asked", (State.STOPPING,), "pass it on"),
        (State.STOPPING, RanksGone): Row("ignore", (State.STOPPING,), "they are being stopped"),
        (State.STOPPING, ev.Signalled): Row("on_signalled", _LEAVE, "end the job"),
        (State.STOPPING, ev.Warned): Row("on_warned", (State.STOPPING, State.LEAVING), "for the ranks that will run"),
        (State.STOPPING, Warn): Row("on_warn", (State.STOPPING,), "for the ranks that will run"),
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
        (State.LEAVING, Tick): Row("on_tick_ladder", _END, "next rung of the stop ladder"),
    }
    # fmt: on

    def __init__(self, node: Node, settings: ev.AgentSettings, now: float) -> None:
        super().__init__(State.IDLE, now)
        self.node = node
        self.settings = settings
        self.plan: Plan | None = None  # the last one that was taken
        self.term = 0
        self._next_plan: Plan | None = None  # waits until the workers of the old cycle are gone
        self._alive: set[int] = set()  # local ranks
        self._exit: ev.Exit | None = None
        self._connect_by: float | None = now + settings.join_timeout_s
        self._orphan_by: float | None = None
        self._term_at: float | None = None
        self._term_signum = _SIGTERM
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._hung: dict[int, tuple[float, RankFault]] = {}  # local rank -> until when its monitor may take to kill it
        self._faults: list[RankFault] = []  # of the last plan
        self._early = False  # a worker of the last plan ended because it was warned
        self._request: Asked | None = None  # the last one that changes something: told again on every stream
        self._continues = 0  # requests to continue in this cycle
        self._warned = False
        self._warned_at: float | None = None  # when this very agent got the signal
        self._warn_job: WarnJob | None = None  # told again on every stream
        self._signalled_at: float | None = None
        self._met = False  # has ever had a coordinator

    def deadline(self) -> float | None:
        """When the next Tick is due (monotonic seconds), or None."""
        if self.state is State.RUNNING:
            return earliest(self._orphan_by, *(by for by, _ in self._hung.values()))
        if self.state in (State.STOPPING, State.LEAVING):
            return earliest(self._term_at, self._kill_at, self._give_up_at)
        return self._connect_by

    # --- the stream ---------------------------------------------------------------------------------------

    def on_connected(self, event: ev.Connected, now: float) -> None:
        """Tell the coordinator who we are and what we run."""
        self._met = True
        self._connect_by = self._orphan_by = None
        doing = _DOING[self.state] if self.plan is not None and self.plan.active else Doing.IDLE
        self.emit(ev.Send(Register(self.node, 0, self.plan, doing, tuple(self._faults), self._early)))
        for message in (self._request, self._warn_job):
            if message is not None:
                self.emit(ev.Send(message))

    def on_disconnected(self, event: ev.Disconnected, now: float) -> None:
        """The shell keeps looking for a coordinator; we bound how long that is any use."""
        self.emit(Say(f"no coordinator: {event.why}"))
        self._connect_by = now + self.settings.reconnect_timeout_s
        self._orphan_by = now + self.settings.orphan_grace_s

    def on_tick_alone(self, event: Tick, now: float) -> None:
        """Without workers and without a coordinator there is nothing left to do."""
        s = self.settings
        within = f"{s.reconnect_timeout_s:g} s" if self._met else f"{s.join_timeout_s:g} s (join timeout)"
        why = f"no coordinator could be reached within {within}"
        self._leave(ev.Exit(ExitCode.COORDINATOR_LOST, why), _SIGTERM, 0.0, now)

    # --- plans ----------------------------------------------------------------------------------------------

    def on_plan_idle(self, event: Plan, now: float) -> None:
        """Start, or be a spare."""
        if not self._is_new(event):
            return
        self._take(event, now)

    def on_plan_succeeded(self, event: Plan, now: float) -> None:
        """The others failed and the cycle is run again, or a new coordinator took over."""
        if self._carries_on(event):
            self._carry_on(event)
        elif self._is_new(event):
            self._take(event, now)

    def on_plan_running(self, event: Plan, now: float) -> None:
        """A new coordinator carries on with our cycle; or a later cycle, for which ours has to end first."""
        if self._carries_on(event):
            self._carry_on(event)
        elif self._is_new(event):
            self._next_plan = event
            self._stop(f"cycle {event.cycle} is planned", now)

    def on_plan_stopping(self, event: Plan, now: float) -> None:
        """Keep the newest plan until our workers are gone."""
        kept = self._next_plan
        if self._is_new(event) and (kept is None or (event.term, event.cycle) >= (kept.term, kept.cycle)):
            self._next_plan = event

    def _is_new(self, plan: Plan) -> bool:
        return plan.term >= self.term and (self.plan is None or plan.cycle > self.plan.cycle or self._respare(plan))

    def _respare(self, plan: Plan) -> bool:
        """A node that lost its place in this very cycle may be told that it is a spare of it."""
        assert self.plan is not None
        return plan.cycle == self.plan.cycle and not plan.active and self.state is State.IDLE

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
        self.emit(ev.Send(Succeeded(self.plan.term, self.plan.cycle, self._early)))

    def on_hang(self, event: ev.HangSeen, now: float) -> None:
        """The monitor kills the rank; if that does not work within the kill timeout, go on without waiting."""
        if event.fault.local_rank not in self._alive:
            return  # late word: it has ended
        self.emit(Say(headline(event.fault)))
        self._hung[event.fault.local_rank] = now + self.settings.kill_timeout_s, event.fault

    def on_asked(self, event: ev.RankAsked, now: float) -> None:
        """The coordinator decides; what changes something is told again should the stream break."""
        if self.plan is None or not self.plan.active:
            return
        plan = self.plan
        rank = plan.rank_offset + event.local_rank
        why = "".join(c if c.isprintable() else " " for c in event.description)  # it goes to terminals and logs
        request = Asked(plan.term, plan.cycle, event.action, rank, why)
        if event.action is not WorkloadAction.Continue:
            self._request = request
        elif self._continues >= _MAX_CONTINUES:
            return  # a rank that asks in a loop shall not fill everybody's log
        else:
            self._continues += 1
        self.emit(Say(f"rank {rank} asks: {event.action.name}: {why}"))
        self.emit(ev.Send(request))

    def on_ranks_gone(self, event: RanksGone, now: float) -> None:
        """For the in-process wrappers of this cycle."""
        if self.plan is not None and event.cycle == self.plan.cycle:
            self.emit(ev.PostGone(event.cycle, event.ranks, event.reason))

    def on_warned(self, event: ev.Warned, now: float) -> None:
        """The warning signal reaches every rank of the job once; who sends it a second time wants an end. Other user
        signals are the workers' business."""
        if event.signum != self.settings.warning_signum:
            if self._alive and self.state is State.RUNNING and not event.everybody:
                self.emit(Say(f"passing signal {event.signum} on to the workers"))
                self.emit(ev.PassOn(event.signum))
        elif self._warned_at is None:
            self._warned_at = now
            if not event.everybody:
                self._warn_job = WarnJob(event.signum, self._got(event.signum))
                self.emit(ev.Send(self._warn_job))
            self._warn(event.signum, self._got(event.signum), event.everybody)
        elif now >= self._warned_at + self.settings.same_signal_s:  # nobody else ends workers for a mere warning
            code, why = signal_exit_code(_SIGTERM), f"{self._got(event.signum)} a second time"
            self.emit(ev.Send(EndJob(code, why)))
            self._leave(ev.Exit(code, why), _SIGTERM, self.settings.term_timeout_s, now)

    def on_warn(self, event: Warn, now: float) -> None:
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
        self.emit(ev.Send(Failed(self.plan.term, self.plan.cycle, (fault,))))
        if self.settings.policy is RestartPolicy.ANY_FAILED:
            self._stop(f"local rank {fault.local_rank} failed", now)
        else:
            self.emit(Say(f"{headline(fault)}; {len(self._alive)} workers of this node go on"))

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
        """Nothing runs here (any more)."""
        self.emit(ev.Send(Stopped(event.term, event.cycle, 0)))

    def on_tick_ladder(self, event: Tick, now: float) -> None:
        """SIGTERM was not enough: SIGKILL. SIGKILL was not enough: this node is of no use any more."""
        if self._term_at is not None and now >= self._term_at:
            self._term_at = None
            self.emit(ev.SignalWorkers(self._term_signum))
        elif self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._give_up_at = now + self.settings.kill_timeout_s
            self.emit(ev.SignalWorkers(_SIGKILL))
        elif self._give_up_at is not None and now >= self._give_up_at:
            who = ", ".join(str(r) for r in sorted(self._alive))
            if self._exit is None:
                why = f"local ranks {who} do not end after SIGKILL (uninterruptible sleep?)"
                self._exit = ev.Exit(ExitCode.NODE_REFUSED, why)
            self._gone()

    def _stop(self, why: str, now: float) -> None:
        assert self.plan is not None
        if not self._alive:
            self._stopped(now)
            return
        self.state = State.STOPPING
        self.emit(Say(f"cycle {self.plan.cycle}: stopping {len(self._alive)} workers: {why}"))
        self._start_ladder(_SIGTERM, self.settings.stop_timeout_s, now)

    def _start_ladder(self, signum: int, grace_s: float, now: float) -> None:
        self._kill_at = now + grace_s
        self._give_up_at = None
        self.emit(ev.SignalWorkers(signum))

    def _stopped(self, now: float) -> None:
        assert self.plan is not None
        self.state = State.IDLE
        self._kill_at = self._give_up_at = None
        self._hung = {}
        if self._connect_by is not None:
            self._connect_by = now + self.settings.reconnect_timeout_s
        self.emit(ev.Send(Stopped(self.plan.term, self.plan.cycle, 0)))
        if self._next_plan is not None:
            self._take(self._next_plan, now)

    # --- the end -------------------------------------------------------------------------------------------------

    def on_finish(self, event: Finish | Refused, now: float) -> None:
        """The coordinator says how this ends; where some agent was told by a signal, workers get that signal."""
        signum = event.signum if isinstance(event, Finish) else 0
        s = self.settings
        grace_s = s.term_timeout_s if signum else s.stop_timeout_s
        wait_s = s.same_signal_s if signum and s.in_step else 0.0
        self._leave(ev.Exit(event.code, event.reason), signum or _SIGTERM, grace_s, now, wait_s)

    def on_finish_leaving(self, event: Finish, now: float) -> None:
        """We are on our way out already, but the job ends for one reason, with one code, on all nodes."""
        self._exit = ev.Exit(event.code, event.reason)

    def on_signalled(self, event: ev.Signalled, now: float) -> None:
        """Slurm (scancel, time limit, preemption) or a person ends the job: all nodes end, with 128+n."""
        self._signalled_at = now
        code, why = signal_exit_code(event.signum), self._got(event.signum)
        self.emit(ev.Send(EndJob(code, why, event.signum)))
        wait_s = None if event.everybody else 0.0
        self._leave(ev.Exit(code, why), event.signum, self.settings.term_timeout_s, now, wait_s)

    def _got(self, signum: int) -> str:
        return f"node {self.node.infra_rank} ({self.node.host}) got signal {signum}"

    def on_signalled_again(self, event: ev.Signalled, now: float) -> None:
        """Slurm tells an end several times over (job, step, front) and may do so after the coordinator has: that is one
        wish. Whoever signals again later does not want to wait."""
        if event.everybody:
            self._term_at = None
        if self._signalled_at is None:
            self._signalled_at = now
        elif self._kill_at is not None and now >= self._signalled_at + self.settings.same_signal_s:
            self._kill_at = now

    def _leave(self, end: ev.Exit, signum: int, grace_s: float, now: float, wait_s: float | None = 0.0) -> None:
        """Stop for good. The workers get `signum` once: after `wait_s`, or (None) from somebody else."""
        stopping = self.state is State.STOPPING
        self._exit = end
        self.state = State.LEAVING
        if not self._alive:
            self._gone()
        elif stopping:  # they have had their signal: never a second one, only a shorter wait
            self._kill_at = earliest(self._kill_at, now + grace_s) if self._kill_at is not None else None
        elif wait_s == 0.0:
            self._start_ladder(signum, grace_s, now)
        else:
            self._term_at = now + wait_s if wait_s is not None else None
            self._term_signum = signum
            self._kill_at = now + max(grace_s, (wait_s or 0.0) + 1.0)
            self.emit(ev.PassOn(_SIGCONT))  # a stopped worker acts on nothing

    def _gone(self) -> None:
        assert self._exit is not None
        self.state = State.GONE
        self._term_at = self._kill_at = self._give_up_at = None
        self.emit(self._exit)
