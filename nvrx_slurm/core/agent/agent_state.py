"""What an agent knows, how it looks at hung workers, stops them, and ends. The table is in `core.agent.agent`."""

from __future__ import annotations

from enum import Enum

from nvrx_slurm.core.agent import events as ev
from nvrx_slurm.core.machine import Machine, Say, Tick, earliest
from nvrx_slurm.errors import ExitCode, signal_exit_code
from nvrx_slurm.types import (
    Activity,
    AgentMessage,
    Asked,
    Collect,
    EndJob,
    EndKnown,
    Evidence,
    Finish,
    Hung,
    Leave,
    Node,
    NodeUnfit,
    Plan,
    RankFault,
    Ready,
    Refused,
    Register,
    WarnJob,
)

SIGTERM, SIGKILL, SIGCONT = 15, 9, 18
BY_SLURM = "cancelled, preempted or out of time (SIGTERM from Slurm)"


class State(Enum):
    """States of the agent."""

    PREPARING = "no workers; the preflight runs, or has found the node unfit"
    IDLE = "no workers; the preflight has passed; waiting for a plan"
    RUNNING = "workers run"
    SUCCEEDED = "all workers of this node ended well; waiting for the others"
    STOPPING = "workers are being stopped for the next cycle"
    LEAVING = "workers are being stopped for good"
    ENDED = "no workers; the end of the job is known here, and perhaps not yet everywhere"
    GONE = "done"


