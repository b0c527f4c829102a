"""Whether a node is fit for another cycle: the preflight before it, and checks that fail later."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ev
from nvrx_slurm.core.agent.leaving import BUSY, AgentState
from nvrx_slurm.core.machine import Say, rows

if TYPE_CHECKING:
    from nvrx_slurm.core.agent.agent import Agent

_IDLE = AgentState.IDLE
_PREPARING = AgentState.PREPARING
_ASKED = (t.Stop, t.CheckNode)


class Fitness:
    """Offers the node for the next cycle, or says that it is not fit."""

    table = rows(
        (_PREPARING, _ASKED, "on_stop_preparing", (), "answer when the preflight has passed"),
        (_IDLE, _ASKED, "on_stop_idle", (_PREPARING,), "a spare is checked first"),
        (
            _PREPARING,
            ev.Prepared,
            "on_prepared",
            (_IDLE, AgentState.RUNNING),
            "offer the node; unfit: say so",
        ),
        ((_PREPARING, *BUSY), ev.Sick, "on_sick", (), "ask to be left out"),
        (_IDLE, ev.Sick, "on_sick", (_PREPARING,), "ask to be left out"),
        (AgentState.SUCCEEDED, ev.Sick, "on_sick_succeeded", (), "its work is done; not once more"),
    )

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.unfit = ""  # why this node must not run anything more
        # sent when the preflight has passed; term 0: it has never run anything
        self._offer = t.Ready(0, 0, 0)

    def prepare(self, offer: t.Ready) -> AgentState:
        """Check the node before it is offered."""
        self._offer = offer
        if self.unfit:
            self._declare_unfit()
            return _PREPARING
        plan = self._agent.plan
        if plan is None:
            self._agent.emit(ev.Prepare(False, 0))
        else:
            self._agent.emit(ev.Prepare(plan.active, plan.cycle + 1))
        return _PREPARING

    def on_stop_idle(self, event: t.Stop | t.CheckNode, now: float) -> AgentState | None:
        """Nothing runs here. A spare is checked before it may be promoted."""
        ready = t.Ready(event.term, event.cycle, 0)
        plan = self._agent.plan
        if plan is None or not plan.active:
            return self.prepare(ready)
        self._agent.send(ready)
        return None

    def on_stop_preparing(self, event: t.Stop | t.CheckNode, now: float) -> None:
        """The answer waits until the preflight has passed."""
        self._offer = t.Ready(event.term, event.cycle, 0)

    def on_prepared(self, event: ev.Prepared, now: float) -> AgentState | None:
        """The preflight has ended. A node that passed is ready for the next plan, which may be here already."""
        self.unfit = self.unfit or event.unfit
        if self.unfit:
            self._declare_unfit()
            return None
        self._agent.send(self._offer)
        return self._agent.begin_next()

    def on_sick(self, event: ev.Sick, now: float) -> AgentState | None:
        """A check of the node failed while it runs workers, or waits: the job has to do without this node."""
        if not self.unfit:
            self.unfit = event.why
            self._declare_unfit()
        return _PREPARING if self._agent.state is _IDLE else None

    def on_sick_succeeded(self, event: ev.Sick, now: float) -> None:
        """Its work is done, but the node is not to be used once more."""
        self.unfit = event.why

    def _declare_unfit(self) -> None:
        plan = self._agent.plan
        term, cycle = (0, 0) if plan is None else (plan.term, plan.cycle)
        self._agent.emit(ev.EndHeld())
        self._agent.emit(Say(f"this node is not fit for the job: {self.unfit}"))
        self._agent.ask(t.NodeUnfit(term, cycle, self.unfit))
