"""How an agent ends: its workers are stopped for good, and it stays until all agents know the end of the job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ev
from nvrx_slurm.core.machine import Say, Tick, earliest, rows
from nvrx_slurm.errors import ExitCode, signal_exit_code

if TYPE_CHECKING:
    from nvrx_slurm.core.agent.agent import Agent

SIGTERM = 15
SIGKILL = 9
SIGCONT = 18
_SIGINT = 2
BY_SLURM = "cancelled, preempted or out of time (SIGTERM from Slurm)"


class AgentState(Enum):
    """States of the agent."""

    PREPARING = "no workers; the preflight runs, or has found the node unfit"
    IDLE = "no workers; the preflight has passed; waiting for a plan"
    RUNNING = "workers run"
    SUCCEEDED = "all workers of this node ended well; waiting for the others"
    STOPPING = "workers are being stopped for the next cycle"
    LEAVING = "workers are being stopped for good"
    ENDED = "no workers; the end of the job is known here, and perhaps not yet everywhere"
    GONE = "done"


EMPTY = (AgentState.PREPARING, AgentState.IDLE, AgentState.SUCCEEDED)  # without workers
BUSY = (AgentState.RUNNING, AgentState.STOPPING)
STAYS = (*EMPTY, *BUSY)
_LEAVES = (AgentState.LEAVING, AgentState.ENDED)
_LATE = (
    ev.HangSeen,
    ev.Inspected,
    ev.RankAsked,
    ev.Warned,
    ev.Sick,
    t.Plan,
    t.Counted,
    t.Stop,
    t.CheckNode,
    t.Collect,
    t.Examine,
    t.RanksGone,
    t.Warn,
    t.Lead,
    ev.LeaseOver,
)


@dataclass
class StopLadder:
    """What is left to do until the workers have ended, in this order. Monotonic seconds; None: nothing."""

    signal_at: float | None = None  # only where the first signal has to wait
    signum: int = SIGTERM
    kill_at: float | None = None
    give_up_at: float | None = None
    # If the first signal was delayed: kill workers that stay idle this long after it.
    idle_s: float = 0.0

    def deadline(self) -> float | None:
        """When the next step is due."""
        return earliest(self.signal_at, self.kill_at, self.give_up_at)

    def step(self, now: float, kill_timeout_s: float) -> int | None:
        """The signal that is due."""
        if self.signal_at is not None and now >= self.signal_at:
            self.signal_at = None
            return self.signum
        if self.kill_at is not None and now >= self.kill_at:
            self.kill_at = None
            self.give_up_at = now + kill_timeout_s
            return SIGKILL
        return None


class Leaving:
    """Owns the states after the end is known, and how they are reached."""

    table = rows(
        (EMPTY, t.Finish, "on_finish", (AgentState.ENDED, AgentState.GONE), "the end"),
        (EMPTY, t.Refused, "on_finish", (AgentState.GONE,), "this agent is not taken"),
        (BUSY, (t.Finish, t.Refused), "on_finish", (AgentState.LEAVING,), "the end"),
        (EMPTY, ev.Signalled, "on_signalled", (AgentState.GONE,), "end the job"),
        (BUSY, ev.Signalled, "on_signalled", (AgentState.LEAVING,), "end the job"),
        (AgentState.LEAVING, t.Finish, "on_finish_leaving", (), "the same end for all"),
        (AgentState.LEAVING, ev.Signalled, "on_signalled_again", (), "a second signal: kill now"),
        (
            AgentState.LEAVING,
            Tick,
            "on_tick",
            (AgentState.ENDED, AgentState.GONE),
            "next step of the stop ladder",
        ),
        (AgentState.STOPPING, Tick, "on_tick", (AgentState.GONE,), "next step of the stop ladder"),
        (
            (AgentState.STOPPING, AgentState.LEAVING),
            ev.Idle,
            "on_idle",
            (),
            "kill them: waiting is of no use",
        ),
        (AgentState.LEAVING, (*_LATE, t.Refused, t.Leave), "ignore", (), "leaving anyway"),
        (_LEAVES, ev.Connected, "on_connected", (), "tell the end to a new coordinator"),
        (_LEAVES, ev.Disconnected, "on_disconnected", (), "leaving anyway"),
        (
            AgentState.ENDED,
            (t.Leave, Tick, t.Refused),
            "on_leave",
            (AgentState.GONE,),
            "all agents know the end",
        ),
        (
            AgentState.ENDED,
            t.Finish,
            "on_finish_ended",
            (),
            "a new coordinator tells the end again",
        ),
        (
            AgentState.ENDED,
            (*_LATE, ev.WorkerExited, ev.Signalled, ev.Prepared),
            "ignore",
            (),
            "nothing runs",
        ),
        (STAYS, t.Leave, "ignore", (), "of an end that this agent has not heard"),
    )

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._s = agent.settings
        self.ladder = StopLadder()
        self.exit: ev.Exit | None = None
        self.leave_by: float | None = None  # in ENDED
        self._end: t.Finish | None = None  # of the job, as a coordinator has told it
        self._signalled_at: float | None = None

    @property
    def is_signalled(self) -> bool:
        """Whether this agent was told to end by a signal: ranks have it, too, and what they say then is no cause."""
        return self._signalled_at is not None

    # --- the end is told ----------------------------------------------------------------------------------------

    def on_finish(self, event: t.Finish | t.Refused, now: float) -> AgentState:
        """The coordinator says how this ends. Where an agent was told by a signal, all workers get that signal."""
        signum = event.signum if isinstance(event, t.Finish) else 0
        self._end = event if isinstance(event, t.Finish) else None
        grace_s = self._s.term_timeout_s if signum else self._s.stop_timeout_s
        wait_s = self._s.same_signal_s if signum and self._s.in_step else 0.0
        return self.leave(
            ev.Exit(event.code, event.reason), signum or SIGTERM, grace_s, now, wait_s
        )

    def on_finish_leaving(self, event: t.Finish, now: float) -> None:
        """The agent leaves already, but the job ends for one reason, with one code, on all nodes: the first that was
        told. A coordinator that knows nothing of it may tell another one."""
        if self._end is None:
            self.exit = ev.Exit(event.code, event.reason)
            self._end = event

    def on_signalled(self, event: ev.Signalled, now: float) -> AgentState:
        """Slurm (scancel, time limit, preemption) or a person ends the job: all nodes end, with 128+n."""
        signum = event.signum
        self._signalled_at = now
        code = signal_exit_code(signum)
        why = self._agent.got(signum)
        if event.everybody and signum == SIGTERM:
            why = BY_SLURM
        self._agent.send(t.EndJob(code, why, signum))
        grace_s = self._s.term_timeout_s
        return self.leave(ev.Exit(code, why), signum, grace_s, now, signalled=event.everybody)

    def on_signalled_again(self, event: ev.Signalled, now: float) -> None:
        """Slurm may signal an end several times (job, step, srun), also after the coordinator has told it: that is one
        request. A signal that comes later than `same_signal_s` asks for SIGKILL at once, and so does a second SIGINT,
        which comes from a person only."""
        if event.everybody:
            self.ladder.signal_at = None
        if self._signalled_at is None:
            self._signalled_at = now
            return
        is_another = now >= self._signalled_at + self._s.same_signal_s
        kills = is_another or event.signum == _SIGINT
        if kills and self.ladder.kill_at is not None:
            self.ladder = StopLadder(kill_at=now)

    # --- the workers are stopped --------------------------------------------------------------------------------

    def stop(
        self, signum: int, grace_s: float, now: float, idle_s: float = 0.0, wait_s: float = 0.0
    ) -> None:
        """Signal the workers after `wait_s` seconds; those that are alive `grace_s` seconds later are killed."""
        if wait_s:
            self.ladder = StopLadder(now + wait_s, signum, now + wait_s + grace_s, idle_s=idle_s)
            return
        self.ladder = StopLadder(kill_at=now + grace_s)
        self._agent.emit(ev.SignalWorkers(signum, idle_s))

    def kill(self, now: float) -> None:
        """SIGKILL to the workers, unless they have got it."""
        if self.ladder.give_up_at is None:
            self.ladder = StopLadder(give_up_at=now + self._s.kill_timeout_s)
            self._agent.emit(ev.SignalWorkers(SIGKILL))

    def stopped(self) -> None:
        """No worker is left."""
        self.ladder = StopLadder()

    def on_idle(self, event: ev.Idle, now: float) -> None:
        """Their handlers of SIGTERM do not begin, because the main threads wait in C for ranks that are gone."""
        if self.ladder.kill_at is not None:
            why = f"workers do nothing {self._s.idle_s:g} s after SIGTERM"
            self._agent.emit(Say(f"{why}: they are killed"))
            self.ladder = StopLadder(kill_at=now)

    def on_tick(self, event: Tick, now: float) -> AgentState | None:
        """SIGTERM was not enough: SIGKILL. SIGKILL was not enough: this node is of no use any more."""
        signum = self.ladder.step(now, self._s.kill_timeout_s)
        give_up_at = self.ladder.give_up_at
        if signum is not None:
            idle_s = 0.0 if signum == SIGKILL else self.ladder.idle_s
            self._agent.emit(ev.SignalWorkers(signum, idle_s))
            return None
        if give_up_at is None or now < give_up_at:
            return None
        left = ", ".join(str(rank) for rank in sorted(self._agent.alive))
        why = f"local ranks {left} do not end after SIGKILL (uninterruptible sleep?)"
        self.exit = self.exit or ev.Exit(ExitCode.NODE_REFUSED, why)
        return self.gone(now)

    def leave(
        self,
        end: ev.Exit,
        signum: int,
        grace_s: float,
        now: float,
        wait_s: float = 0.0,
        signalled: bool = False,
    ) -> AgentState:
        """Stop for good. The workers get `signum` once: after `wait_s`, or (`signalled`) from somebody else."""
        self.exit = end
        if not self._agent.alive:
            return self.gone(now)
        # or they are to end by themselves for a moment
        told = self.ladder.signal_at is None or not signalled
        if told and self._agent.state is AgentState.STOPPING:  # only the wait gets shorter
            kill_at = self.ladder.kill_at
            if kill_at is not None:
                self.ladder.kill_at = min(kill_at, now + grace_s)
        elif signalled or wait_s:
            kill_at = now + max(grace_s, wait_s + 1.0)
            self.ladder = StopLadder(None if signalled else now + wait_s, signum, kill_at)
            self._agent.emit(ev.PassOn(SIGCONT))  # a stopped worker acts on nothing
        else:
            self.stop(signum, grace_s, now)
        return AgentState.LEAVING

    def gone(self, now: float) -> AgentState:
        """No worker is left, or none is waited for."""
        assert self.exit is not None
        self.stopped()
        if self._end is not None and self._s.elects:
            self.leave_by = now + self._s.end_timeout_s
            self._agent.send(t.EndKnown())
            return AgentState.ENDED
        self._agent.emit(self.exit)
        return AgentState.GONE

    # --- until all know the end ---------------------------------------------------------------------------------

    def on_connected(self, event: ev.Connected, now: float) -> None:
        """A new coordinator may not know the end of the job."""
        agent = self._agent
        agent.connects(True)
        if self._end is not None:
            agent.send(t.Register(agent.node, 0, agent.plan, t.Activity.ENDED, end=self._end))
            if agent.state is AgentState.ENDED:
                agent.send(t.EndKnown())

    def on_disconnected(self, event: ev.Disconnected, now: float) -> None:
        """No coordinator is needed any more, unless others do not know the end."""
        self._agent.connects(False)

    def on_finish_ended(self, event: t.Finish, now: float) -> None:
        """Say once more that this node is ready to leave."""
        self._agent.send(t.EndKnown())

    def on_leave(self, event: t.Leave | Tick | t.Refused, now: float) -> AgentState:
        """All agents know the end, or it is too late to tell those that do not."""
        self._end = None
        return self.gone(now)
