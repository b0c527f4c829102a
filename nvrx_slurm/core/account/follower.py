"""The account follows the coordinator: its core hands over each event that it has handled, and hears nothing back.

What is slow (1,000 nodes take 40 ms) waits until the plan has left: `count` is called after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from nvrx_slurm.core.account.book import LISTED, TOLD, Book
from nvrx_slurm.core.account.figures import priced
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.coordinator.states import FAILED, Stage
from nvrx_slurm.core.election.quorum import peer_key
from nvrx_slurm.core.machine import Entered
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode
from nvrx_slurm.types import Account, Counted, CycleCost, Spent

_COSTS = 9  # of the last cycles that a plan's account has
_AGAIN = ("start", "import", "init", "reload")


class JobAccount:
    """Follows `core`, which has not stepped yet. Times are monotonic seconds of its clock."""

    def __init__(self, core: Coordinator) -> None:
        self._core = core
        self._members = core.roster.members
        self._ledger = core.ledger
        began = core.started - core.ledger.at_s(core.started)
        self._book = Book(began, core.settings.expected)
        # what was told last, until the first cycle here by agents
        self._past: Counted | None = None
        self._loaded = False
        self._cycle = -1  # the one that runs
        # a plan that has still to be counted: nodes, and when
        self._planned: tuple[set[str], float] | None = None
        self._costs: dict[int, CycleCost] = {}
        core.follow(self.follow)

    def follow(self, state: Enum, event: Any, now: float) -> None:
        """The core has handled `event` in `state`."""
        self._settle()
        book = self._book
        members = self._members
        job = self._core.job
        cycle = job.inherited.last_cycle if job.fresh else job.cycle
        if isinstance(event, ev.FromAgent) and isinstance(event.message, Spent):
            member = members.get(event.node_id)
            if member is not None and event.message.cycle == cycle:
                book.spent(peer_key(member.node), event.message, now)
        elif isinstance(event, ev.Joined):
            counted = event.message.counted
            node = event.message.node
            newest_s = -1.0 if self._past is None else self._past.account.wall_s
            if not self._loaded and counted is not None and counted.account.wall_s > newest_s:
                self._past = counted
            if node.node_id in members:
                book.here(peer_key(node), node.host, now)
        elif isinstance(event, ev.Left):
            key = peer_key(event.node)
            book.gone(key, now)
            if key in members.keys_of_nodes:  # another life of its agent has taken its place
                book.here(key, event.node.host, now)
        elif isinstance(event, ev.CheckpointsFound) and event.saved:
            book.found_save(now - event.saved[0].age_s)
        elif isinstance(event, Entered):
            self._entered(state, event.was, now)
        if self._core.state is Stage.CLOSED:
            self.close(now)

    def close(self, now: float) -> None:
        """Nothing comes any more: count the last cycle."""
        self._settle()
        self._close_cycle()
        self._note(self._book.ended(now, self._ends_well))

    @property
    def _ends_well(self) -> bool:
        end = self._core.ending.end
        return end is not None and end.code == ExitCode.OK

    def _entered(self, state: Enum, was: Enum, now: float) -> None:
        job = self._core.job
        if state in (Stage.RUNNING, *FAILED) and was is Stage.TAKEOVER:
            self._resume(job.cycle, job.assignment.group_ranks)
        elif state is Stage.RUNNING:
            self._close_cycle()
            self._planned = self._keys(job.assignment.group_ranks), now
        elif state is Stage.JOINING and self._core.state is state:
            self._book.waits(now)
        elif state is Stage.FINISHED and not self._ends_well:
            if job.fresh and self._past is not None and job.inherited.last_cycle >= 0:
                # Too few nodes came for a takeover: the cycle has ended with its coordinator.
                self._resume(job.inherited.last_cycle, job.inherited.places.values())
                self._book.failed(self._core.started, self._core.started)
                self._book.waits(self._core.started)
            self._mark()
            self._book.stops(now)

    def _keys(self, node_ids: Iterable[str]) -> set[str]:
        return {peer_key(self._members[one].node) for one in node_ids if one in self._members}

    def _resume(self, cycle: int, active: Iterable[str]) -> None:
        """An earlier coordinator planned this cycle; these nodes had a group rank in it."""
        self._close_cycle()
        self._cycle = cycle
        gap = self._past is None or self._past.cycle != cycle
        self._book.resume(
            self._keys(active), {*self._members.keys_of_nodes}, self._core.started, gap
        )

    def _close_cycle(self) -> None:
        """No earlier coordinator is heard of any more, and all is known about the cycle that runs."""
        past = self._past
        first = not self._loaded
        self._loaded = True
        if past is not None and first:
            before_s = past.account.wall_s - self._ledger.at_s(self._core.started)
            self._book.load(past.account, self._core.started + min(before_s, 0.0))
            self._costs = {cost.cycle: cost for cost in past.costs}
        self._mark()

    def _mark(self) -> None:
        """When the cycle that runs has failed, if it has."""
        marks = self._ledger.marks
        if marks is not None and marks[0] == self._cycle:
            self._book.failed(*marks[1:])

    def _settle(self) -> None:
        """Add the cycle that has ended with the last plan."""
        if self._planned is not None:
            (active, now), self._planned = self._planned, None
            self._note(self._book.planned(active, now))
            self._cycle = self._core.job.cycle

    def _note(self, means: Mapping[str, float]) -> None:
        again_s = sum(means.get(bucket, 0.0) for bucket in _AGAIN)
        self._costs[self._cycle] = CycleCost(self._cycle, again_s, means.get("recomputed", 0.0))
        self._costs.pop(self._cycle - LISTED, None)

    # --- what is told -----------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether a plan was sent, so that `count` has something new."""
        return self._planned is not None

    def count(self) -> Counted:
        """The account until the last plan, for all agents."""
        self._settle()
        wall_s = max(0.0, self._ledger.at_s(self._book.counted_at))
        counted = Counted(
            self._cycle, self._book.told(wall_s, TOLD), tuple(self._costs.values())[-_COSTS:]
        )
        self._past = counted if self._loaded else self._past
        return counted

    @property
    def known(self) -> Account | None:
        """The account that `count`, or an earlier coordinator, told last; None: there is none yet."""
        return self._past.account if self._past is not None else None

    @property
    def save_s(self) -> float:
        """Mean time of a section that saves; 0 = there was none."""
        return self._book.save_s

    def complete(self, done: ev.JobOver) -> ev.JobOver:
        """The end of the job with the account, and with what each restart has cost."""
        report = done.report
        account = self._book.told(done.report.duration_s)
        restarts = priced(report.restarts, self._costs.values())
        return replace(done, report=replace(report, account=account, restarts=restarts))
