"""The account follows the coordinator: its core hands over each event that it has handled, and hears nothing back.

What is slow (1,000 nodes take 40 ms) waits until the plan has left: `count` is called after that.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any

from nvrx_slurm.core.account.book import LISTED, TOLD, Book
from nvrx_slurm.core.account.report import priced
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.coordinator.states import FAILED, Stage
from nvrx_slurm.core.election.quorum import peer_key
from nvrx_slurm.core.machine import Entered
from nvrx_slurm.errors import ExitCode
from nvrx_slurm.types import Account, Counted, CycleCost, Spent

_COSTS = 9  # of the last cycles that a plan's account has
_AGAIN = ("start", "import", "init", "reload")


class JobAccount:
    """Follows `core`, which has not stepped yet. Times are monotonic seconds of its clock."""

    def __init__(self, core: Coordinator) -> None:
        self._core, self._members, self._ledger = core, core.roster.members, core.ledger
        self._book = Book(core.started, core.settings.expected)
        self._past: Counted | None = None  # what agents tell, until the first cycle here
        self._loaded = False
        self._cycle = -1  # the one that runs
        self._counted_at = core.started  # when it was planned
        self._planned: tuple[set[str], float] | None = None  # a plan that has still to be counted: nodes, and when
        self._costs: dict[int, CycleCost] = {}
        core.follower = self.follow

    def follow(self, state: Enum, event: Any, now: float) -> None:
        """The core has handled `event` in `state`."""
        self._settle()
        if isinstance(event, ev.FromAgent):
            self._heard(event, now)
        elif isinstance(event, ev.Joined):
            self._joined(event, now)
        elif isinstance(event, ev.Left):
            self._left(event, now)
        elif isinstance(event, Entered):
            self._entered(state, event.was, now)
        if self._core.state is Stage.CLOSED:
            self._end(now)

    # --- what has happened ------------------------------------------------------------------------------------

    def _heard(self, event: ev.FromAgent[Any], now: float) -> None:
        """No rank of the cycle is left on a node."""
        member = self._members.get(event.node_id)
        if isinstance(event.message, Spent) and member is not None and event.message.cycle == self._core.job.cycle:
            self._book.spent(peer_key(member.node), event.message, now)

    def _joined(self, event: ev.Joined, now: float) -> None:
        counted, node = event.message.counted, event.message.node
        if counted is not None and (self._past is None or counted.account.wall_s > self._past.account.wall_s):
            self._past = counted
        if node.node_id in self._members:
            self._book.here(peer_key(node), node.host, now)

    def _left(self, event: ev.Left, now: float) -> None:
        """A node is gone, or another life of its agent has taken its place."""
        key = peer_key(event.node)
        self._book.gone(key, now)
        if key in self._members.keys_of_nodes:
            self._book.here(key, event.node.host, now)

    def _entered(self, state: Enum, was: Enum, now: float) -> None:
        end, job = self._core.ending.end, self._core.job
        if state in (Stage.RUNNING, *FAILED) and was is Stage.TAKEOVER:
            self._load()
            self._cycle, gap = job.cycle, self._past is None or self._past.cycle != job.cycle
            here = self._members.keys_of_nodes
            self._book.resume(self._active() & here, {*here}, self._core.started, gap)
        elif state is Stage.RUNNING:
            self._mark()
            self._load()
            self._planned = self._active(), now
        elif state is Stage.JOINING and self._core.state is state:
            self._book.waits(now)
        elif state is Stage.FINISHED and end is not None and end.code != ExitCode.OK:
            self._mark()
            self._book.stops(now)

    def _active(self) -> set[str]:
        members = self._members
        return {peer_key(members[one].node) for one in self._core.job.assignment.group_ranks if one in members}

    def _load(self) -> None:
        """No earlier coordinator is heard of any more."""
        past, self._loaded, first = self._past, True, not self._loaded
        if past is not None and first:
            before_s = self._ledger.at_s(self._core.started)
            self._counted_at = self._core.started + min(past.account.wall_s - before_s, 0.0)
            self._book.load(past.account, self._counted_at)
            self._costs = {cost.cycle: cost for cost in past.costs}

    def _mark(self) -> None:
        """When the cycle that runs has failed, if it has."""
        marks = self._ledger.marks
        if marks is not None and marks[0] == self._cycle:
            self._book.failed(*marks[1:])

    # --- what follows -----------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Add the cycle that has ended with the last plan."""
        if self._planned is not None:
            (active, now), self._planned = self._planned, None
            self._note(self._book.planned(active, now))
            self._cycle, self._counted_at = self._core.job.cycle, now

    def _end(self, now: float) -> None:
        end = self._core.ending.end
        self._load()
        self._mark()
        self._note(self._book.ended(now, end is not None and end.code == ExitCode.OK))
        self._counted_at = now

    def _note(self, means: Any) -> None:
        cost = CycleCost(self._cycle, sum(means.get(bucket, 0.0) for bucket in _AGAIN), means.get("recomputed", 0.0))
        self._costs[self._cycle] = cost
        if len(self._costs) > LISTED:
            del self._costs[next(iter(self._costs))]

    @property
    def is_due(self) -> bool:
        """Whether a plan was sent, so that `count` has something new."""
        return self._planned is not None

    def count(self) -> Counted:
        """The account until the last plan, for all agents."""
        self._settle()
        wall_s = max(0.0, self._ledger.at_s(self._counted_at))
        return Counted(self._cycle, self._book.told(wall_s, TOLD), tuple(self._costs.values())[-_COSTS:])

    def live(self, now: float) -> Account:
        """Where the time has gone until `now`; what running nodes do is estimated. O(nodes)."""
        if self._past is not None and not self._loaded:  # the takeover is not decided yet
            return self._past.account
        self._settle()
        self._mark()
        return self._book.live(now, self._ledger.at_s(now))

    def complete(self, done: ev.JobOver) -> ev.JobOver:
        """The end of the job with the account, and with what each restart has cost."""
        report, account = done.report, self._book.told(done.report.duration_s)
        restarts = priced(report.restarts, self._costs.values())
        return replace(done, report=replace(report, account=account, restarts=restarts))
