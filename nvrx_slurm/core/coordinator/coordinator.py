"""The coordinator: gathers agents, makes plans, decides about restarts and the end. Pure; see `core.machine`.

    ELECTING -> JOINING -> RUNNING -> STOPPING -> JOINING ... -> FINISHED -> CLOSED

Each part handles some states or some events; its module tells that part of the story:
`electing` (wait for a quorum, where the job has several nodes), `takeover` (carry on with a cycle of an older term),
`gathering` (wait for nodes, plan), `running`, `stopping` (it has failed), `hangs`, `ending`. `any_time` works in all
states before the end. The parts share the members (`roster`), what happened (`report`), the budget (`restarts`) and
where the job is (`job`).

A message names its term and its cycle, so a delayed or repeated one about an old cycle is recognised. Within a term
cycles only grow. A new coordinator goes on above the highest cycle of which a voter has told it. Where no voter knows
of any, the job begins anew: with cycle 0, in a later term.
"""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.any_time import AnyTime
from nvrx_slurm.core.coordinator.electing import Electing
from nvrx_slurm.core.coordinator.ending import Ending
from nvrx_slurm.core.coordinator.exclusion import Exclusion
from nvrx_slurm.core.coordinator.gathering import Gathering
from nvrx_slurm.core.coordinator.hangs import HangSearch
from nvrx_slurm.core.coordinator.job import JobState
from nvrx_slurm.core.coordinator.members import Use
from nvrx_slurm.core.coordinator.report import Ledger
from nvrx_slurm.core.coordinator.restarts import Budget
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.running import Running
from nvrx_slurm.core.coordinator.states import OVER, RUNS, CoordinatorSettings, Stage
from nvrx_slurm.core.coordinator.stopping import Stopping
from nvrx_slurm.core.coordinator.takeover import Takeover
from nvrx_slurm.core.election.quorum import Quorum
from nvrx_slurm.core.machine import Machine, earliest
from nvrx_slurm.core.straggler.suspects import Suspects

__all__ = ["Coordinator", "CoordinatorSettings", "Stage"]

_BEGIN_S = 5.0  # agents that Slurm starts together begin within this time


class Coordinator(Machine):
    """The coordinator's core: `step(event, now)` -> commands; `deadline()` says when it wants a Tick."""

    made_of = ("settings",)
    last = Stage.CLOSED
    envelope = (ev.FromAgent,)
    parts = (
        Roster,
        Electing,
        Gathering,
        Takeover,
        Running,
        Stopping,
        Ending,
        HangSearch,
        Suspects,
        AnyTime,
    )

    def __init__(self, settings: CoordinatorSettings, now: float) -> None:
        super().__init__(Stage.JOINING, now)
        self.settings = s = settings
        stragglers: list[t.StragglerRecord] = []
        begin_s = min(_BEGIN_S, s.quorum_timeout_s / 2 or _BEGIN_S)
        quorum = Quorum(s.electors, s.one_life, now + begin_s if s.one_life else 0.0)
        self.job = JobState(s.term, now)
        self.budget = Budget(s.max_restarts, s.limits)
        self.ledger = Ledger(now, s.began_s, stragglers, s.job_began_s)
        self.roster = roster = Roster(s, self.out, self.job, self.ledger, self.budget, quorum)
        self.exclusion = exclusion = Exclusion(roster)
        self.ending = ending = Ending(roster, exclusion, now)
        self.hangs = hangs = HangSearch(roster)
        self.suspects = suspects = Suspects(roster, exclusion, stragglers)
        self.electing = Electing(roster, ending, now)
        self.stopping = stopping = Stopping(roster, ending, exclusion)
        self.gathering = gathering = Gathering(roster, ending, stopping)
        takeover = Takeover(roster)
        running = Running(roster, ending, hangs)
        timed = (gathering, takeover, running, stopping)
        self.bind(roster, *timed, self.electing, ending, hangs, suspects, AnyTime(self))
        self._owner: dict[Stage, Gathering | Takeover | Running | Stopping] = {
            state: part for part in timed for state in part.states
        }
        if quorum.elected:
            gathering.begin(now)
        else:
            self.state = Stage.ELECTING

    def timer_at(self) -> float | None:
        """When the state itself has something to do (monotonic seconds), or None."""
        assert isinstance(self.state, Stage)
        return self._owner[self.state].timer_at(self.state)

    def deadline(self) -> float | None:
        """The state's own timer, the end of the allocation, or that of a coordinator without a quorum."""
        if self.state is Stage.ELECTING:
            return self.electing.deadline()
        if self.state in OVER:
            return self.ending.deadline(self.state)
        return earliest(self.timer_at(), self.ending.clock.deadline(), self.roster.quorum.resign_at)

    def validate(self) -> None:
        """What holds after each step."""
        super().validate()
        job = self.job
        members = self.roster.members
        end = self.ending.end
        assert (end is not None) == (self.state in OVER), f"{self.state.name}, but the end is {end}"
        assert members.ready == sum(member.use is Use.READY for member in members.values()), (
            "ready nodes"
        )
        joining = any(member.use is Use.JOINING for member in members.values())
        assert not joining or self.state in OVER, "a member was forgotten"
        assert self.roster.quorum.elected or self.state in (Stage.ELECTING, *OVER), (
            "no quorum was won"
        )
        if self.state in RUNS:
            assert job.assignment.shared is not None and not job.fresh and job.cycle >= 0, (
                "no plan runs"
            )
            assert (job.assignment.shared.term, job.assignment.shared.cycle) == (
                job.term,
                job.cycle,
            ), "another plan"
        if self.state is Stage.STOPPING:
            assert self.stopping.pending and self.stopping.pending <= members.keys(), (
                "nothing is waited for"
            )
        if self.state is Stage.TAKEOVER:
            assert job.fresh and job.inherited.running, "nothing to carry on with"
