"""The coordinator: gathers agents, makes plans, decides about restarts and the end. Pure; see `core.machine`.

    JOINING -> RUNNING -> STOPPING -> JOINING ... -> FINISHED -> CLOSED

Each part handles some states or some events; its module tells that part of the story:
`gathering` (wait for nodes, plan), `takeover` (carry on with a cycle of an older term), `running`, `stopping` (a cycle
failed), `ending`; `membership` (agents come and go) and `requests` (of ranks, people and Slurm) work in all states
before the end. The parts share `job_data.JobData`.

Cycles only grow, also across terms, so a delayed or repeated message about an old cycle is recognised by its cycle.
"""

from __future__ import annotations

from typing import Any

from nvrx_slurm.core.job.ending import Ending
from nvrx_slurm.core.job.gathering import Gathering
from nvrx_slurm.core.job.job_data import CoordinatorSettings, JobData, Phase
from nvrx_slurm.core.job.membership import Membership
from nvrx_slurm.core.job.requests import Requests
from nvrx_slurm.core.job.running import Running
from nvrx_slurm.core.job.stopping import Stopping
from nvrx_slurm.core.job.takeover import Takeover
from nvrx_slurm.core.machine import Composed, plain

__all__ = ["Coordinator", "CoordinatorSettings", "Phase"]


class Coordinator(Composed):
    """The coordinator's core: `step(event, now)` -> commands; `deadline()` says when it wants a Tick."""

    through = {Phase.RETURNING: Phase.FINISHED, Phase.CLOSED: Phase.FINISHED}
    parts = (Gathering, Takeover, Running, Stopping, Ending, Membership, Requests)

    def __init__(self, settings: CoordinatorSettings, now: float) -> None:
        self.settings = settings
        self.job = JobData.at_start(settings, now)
        super().__init__(Phase.JOINING, now, self.job)

    @property
    def restarts_used(self) -> int:
        """Over all terms."""
        return self.job.budget.history.restarts_used

    def snapshot(self) -> dict[str, Any]:
        """The whole state as data that JSON can hold. Times are monotonic seconds of this host, as is `started`."""
        return {**super().snapshot(), "job": plain(self.job)}
