"""What an agent knows, what it passes on, how it stops workers, and how it ends. The table is in `core.job.agent`."""

from __future__ import annotations

from enum import Enum

from nvrx_slurm.core.job import agent_events as ev
from nvrx_slurm.core.machine import Machine, Say, Tick, earliest
from nvrx_slurm.errors import ExitCode, signal_exit_code
from nvrx_slurm.types import (
    AgentMessage,
    Asked,
    EndJob,
    Finish,
    Node,
    Plan,
    RankFault,
    RanksGone,
    Refused,
    Stopped,
    Warn,
    WarnJob,
    WorkloadAction,
)

SIGTERM, SIGKILL, SIGCONT = 15, 9, 18
_MAX_CONTINUES = 100  # per cycle
BY_SLURM = "cancelled, preempted or out of time (SIGTERM from Slurm)"


class State(Enum):
    """States of the agent."""

    PREPARING = "no workers; the preflight runs, or has found the node unfit"
    IDLE = "no workers; the preflight has passed; waiting for a plan"
    RUNNING = "workers run"
    SUCCEEDED = "all workers of this node ended well; waiting for the others"
    STOPPING = "workers are being stopped for the next cycle"
    LEAVING = "workers are being stopped for good"
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
        self._connect_by: float | None = now + settings.join_timeout_s
        self._orphan_by: float | None = None
        self._term_at: float | None = None
        self._term_signum = SIGTERM
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._offer: Stopped | None = None  # sent when the preflight has passed; None: for the first time
        self._unfit = ""  # why this node must not run anything more
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
        self._connected = False

    def send(self, message: AgentMessage) -> None:
        """Send to the coordinator. Without a stream nothing is sent: the next Register tells the same."""
        if self._connected:
            self.emit(ev.Send(message))

    def deadline(self) -> float | None:
        """When the next Tick is due (monotonic seconds), or None."""
        if self.state is State.RUNNING:
            return earliest(self._orphan_by, *(by for by, _ in self._hung.values()))
        if self.state in (State.STOPPING, State.LEAVING):
            return earliest(self._term_at, self._kill_at, self._give_up_at)
        return self._connect_by

    # --- without a coordinator ------------------------------------------------------------------------------------

    def on_disconnected(self, event: ev.Disconnected, now: float) -> None:
        """The shell keeps looking for a coordinator; we bound how long that is any use."""
        self._connected = False
        self.emit(Say(f"no coordinator: {event.why}"))
        self._connect_by = now + self.settings.reconnect_timeout_s
        self._orphan_by = now + self.settings.orphan_grace_s

    def on_tick_alone(self, event: Tick, now: float) -> None:
        """Without workers and without a coordinator there is nothing left to do."""
        s = self.settings
        within = f"{s.reconnect_timeout_s:g} s" if self._met else f"{s.join_timeout_s:g} s (join timeout)"
        why = f"no coordinator could be reached within {within}"
        self._leave(ev.Exit(ExitCode.COORDINATOR_LOST, why), SIGTERM, 0.0, now)

    # --- requests and warnings -----------------------------------------------------------------------------------

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
        self.send(request)

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
                self.send(self._warn_job)
            self._warn(event.signum, self._got(event.signum), event.everybody)
        elif now >= self._warned_at + self.settings.same_signal_s:  # nobody else ends workers for a mere warning
            code, why = signal_exit_code(SIGTERM), f"{self._got(event.signum)} a second time"
            self.send(EndJob(code, why))
            self._leave(ev.Exit(code, why), SIGTERM, self.settings.term_timeout_s, now)

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

    # --- the stop ladder ------------------------------------------------------------------------------------------

    def _start_ladder(self, signum: int, grace_s: float, now: float) -> None:
        self._kill_at = now + grace_s
        self._give_up_at = None
        self.emit(ev.SignalWorkers(signum))

    def on_tick_ladder(self, event: Tick, now: float) -> None:
        """SIGTERM was not enough: SIGKILL. SIGKILL was not enough: this node is of no use any more."""
        if self._term_at is not None and now >= self._term_at:
            self._term_at = None
            self.emit(ev.SignalWorkers(self._term_signum))
        elif self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._give_up_at = now + self.settings.kill_timeout_s
            self.emit(ev.SignalWorkers(SIGKILL))
        elif self._give_up_at is not None and now >= self._give_up_at:
            who = ", ".join(str(r) for r in sorted(self._alive))
            if self._exit is None:
                why = f"local ranks {who} do not end after SIGKILL (uninterruptible sleep?)"
                self._exit = ev.Exit(ExitCode.NODE_REFUSED, why)
            self._gone()

    # --- the end -------------------------------------------------------------------------------------------------

    def on_finish(self, event: Finish | Refused, now: float) -> None:
        """The coordinator says how this ends; where some agent was told by a signal, workers get that signal."""
        signum = event.signum if isinstance(event, Finish) else 0
        s = self.settings
        grace_s = s.term_timeout_s if signum else s.stop_timeout_s
        wait_s = s.same_signal_s if signum and s.in_step else 0.0
        self._leave(ev.Exit(event.code, event.reason), signum or SIGTERM, grace_s, now, wait_s)

    def on_finish_leaving(self, event: Finish, now: float) -> None:
        """We are on our way out already, but the job ends for one reason, with one code, on all nodes."""
        self._exit = ev.Exit(event.code, event.reason)

    def on_signalled(self, event: ev.Signalled, now: float) -> None:
        """Slurm (scancel, time limit, preemption) or a person ends the job: all nodes end, with 128+n."""
        self._signalled_at = now
        code, why = signal_exit_code(event.signum), self._got(event.signum)
        if event.everybody and event.signum == SIGTERM:
            why = BY_SLURM
        self.send(EndJob(code, why, event.signum))
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
            self.emit(ev.PassOn(SIGCONT))  # a stopped worker acts on nothing

    def _gone(self) -> None:
        assert self._exit is not None
        self.state = State.GONE
        self._term_at = self._kill_at = self._give_up_at = None
        self.emit(self._exit)