class AgentState(Machine):
    """The base of the agent's core."""

    def __init__(self, node: Node, settings: ev.AgentSettings, now: float) -> None:
        super().__init__(State.PREPARING, now)
        self.node = node
        self.settings = settings
        self.plan: Plan | None = None  # the last one that was taken
        self.term = 0
        self._next_plan: Plan | None = None  # waits until the workers of the old cycle are gone
        self._alive: set[int] = set()  # local ranks
        self._exit: ev.Exit | None = None
        self._end: Finish | None = None  # of the job, as a coordinator has told it
        self._connect_by: float | None = now + settings.join_timeout_s
        self._orphan_by: float | None = None
        self._ladder: list[tuple[float, int]] = []  # when the workers get which signal; 0: they are given up
        self._offer: Ready | None = None  # sent when the preflight has passed; None: for the first time
        self._unfit = ""  # why this node must not run anything more
        self._hung: dict[int, tuple[float, RankFault]] = {}  # local rank -> until when its monitor may take to kill it
        self._faults: list[RankFault] = []  # of the last plan
        self._early = False  # a worker of the last plan ended because it was warned
        self._request: Asked | NodeUnfit | None = None  # that changes something: told on every stream
        self._continues = 0  # requests to continue in this cycle
        self._warned = False
        self._warned_at: float | None = None  # when this very agent got the signal
        self._warn_job: WarnJob | None = None  # told again on every stream
        self._signalled_at: float | None = None
        self._met = False  # has ever had a coordinator
        self._connected = False

    def send(self, message: AgentMessage) -> None:
        """Send to the coordinator. Without a stream nothing is sent: the next Register tells the same."""
        if self._connected:
            self.emit(ev.Send(message))

    def deadline(self) -> float | None:
        """When the next Tick is due (monotonic seconds), or None."""
        if self.state is State.RUNNING:
            return earliest(self._orphan_by, *(by for by, _ in self._hung.values()))
        if self.state in (State.STOPPING, State.LEAVING, State.ENDED):
            return self._ladder[0][0] if self._ladder else None
        return self._connect_by

    # --- hangs -------------------------------------------------------------------------------------------------

    def on_hang(self, event: ev.HangSeen, now: float) -> None:
        """Tell the coordinator, so that all ranks are looked at. The monitor ends the rank after that, or at the stop;
        if that does not work within the kill timeout, go on without waiting."""
        fault, plan = event.fault, self.plan
        if fault.local_rank not in self._alive or plan is None:
            return  # late word: it has ended
        self.emit(Say(f"local rank {fault.local_rank} hangs: its monitor ends it"))
        if self.settings.hang_collect_s:
            self.send(Hung(plan.term, plan.cycle, fault))
        self._hung[fault.local_rank] = now + 2 * self.settings.hang_collect_s + self.settings.kill_timeout_s, fault

    def on_collect(self, event: Collect, now: float) -> None:
        """The monitors answer, not the ranks."""
        if self.plan is not None and event.cycle == self.plan.cycle:
            self.emit(ev.InspectRanks(event.cycle, self.settings.hang_collect_s))

    def on_collect_empty(self, event: Collect, now: float) -> None:
        """Its ranks have ended well, or it has not begun."""
        self.send(Evidence(event.term, event.cycle, ()))

    def on_inspected(self, event: ev.Inspected, now: float) -> None:
        """For the coordinator to compare."""
        if self.plan is not None and event.cycle == self.plan.cycle:
            self.send(Evidence(self.plan.term, event.cycle, event.ranks))

    # --- the stop ladder ------------------------------------------------------------------------------------------

    def _start_ladder(self, signum: int, grace_s: float, now: float, idle_s: float = 0.0) -> None:
        self._ladder = [(now + grace_s, SIGKILL)]
        self.emit(ev.SignalWorkers(signum, idle_s))

    def on_idle(self, event: ev.Idle, now: float) -> None:
        """Their handlers of SIGTERM do not begin, because the main threads wait in C for ranks that are gone."""
        if self._before_kill():
            self.emit(Say(f"workers do nothing {self.settings.idle_s:g} s after SIGTERM: they are killed"))
            self._ladder = [(now, SIGKILL)]

    def on_tick_ladder(self, event: Tick, now: float) -> State | None:
        """SIGTERM was not enough: SIGKILL. SIGKILL was not enough: this node is of no use any more."""
        if not self._ladder or now < self._ladder[0][0]:
            return None
        _, signum = self._ladder.pop(0)
        if signum == SIGKILL:
            self._ladder = [(now + self.settings.kill_timeout_s, 0)]
        if signum:
            self.emit(ev.SignalWorkers(signum))
            return None
        left = ", ".join(str(r) for r in sorted(self._alive))
        if self._exit is None:
            why = f"local ranks {left} do not end after SIGKILL (uninterruptible sleep?)"
            self._exit = ev.Exit(ExitCode.NODE_REFUSED, why)
        return self._gone(now)

    # --- the end -------------------------------------------------------------------------------------------------

    def on_finish(self, event: Finish | Refused, now: float) -> State:
        """The coordinator says how this ends; where some agent was told by a signal, workers get that signal."""
        signum = event.signum if isinstance(event, Finish) else 0
        self._end = event if isinstance(event, Finish) else None
        s = self.settings
        grace_s = s.term_timeout_s if signum else s.stop_timeout_s
        wait_s = s.same_signal_s if signum and s.in_step else 0.0
        return self._leave(ev.Exit(event.code, event.reason), signum or SIGTERM, grace_s, now, wait_s)

    def on_finish_leaving(self, event: Finish, now: float) -> None:
        """The agent leaves already, but the job ends for one reason, with one code, on all nodes."""
        self._exit = ev.Exit(event.code, event.reason)
        self._end = event

    def on_connected_again(self, event: ev.Connected, now: float) -> None:
        """A new coordinator may not know the end of the job."""
        self._connected = True
        if self._end is not None:
            self.send(Register(self.node, 0, self.plan, Activity.ENDED, end=self._end))
            if self.state is State.ENDED:
                self.send(EndKnown())

    def on_disconnected_again(self, event: ev.Disconnected, now: float) -> None:
        """No coordinator is needed any more, unless others do not know the end."""
        self._connected = False

    def on_finish_ended(self, event: Finish, now: float) -> None:
        """Say once more that this node is ready to leave."""
        self.send(EndKnown())

    def on_leave(self, event: Leave | Tick, now: float) -> State:
        """All agents know the end, or it is too late to tell those that do not."""
        self._end = None
        return self._gone(now)

    def on_signalled(self, event: ev.Signalled, now: float) -> State:
        """Slurm (scancel, time limit, preemption) or a person ends the job: all nodes end, with 128+n."""
        self._signalled_at = now
        code, why = signal_exit_code(event.signum), self._got(event.signum)
        if event.everybody and event.signum == SIGTERM:
            why = BY_SLURM
        self.send(EndJob(code, why, event.signum))
        wait_s = None if event.everybody else 0.0
        return self._leave(ev.Exit(code, why), event.signum, self.settings.term_timeout_s, now, wait_s)

    def _got(self, signum: int) -> str:
        return f"node {self.node.infra_rank} ({self.node.host}) got signal {signum}"

    def on_signalled_again(self, event: ev.Signalled, now: float) -> None:
        """Slurm may signal an end several times (job, step, srun), also after the coordinator has told it: that is one
        request. A signal that comes later than `same_signal_s` asks for SIGKILL at once."""
        if event.everybody:
            self._ladder = [(at, signum) for at, signum in self._ladder if signum in (SIGKILL, 0)]
        if self._signalled_at is None:
            self._signalled_at = now
        elif self._before_kill() and now >= self._signalled_at + self.settings.same_signal_s:
            self._ladder = [(now, SIGKILL)]

    def _before_kill(self) -> bool:
        return any(signum == SIGKILL for _, signum in self._ladder)

    def _leave(self, end: ev.Exit, signum: int, grace_s: float, now: float, wait_s: float | None = 0.0) -> State:
        """Stop for good. The workers get `signum` once: after `wait_s`, or (None) from somebody else."""
        self._exit = end
        if not self._alive:
            return self._gone(now)
        if self.state is State.STOPPING:  # they have had their signal: never a second one, only a shorter wait
            if self._before_kill():
                self._ladder = [(min(self._ladder[-1][0], now + grace_s), SIGKILL)]
        elif wait_s == 0.0:
            self._start_ladder(signum, grace_s, now)
        else:
            term = [(now + wait_s, signum)] if wait_s is not None else []
            self._ladder = [*term, (now + max(grace_s, (wait_s or 0.0) + 1.0), SIGKILL)]
            self.emit(ev.PassOn(SIGCONT))  # a stopped worker acts on nothing
        return State.LEAVING

    def _gone(self, now: float) -> State:
        assert self._exit is not None
        if self._end is not None and self.settings.elects:
            self._ladder = [(now + self.settings.end_timeout_s, 0)]
            self.send(EndKnown())
            return State.ENDED
        self._ladder = []
        self.emit(self._exit)
        return State.GONE
