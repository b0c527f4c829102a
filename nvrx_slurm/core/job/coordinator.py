"""The coordinator: gathers agents, makes plans, decides about restarts and the end. Pure; see `core.machine`.

    ELECTING -> JOINING -> RUNNING -> STOPPING -> JOINING ... -> FINISHED -> CLOSED

Each part handles some states or some events; its module tells that part of the story:
`electing` (a job of several nodes: wait for a quorum), `gathering` (wait for nodes, plan), `takeover` (carry on with
a cycle of an older term), `running`, `stopping` (a cycle
failed), `ending`; `any_time` (agents that come and go, requests) works in all states before the end. The parts share
`job_data.JobData`.

A message names its term and its cycle, so a delayed or repeated one about an old cycle is recognised. Within a term
cycles only grow. A new coordinator goes on above the highest cycle of which a voter has told it. Where no voter knows
of any, the job begins anew: with cycle 0, in a later term.
"""

from __future__ import annotations

from enum import Enum

from nvrx_slurm.core.attribution.verdict import first_cause
from nvrx_slurm.core.job.any_time import AnyTime
from nvrx_slurm.core.job.coordinator_events import CycleBegan, CycleOver, FromAgent
from nvrx_slurm.core.job.electing import Electing
from nvrx_slurm.core.job.ending import Ending
from nvrx_slurm.core.job.gathering import Gathering
from nvrx_slurm.core.job.job_data import CYCLE, STOPPING, CoordinatorSettings, JobData, Phase
from nvrx_slurm.core.job.part import JobPart
from nvrx_slurm.core.job.running import Running
from nvrx_slurm.core.job.stopping import Stopping
from nvrx_slurm.core.job.takeover import Takeover
from nvrx_slurm.core.machine import Machine

__all__ = ["Coordinator", "CoordinatorSettings", "Phase"]

_PARTS = (Electing, Gathering, Takeover, Running, Stopping, Ending, AnyTime)


class Coordinator(Machine):
    """The coordinator's core: `step(event, now)` -> commands; `deadline()` says when it wants a Tick."""

    through = {Phase.RETURNING: Phase.FINISHED, Phase.CLOSED: Phase.FINISHED}
    table = {key: row for part in _PARTS for key, row in part.table.items()}
    part_of_row = {key: part for part in _PARTS for key in part.table}

    def __init__(self, settings: CoordinatorSettings, now: float) -> None:
        self.job = JobData.at_start(settings, now)
        super().__init__(Phase.JOINING if self.job.quorum.elected else Phase.ELECTING, now)
        self.settings = settings
        self._parts: dict[type[JobPart], JobPart] = {part: part(self, self.job) for part in _PARTS}
        self._owner: dict[Enum, JobPart] = {owned: part for part in self._parts.values() for owned in part.states}
        self.owner.enter(now)

    @property
    def owner(self) -> JobPart:
        """The part that owns the current state: it decides what a change of the members means."""
        return self._owner[self.state]

    def go(self, state: Phase, now: float) -> None:
        """Change the state; a part whose states are entered from another part's is told."""
        before, was, self.state = self.owner, self.state, state
        if self.settings.attributes:
            self._tell_of_cycles(was, now)
        if self.owner is not before:
            self.owner.enter(now)

    def _tell_of_cycles(self, was: Enum, now: float) -> None:
        job = self.job
        if was in CYCLE and self.state not in CYCLE:
            cause = (first_cause(job.faults) or job.cause) if was in STOPPING else None
            self.emit(CycleOver(job.cycle, now - job.cycle_started_at, cause))
        elif self.state in CYCLE and was not in CYCLE:
            self.emit(CycleBegan(job.cycle))

    def handle(self, event: object, now: float) -> None:
        """Handle an event that has waited, as a part of the present step."""
        kind = self.kind(event)
        getattr(self._handler(self.state, kind), self.table[self.state, kind].do)(event, now)

    def deadline(self) -> float | None:
        """That of the part that owns the state (monotonic seconds), or None."""
        return self.owner.deadline()

    def kind(self, event: object) -> type:
        """Messages of agents are known by their own type."""
        return type(event.message if isinstance(event, FromAgent) else event)

    def _handler(self, state: Enum, kind: type) -> JobPart:
        return self._parts[self.part_of_row[state, kind]]
