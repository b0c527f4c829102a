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
        ((*EMPTY, AgentState.STOPPING), ev.HangSeen, "ignore", (), "the rank is gone, or is being stopped"),
        (AgentState.RUNNING, t.Collect, "on_collect", (), "inspect the ranks"),
        (STAYS, ev.Inspected, "on_inspected", (), "pass it on"),
        (EMPTY, t.Collect, "on_collect_empty", (), "no rank is here"),
        (AgentState.STOPPING, t.Collect, "ignore", (), "too late"),
        (AgentState.RUNNING, t.Examine, "on_examine", (), "a rank of this node is slow"),
        ((*EMPTY, AgentState.STOPPING), t.Examine, "ignore", (), "no rank is left that could be slow"),
        (STAYS, ev.RankAsked, "on_asked", (), "pass it on, also if the rank is gone"),
        (AgentState.RUNNING, t.RanksGone, "on_ranks_gone", (), "pass it on"),
        ((*EMPTY, AgentState.STOPPING), t.RanksGone, "ignore", (), "no wrappers to tell"),
        (EMPTY, ev.Warned, "on_warned", (AgentState.GONE,), "for the ranks that will run; the second ends it"),
        (BUSY, ev.Warned, "on_warned", (AgentState.LEAVING,), "pass on; the second ends it"),
        (STAYS, t.Warn, "on_warn", (), "warn the ranks, also those that will run"),
    )  # fmt: skip

    def __init__(self, agent: Agent, leaving: Leaving) -> None:
        self._agent = agent
        self._leaving = leaving
        self._s = agent.settings
        self.warn_job: t.WarnJob | None = None  # told on every stream
        self._hung: dict[
            int, tuple[float, t.RankFault]
        ] = {}  # local rank -> until when its monitor may kill it
        self._warned = False
        self._warned_at: float | None = None  # when this very agent got the signal
        self._continues = 0  # requests to continue in this cycle

    def began(self) -> None:
        """The workers of a cycle have been started."""
        self._hung, self._continues = {}, 0
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
        rank = next((rank for rank, (by, _) in self._hung.items() if now >= by), None)
        return None if rank is None else self._hung.pop(rank)[1]

    # --- a rank hangs ---------------------------------------------------------------------------------------------

    def on_hang(self, event: ev.HangSeen, now: float) -> None:
        """Tell the coordinator, so that all ranks are inspected. The monitor ends the rank after that, or at the stop;
        if that does not work within the kill timeout, go on without waiting."""
        fault, plan = event.fault, self._agent.plan
        if fault.local_rank not in self._agent.alive or plan is None:
            return  # late word: it has ended
        if event.doubted:
            if self._s.hang_collect_s:
                self._agent.send(t.Hung(plan.term, plan.cycle, fault, doubted=True))
            return
        self._agent.emit(Say(f"local rank {fault.local_rank} hangs: its monitor ends it"))
        if self._s.hang_collect_s:
            self._agent.send(t.Hung(plan.term, plan.cycle, fault))
        self._hung[fault.local_rank] = (
            now + 2 * self._s.hang_collect_s + self._s.kill_timeout_s,
            fault,
        )

    def on_collect(self, event: t.Collect, now: float) -> None:
        """The monitors answer, not the ranks."""
        if self._agent.plan is not None and event.cycle == self._agent.plan.cycle:
            self._agent.emit(ev.InspectRanks(event.cycle, self._s.hang_collect_s))

    def on_collect_empty(self, event: t.Collect, now: float) -> None:
        """Its ranks have ended well, or it has not begun."""
        self._agent.send(t.Evidence(event.term, event.cycle, ()))

    def on_examine(self, event: t.Examine, now: float) -> None:
        """The answer goes past this core: nothing is decided by it."""
        self._agent.emit(event)

    def on_inspected(self, event: ev.Inspected, now: float) -> None:
        """For the coordinator to compare."""
        if self._agent.plan is not None and event.cycle == self._agent.plan.cycle:
            self._agent.send(t.Evidence(self._agent.plan.term, event.cycle, event.ranks))

    # --- requests and warnings ------------------------------------------------------------------------------------

    def on_asked(self, event: ev.RankAsked, now: float) -> None:
        """The coordinator decides; what changes something is told again should the stream break."""
        plan = self._agent.plan
        if plan is None or not plan.active:
            return
        rank = plan.rank_offset + event.local_rank
        why = "".join(
            c if c.isprintable() else " " for c in event.description
        )  # it goes to terminals and logs
        request = t.Asked(plan.term, plan.cycle, event.action, rank, why)
        if event.action is not t.WorkloadAction.Continue:
            self._agent.emit(Say(f"rank {rank} asks: {event.action.name}: {why}"))
            self._agent.ask(request)
        elif (
            self._continues < _MAX_CONTINUES
        ):  # a rank that asks in a loop shall not fill everybody's log
            self._continues += 1
            self._agent.emit(Say(f"rank {rank} reports: {why}"))
            self._agent.send(request)

    def on_ranks_gone(self, event: t.RanksGone, now: float) -> None:
        """For the in-process wrappers of this cycle."""
        if self._agent.plan is not None and event.cycle == self._agent.plan.cycle:
            self._agent.emit(ev.PostGone(event.cycle, event.ranks, event.reason))

    def on_warned(self, event: ev.Warned, now: float) -> AgentState | None:
        """The warning signal reaches every rank of the job once; a second one ends the job. Other user
        signals go to the workers unchanged."""
        if event.signum != self._s.warning_signum:
            if self._agent.state is AgentState.RUNNING and not event.everybody:
                self._agent.emit(Say(f"passing signal {event.signum} on to the workers"))
                self._agent.emit(ev.PassOn(event.signum))
        elif self._warned_at is None:
            self._warned_at = now
            if not event.everybody:
                self.warn_job = t.WarnJob(event.signum, self._agent.got(event.signum))
                self._agent.send(self.warn_job)
            self._warn(event.signum, self._agent.got(event.signum), event.everybody)
        elif now >= self._warned_at + self._s.same_signal_s:  # a warning alone ends no workers
            code, why = signal_exit_code(SIGTERM), f"{self._agent.got(event.signum)} a second time"
            self._agent.send(t.EndJob(code, why))
            return self._leaving.leave(ev.Exit(code, why), SIGTERM, self._s.term_timeout_s, now)
        return None

    def on_warn(self, event: t.Warn, now: float) -> None:
        """The coordinator has it from another node, or from the clock."""
        self._warn(event.signum, event.reason, False)

    def _warn(self, signum: int, why: str, everybody: bool) -> None:
        if self._warned:
            return
        self._warned = True
        self._agent.emit(Say(f"{why}: the job is about to end, ranks are told to save their work"))
        if self._agent.state is AgentState.RUNNING:
            self._agent.emit(ev.WarnRanks())
            if not everybody:
                self._agent.emit(ev.PassOn(signum))
