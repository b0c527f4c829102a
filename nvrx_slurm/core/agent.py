"""The agent of one node: runs what plans say, reports, stops, leaves. Pure; see `core.machine`.

IDLE -> RUNNING -> SUCCEEDED -> GONE
          |  ^
          v  |
        STOPPING     (from anywhere, on signals and at the end: LEAVING -> GONE)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from nvrx_slurm.core.inherited import STOPPING
from nvrx_slurm.core.machine import Machine, Row, Say, Tick, earliest
from nvrx_slurm.core.restarts import headline
from nvrx_slurm.errors import ExitCode, signal_exit_code
from nvrx_slurm.types import (
    AgentMessage,
    EndJob,
    Failed,
    Finish,
    Node,
    Plan,
    RankFault,
    Refused,
    Register,
    Running,
    Stop,
    Stopped,
    Succeeded,
)


class State(Enum):
    """States of the agent."""

    IDLE = "no workers; waiting for a plan"
    RUNNING = "workers run"
    SUCCEEDED = "all workers of this node ended well; waiting for the others"
    STOPPING = "workers are being stopped for the next cycle"
    LEAVING = "workers are being stopped for good"
    GONE = "done"


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What the agent is told once. All times in seconds."""

    stop_timeout_s: float = 15.0  # SIGTERM -> SIGKILL when workers are stopped for a restart or at the end
    term_timeout_s: float = 25.0  # the same when a signal ends the job; below Slurm's KillWait
    kill_timeout_s: float = 10.0  # SIGKILL -> giving up on a worker that does not end (D state)
    same_signal_s: float = 3.0  # signals this close together are one wish to end, not an impatient second one
    in_step: bool = False  # Slurm signals the workers itself, at about the time the coordinator tells us
    orphan_grace_s: float = 2.0  # how long workers go on without a coordinator
    join_timeout_s: float = 300.0  # how long to look for a coordinator at the start
    reconnect_timeout_s: float = 30.0  # the same after having lost one


# --- events besides the coordinator's messages (Plan, Stop, Finish, Refused) --------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """A stream to a coordinator is open and both sides have proved who they are."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The stream broke, or went silent."""

    why: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A worker is gone; `fault` is None when it ended with 0."""

    local_rank: int
    fault: RankFault | None


@dataclass(frozen=True, slots=True)
class HangSeen:
    """A rank monitor found its rank hung and is killing it."""

    fault: RankFault


@dataclass(frozen=True, slots=True)
class Signalled:
    """This agent got a signal that ends the job (TERM, INT, HUP, QUIT)."""

    signum: int
    everybody: bool = False  # Slurm sends it to every process of the step, so the workers have had it, too


@dataclass(frozen=True, slots=True)
class Warned:
    """This agent got a signal that is only passed on to the workers (USR1, USR2)."""

    signum: int


# --- commands -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the coordinator. The shell fills in `port` where a message has one."""

    message: AgentMessage


@dataclass(frozen=True, slots=True)
class StartWorkers:
    """Start all workers of this node for `plan`."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class SignalWorkers:
    """SIGCONT and then `signum` to the process groups of all workers that are alive."""

    signum: int


@dataclass(frozen=True, slots=True)
class PassOn:
    """Only `signum` to the process groups of all workers that are alive."""

    signum: int


@dataclass(frozen=True, slots=True)
class Exit:
    """The agent's program ends with `code`."""

    code: int
    reason: str


_SIGTERM, _SIGKILL, _SIGCONT = 15, 9, 18
_SIGNAL_BASE = signal_exit_code(0)
_STOP = (State.STOPPING, State.IDLE)
_END = (State.LEAVING, State.GONE)
_OUT = (State.GONE,)
_LEAVE = (State.LEAVING,)


