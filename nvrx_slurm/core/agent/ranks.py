"""What the ranks of a node, their monitors and user signals tell the agent, and what it tells the ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ev
from nvrx_slurm.core.agent.leaving import BUSY, EMPTY, SIGTERM, STAYS, AgentState, Leaving
from nvrx_slurm.core.machine import Say, rows
from nvrx_slurm.errors import signal_exit_code

if TYPE_CHECKING:
    from nvrx_slurm.core.agent.agent import Agent

_MAX_CONTINUES = 100  # per cycle


class Ranks:
    """Handles hangs, requests and warnings."""

    table = rows(
        (AgentState.RUNNING, ev.HangSeen, "on_hang", (), "it should be dead in a moment"),
        (
            (*EMPTY, AgentState.STOPPING),
            ev.HangSeen,
            "ignore",
            (),
            "the rank is gone, or is being stopped",
        ),
        (AgentState.RUNNING, t.Collect, "on_collect", (), "inspect the ranks"),
        (STAYS, ev.Inspected, "on_inspected", (), "pass it on"),
        (EMPTY, t.Collect, "on_collect_empty", (), "no rank is here"),
        (AgentState.STOPPING, t.Collect, "ignore", (), "too late"),
        (AgentState.RUNNING, t.Examine, "on_examine", (), "a rank of this node is slow"),
        (
            (*EMPTY, AgentState.STOPPING),
            t.Examine,
            "ignore",
            (),
            "no rank is left that could be slow",
        ),
        (STAYS, ev.RankAsked, "on_asked", (), "pass it on, also if the rank is gone"),
        (AgentState.RUNNING, t.RanksGone, "on_ranks_gone", (), "pass it on"),
        ((*EMPTY, AgentState.STOPPING), t.RanksGone, "ignore", (), "no wrappers to tell"),
        (
            EMPTY,
            ev.Warned,
            "on_warned",
            (AgentState.GONE,),
            "for the ranks that will run; the second ends it",
        ),
        (BUSY, ev.Warned, "on_warned", (AgentState.LEAVING,), "pass on; the second ends it"),
        (STAYS, t.Warn, "on_warn", (), "warn the ranks, also those that will run"),
    )

    def __init__(self, agent: Agent, leaving: Leaving) -> None:
        self._agent = agent
        self._leaving = leaving
        self._s = agent.settings
        self.warn_job: t.WarnJob | None = None  # told on every stream
        # local rank -> until when its monitor may kill it
        self._hung: dict[int, tuple[float, t.RankFault]] = {}
        self._warned = False
        self._warned_at: float | None = None  # when this very agent got the signal
        self._continues = 0  # requests to continue in this cycle

    def began(self) -> None:
        """The workers of a cycle have been started."""
        self._hung = {}
        self._continues = 0
        if self._warned:
            self._agent.emit(ev.WarnRanks())

    def ended(self, local_rank: int) -> None:
        """A worker is gone."""
        self._hung.pop(local_rank, None)

    def hung_by(self) -> float | None:
        """When the first hung rank should be gone."""
        return min((by for by, _ in self._hung.values()), default=None)

    def stuck(self, now: float) -> t.RankFault | None:
        """A hung rank that should be gone, once."""
        for rank, (by, fault) in self._hung.items():
            if now >= by:
                del self._hung[rank]
                return fault
        return None

    # --- a rank hangs ---------------------------------------------------------------------------------------------

    def on_hang(self, event: ev.HangSeen, now: float) -> None:
        """Tell the coordinator, so that all ranks are inspected. The monitor ends the rank after that, or at the stop;
        if that does not work within the kill timeout, go on without waiting."""
        agent = self._agent
        fault = event.fault
        rank = event.fault.local_rank
        plan = agent.plan
        collect_s = self._s.hang_collect_s
        if plan is None or rank not in agent.alive:
            return  # late word: it has ended
        if not event.doubted:
            agent.emit(Say(f"local rank {rank} hangs: its monitor ends it"))
            gone_by = now + 2 * collect_s + self._s.kill_timeout_s
            self._hung[rank] = (gone_by, fault)
        if collect_s:
            agent.send(t.Hung(plan.term, plan.cycle, fault, event.doubted))

    def on_collect(self, event: t.Collect, now: float) -> None:
        """The monitors answer, not the ranks."""
        if self._is_current(event.cycle):
            self._agent.emit(ev.InspectRanks(event.cycle, self._s.hang_collect_s))

    def _is_current(self, cycle: int) -> bool:
        """Whether the last plan of this agent is of that cycle."""
        plan = self._agent.plan
        return plan is not None and plan.cycle == cycle

    def on_collect_empty(self, event: t.Collect, now: float) -> None:
        """Its ranks have ended well, or it has not begun."""
        self._agent.send(t.Evidence(event.term, event.cycle, ()))

    def on_examine(self, event: t.Examine, now: float) -> None:
        """The answer goes past this core: nothing is decided by it."""
        self._agent.emit(event)

    def on_inspected(self, event: ev.Inspected, now: float) -> None:
        """For the coordinator to compare."""
        plan = self._agent.plan
        if plan is not None and plan.cycle == event.cycle:
            self._agent.send(t.Evidence(plan.term, event.cycle, event.ranks))

    # --- requests and warnings ------------------------------------------------------------------------------------

    def on_asked(self, event: ev.RankAsked, now: float) -> None:
        """The coordinator decides; what changes something is told again should the stream break."""
        plan = self._agent.plan
        if plan is None or not plan.active:
            return
        agent = self._agent
        rank = plan.rank_offset + event.local_rank
        # it goes to terminals and logs
        why = "".join(c if c.isprintable() else " " for c in event.description)
        request = t.Asked(plan.term, plan.cycle, event.action, rank, why)
        if event.action is not t.WorkloadAction.Continue:
            agent.emit(Say(f"rank {rank} asks: {event.action.name}: {why}"))
            agent.ask(request)
        # a rank that asks in a loop shall not fill everybody's log
        elif self._continues < _MAX_CONTINUES:
            self._continues += 1
            agent.emit(Say(f"rank {rank} reports: {why}"))
            agent.send(request)

    def on_ranks_gone(self, event: t.RanksGone, now: float) -> None:
        """For the in-process wrappers of this cycle."""
        if self._is_current(event.cycle):
            self._agent.emit(ev.PostGone(event.cycle, event.ranks, event.reason))

    def on_warned(self, event: ev.Warned, now: float) -> AgentState | None:
        """The warning signal reaches every rank of the job once; a second one ends the job. Other user
        signals go to the workers unchanged."""
        agent = self._agent
        signum = event.signum
        if signum != self._s.warning_signum:
            if agent.state is AgentState.RUNNING and not event.everybody:
                agent.emit(Say(f"passing signal {signum} on to the workers"))
                agent.emit(ev.PassOn(signum))
            return None
        why = agent.got(signum)
        if self._warned_at is None:
            self._warned_at = now
            if not event.everybody:
                self.warn_job = t.WarnJob(signum, why)
                agent.send(self.warn_job)
            self._warn(signum, why, event.everybody)
            return None
        if now < self._warned_at + self._s.same_signal_s:
            return None  # a warning alone ends no workers
        end = ev.Exit(signal_exit_code(SIGTERM), f"{why} a second time")
        agent.send(t.EndJob(end.code, end.reason))
        return self._leaving.leave(end, SIGTERM, self._s.term_timeout_s, now)

    def on_warn(self, event: t.Warn, now: float) -> None:
        """The coordinator has it from another node, or from the clock."""
        self._warn(event.signum, event.reason, False)

    def _warn(self, signum: int, why: str, everybody: bool) -> None:
        agent = self._agent
        if self._warned:
            return
        self._warned = True
        agent.emit(Say(f"{why}: the job is about to end, ranks are told to save their work"))
        if agent.state is not AgentState.RUNNING:
            return
        agent.emit(ev.WarnRanks())
        if not everybody:
            agent.emit(ev.PassOn(signum))