class Agent(Machine):
    """The agent's core: `step(event, now)` -> commands; `deadline()` says when it wants a Tick."""

    # fmt: off
    table: ClassVar[Mapping[tuple[Enum, type], Row]] = {
        (State.IDLE, Connected): Row("on_connected", (State.IDLE,), "register"),
        (State.IDLE, Disconnected): Row("on_disconnected", (State.IDLE,), "look for the coordinator"),
        (State.IDLE, Plan): Row("on_plan_idle", (State.IDLE, State.RUNNING), "active: start; spare: wait"),
        (State.IDLE, Stop): Row("on_stop_idle", (State.IDLE,), "nothing runs: say so again"),
        (State.IDLE, Finish): Row("on_finish", _OUT, "the end"),
        (State.IDLE, Refused): Row("on_finish", _OUT, "not wanted"),
        (State.IDLE, HangSeen): Row("ignore", (State.IDLE,), "late word: it is gone"),
        (State.IDLE, Signalled): Row("on_signalled", _OUT, "end the job"),
        (State.IDLE, Warned): Row("ignore", (State.IDLE,), "no workers to warn"),
        (State.IDLE, Tick): Row("on_tick_alone", _OUT, "no coordinator in time"),
        (State.RUNNING, Connected): Row("on_connected", (State.RUNNING,), "register with what runs"),
        (State.RUNNING, Disconnected): Row("on_disconnected", (State.RUNNING,), "workers go on for a while"),
        (State.RUNNING, Plan): Row("on_plan_running", (State.RUNNING, State.STOPPING), "a new term, or a new cycle"),
        (State.RUNNING, Stop): Row("on_stop", (State.RUNNING, State.STOPPING), "stop them"),
        (State.RUNNING, Finish): Row("on_finish", _LEAVE, "the end"),
        (State.RUNNING, Refused): Row("on_finish", _LEAVE, "not wanted any more"),
        (State.RUNNING, WorkerExited): Row(
            "on_exit_running", (State.RUNNING, State.SUCCEEDED, *_STOP), "any-failed: one fault stops all"
        ),
        (State.RUNNING, HangSeen): Row("on_hang", (State.RUNNING,), "it should be dead in a moment"),
        (State.RUNNING, Signalled): Row("on_signalled", _LEAVE, "end the job"),
        (State.RUNNING, Warned): Row("on_warned", (State.RUNNING,), "pass it on"),
        (State.RUNNING, Tick): Row("on_tick_running", (State.RUNNING, State.STOPPING), "orphan, or a hung rank lives"),
        (State.SUCCEEDED, Connected): Row("on_connected", (State.SUCCEEDED,), "register with the success"),
        (State.SUCCEEDED, Disconnected): Row("on_disconnected", (State.SUCCEEDED,), "look for the coordinator"),
        (State.SUCCEEDED, Plan): Row("on_plan_succeeded", (State.SUCCEEDED, State.RUNNING, State.IDLE), "once more"),
        (State.SUCCEEDED, Stop): Row("on_stop_succeeded", (State.SUCCEEDED, State.IDLE), "others failed"),
        (State.SUCCEEDED, Finish): Row("on_finish", _OUT, "the end"),
        (State.SUCCEEDED, Refused): Row("on_finish", _OUT, "not wanted any more"),
        (State.SUCCEEDED, HangSeen): Row("ignore", (State.SUCCEEDED,), "it finished after all"),
        (State.SUCCEEDED, Signalled): Row("on_signalled", _OUT, "end the job"),
        (State.SUCCEEDED, Warned): Row("ignore", (State.SUCCEEDED,), "no workers to warn"),
        (State.SUCCEEDED, Tick): Row("on_tick_alone", _OUT, "no coordinator in time"),
        (State.STOPPING, Connected): Row("on_connected", (State.STOPPING,), "register with what still runs"),
        (State.STOPPING, Disconnected): Row("on_disconnected", (State.STOPPING,), "finish stopping first"),
        (State.STOPPING, Plan): Row("on_plan_stopping", (State.STOPPING,), "for when they are gone"),
        (State.STOPPING, Stop): Row("ignore", (State.STOPPING,), "doing it"),
        (State.STOPPING, Finish): Row("on_finish", _LEAVE, "the end"),
        (State.STOPPING, Refused): Row("on_finish", _LEAVE, "not wanted any more"),
        (State.STOPPING, WorkerExited): Row("on_exit_stopping", (*_STOP, State.RUNNING), "one fewer"),
        (State.STOPPING, HangSeen): Row("ignore", (State.STOPPING,), "it is being stopped anyway"),
        (State.STOPPING, Signalled): Row("on_signalled", _LEAVE, "end the job"),
        (State.STOPPING, Warned): Row("ignore", (State.STOPPING,), "they are being stopped"),
        (State.STOPPING, Tick): Row("on_tick_ladder", (State.STOPPING, State.GONE), "next rung of the stop ladder"),
        (State.LEAVING, Connected): Row("ignore", (State.LEAVING,), "too late"),
        (State.LEAVING, Disconnected): Row("ignore", (State.LEAVING,), "leaving anyway"),
        (State.LEAVING, Plan): Row("ignore", (State.LEAVING,), "too late"),
        (State.LEAVING, Stop): Row("ignore", (State.LEAVING,), "doing it"),
        (State.LEAVING, Finish): Row("on_finish_leaving", (State.LEAVING,), "the same end for all"),
        (State.LEAVING, Refused): Row("ignore", (State.LEAVING,), "leaving anyway"),
        (State.LEAVING, WorkerExited): Row("on_exit_leaving", _END, "one fewer"),
        (State.LEAVING, HangSeen): Row("ignore", (State.LEAVING,), "it is being stopped anyway"),
        (State.LEAVING, Signalled): Row("on_signalled_again", (State.LEAVING,), "a second signal: kill now"),
        (State.LEAVING, Warned): Row("ignore", (State.LEAVING,), "they are being stopped"),
        (State.LEAVING, Tick): Row("on_tick_ladder", _END, "next rung of the stop ladder"),
    }
    # fmt: on

    def __init__(self, node: Node, settings: AgentSettings, now: float) -> None:
        super().__init__(State.IDLE, now)
        self.node = node
        self.settings = settings
        self.plan: Plan | None = None  # the last one that was taken
        self.term = 0
        self._next_plan: Plan | None = None  # waits until the workers of the old cycle are gone
        self._alive: set[int] = set()  # local ranks
        self._exit: Exit | None = None
        self._connect_by: float | None = now + settings.join_timeout_s
        self._orphan_by: float | None = None
        self._term_at: float | None = None
        self._term_signum = _SIGTERM
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._hang_by: float | None = None
        self._hang: RankFault | None = None
        self._signalled_at: float | None = None
        self._met = False  # has ever had a coordinator

    def deadline(self) -> float | None:
        """When the next Tick is due (monotonic seconds), or None."""
        if self.state is State.RUNNING:
            return earliest(self._orphan_by, self._hang_by)
        if self.state in (State.STOPPING, State.LEAVING):
            return earliest(self._term_at, self._kill_at, self._give_up_at)
        return self._connect_by

    # --- the stream ---------------------------------------------------------------------------------------

    def on_connected(self, event: Connected, now: float) -> None:
        """Tell the coordinator who we are and what we run."""
        self._met = True
        self._connect_by = self._orphan_by = None
        plan = self.plan
        running = None
        if plan is not None and plan.active and self.state is not State.IDLE:
            done = self.state is State.SUCCEEDED
            needed = STOPPING if self.state is State.STOPPING else plan.active_nodes
            running = Running(plan.term, plan.cycle, plan.group_rank, needed, done)
        last_cycle, used = (plan.cycle, plan.restarts_used) if plan is not None else (-1, 0)
        self.emit(Send(Register(self.node, 0, running, last_cycle, used)))

    def on_disconnected(self, event: Disconnected, now: float) -> None:
        """The shell keeps looking for a coordinator; we bound how long that is any use."""
        self.emit(Say(f"no coordinator: {event.why}"))
        self._connect_by = now + self.settings.reconnect_timeout_s
        self._orphan_by = now + self.settings.orphan_grace_s

    def on_tick_alone(self, event: Tick, now: float) -> None:
        """Without workers and without a coordinator there is nothing left to do."""
        s = self.settings
        within = f"{s.reconnect_timeout_s:g} s" if self._met else f"{s.join_timeout_s:g} s (join timeout)"
        why = f"no coordinator could be reached within {within}"
        self._leave(Exit(ExitCode.COORDINATOR_LOST, why), _SIGTERM, 0.0, now)

    # --- plans ----------------------------------------------------------------------------------------------

    def on_plan_idle(self, event: Plan, now: float) -> None:
        """Start, or be a spare."""
        if not self._is_new(event):
            return
        self._take(event, now)

    def on_plan_succeeded(self, event: Plan, now: float) -> None:
        """The others failed and the cycle is run again, or a new coordinator took over."""
        if self._carries_on(event):
            self.plan, self.term = event, event.term
        elif self._is_new(event):
            self._take(event, now)

    def on_plan_running(self, event: Plan, now: float) -> None:
        """A new coordinator carries on with our cycle; or a later cycle, for which ours has to end first."""
        if self._carries_on(event):
            self.plan, self.term = event, event.term
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
        self._hang = self._hang_by = None
        self.state = State.RUNNING
        last = plan.rank_offset + self.node.nproc - 1
        self.emit(Say(f"cycle {plan.cycle}: group rank {plan.group_rank}, ranks {plan.rank_offset}..{last}"))
        self.emit(StartWorkers(plan))

    # --- workers ----------------------------------------------------------------------------------------------

    def on_exit_running(self, event: WorkerExited, now: float) -> None:
        """A success is counted; a fault is reported at once and stops the other workers."""
        self._alive.discard(event.local_rank)
        assert self.plan is not None
        if self._hang is not None and self._hang.local_rank == event.local_rank:
            self._hang = self._hang_by = None
        if event.fault is not None:
            self._fail(event.fault, now)
        elif not self._alive:
            self.state = State.SUCCEEDED
            self.emit(Say(f"cycle {self.plan.cycle}: all workers of this node finished"))
            self.emit(Send(Succeeded(self.plan.term, self.plan.cycle)))

    def on_hang(self, event: HangSeen, now: float) -> None:
        """The monitor kills the rank; if that does not work within the kill timeout, go on without waiting."""
        if event.fault.local_rank not in self._alive:
            return  # late word: it has ended
        self.emit(Say(headline(event.fault)))
        self._hang = event.fault
        self._hang_by = now + self.settings.kill_timeout_s

    def on_warned(self, event: Warned, now: float) -> None:
        """Slurm's warning (`--signal`) is the workers' business."""
        self.emit(Say(f"passing signal {event.signum} on to the workers"))
        self.emit(PassOn(event.signum))

    def on_tick_running(self, event: Tick, now: float) -> None:
        """A hung rank that cannot be killed, or no coordinator for too long."""
        if self._hang_by is not None and now >= self._hang_by and self._hang is not None:
            self._fail(self._hang, now)
        elif self._orphan_by is not None and now >= self._orphan_by:
            self._orphan_by = None
            self._stop(f"no coordinator for {self.settings.orphan_grace_s:g} s", now)

    def on_exit_stopping(self, event: WorkerExited, now: float) -> None:
        """When the last one is gone we are ready for the next cycle."""
        self._alive.discard(event.local_rank)
        if not self._alive:
            self._stopped(now)

    def on_exit_leaving(self, event: WorkerExited, now: float) -> None:
        """When the last one is gone we go, too."""
        self._alive.discard(event.local_rank)
        if not self._alive:
            self._gone()

    def _fail(self, fault: RankFault, now: float) -> None:
        assert self.plan is not None
        self.emit(Send(Failed(self.plan.term, self.plan.cycle, (fault,))))
        self._stop(f"local rank {fault.local_rank} failed", now)

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
        self.emit(Send(Stopped(event.term, event.cycle, 0)))

    def on_tick_ladder(self, event: Tick, now: float) -> None:
        """SIGTERM was not enough: SIGKILL. SIGKILL was not enough: this node is of no use any more."""
        if self._term_at is not None and now >= self._term_at:
            self._term_at = None
            self.emit(SignalWorkers(self._term_signum))
        elif self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._give_up_at = now + self.settings.kill_timeout_s
            self.emit(SignalWorkers(_SIGKILL))
        elif self._give_up_at is not None and now >= self._give_up_at:
            who = ", ".join(str(r) for r in sorted(self._alive))
            if self._exit is None:
                why = f"local ranks {who} do not end after SIGKILL (uninterruptible sleep?)"
                self._exit = Exit(ExitCode.NODE_REFUSED, why)
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
        self.emit(SignalWorkers(signum))

    def _stopped(self, now: float) -> None:
        assert self.plan is not None
        self.state = State.IDLE
        self._kill_at = self._give_up_at = self._hang_by = None
        if self._connect_by is not None:
            self._connect_by = now + self.settings.reconnect_timeout_s
        self.emit(Send(Stopped(self.plan.term, self.plan.cycle, 0)))
        if self._next_plan is not None:
            self._take(self._next_plan, now)

    # --- the end -------------------------------------------------------------------------------------------------

    def on_finish(self, event: Finish | Refused, now: float) -> None:
        """The coordinator says how this ends; for 128+n workers get the signal that some agent got."""
        by_signal = event.code > _SIGNAL_BASE
        signum = event.code - _SIGNAL_BASE if by_signal else _SIGTERM
        grace_s = self.settings.term_timeout_s if by_signal else self.settings.stop_timeout_s
        wait_s = self.settings.same_signal_s if by_signal and self.settings.in_step else 0.0
        self._leave(Exit(event.code, event.reason), signum, grace_s, now, wait_s)

    def on_finish_leaving(self, event: Finish, now: float) -> None:
        """We are on our way out already, but the job ends for one reason, with one code, on all nodes."""
        self._exit = Exit(event.code, event.reason)

    def on_signalled(self, event: Signalled, now: float) -> None:
        """Slurm (scancel, time limit, preemption) or a person ends the job: all nodes end, with 128+n."""
        self._signalled_at = now
        code = signal_exit_code(event.signum)
        why = f"node {self.node.infra_rank} ({self.node.host}) got signal {event.signum}"
        self.emit(Send(EndJob(code, why)))
        wait_s = None if event.everybody else 0.0
        self._leave(Exit(code, why), event.signum, self.settings.term_timeout_s, now, wait_s)

    def on_signalled_again(self, event: Signalled, now: float) -> None:
        """Slurm tells an end several times over (job, step, front) and may do so after the coordinator has: that is one
        wish. Whoever signals again later does not want to wait."""
        if event.everybody:
            self._term_at = None
        if self._signalled_at is None:
            self._signalled_at = now
        elif self._kill_at is not None and now >= self._signalled_at + self.settings.same_signal_s:
            self._kill_at = now

    def _leave(self, end: Exit, signum: int, grace_s: float, now: float, wait_s: float | None = 0.0) -> None:
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
            self._kill_at = now + grace_s
            self.emit(PassOn(_SIGCONT))  # a stopped worker acts on nothing

    def _gone(self) -> None:
        assert self._exit is not None
        self.state = State.GONE
        self._term_at = self._kill_at = self._give_up_at = None
        self.emit(self._exit)
