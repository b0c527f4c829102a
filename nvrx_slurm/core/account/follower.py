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
from nvrx_slurm.core.machine import Entered, rows
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode
from nvrx_slurm.types import Account, Counted, CycleCost, Loaded, Spent

_ANY = tuple(Stage)
_COSTS = 9  # the last cycles, whose costs are told
_AGAIN = ("start", "import", "init", "reload")


class JobAccount:
    """Follows `core`, which has not stepped yet. Times are monotonic seconds of its clock."""

    table = rows(
        (_ANY, ev.Joined, "on_joined", (), "a node is here; it may know what was counted before"),
        (_ANY, ev.Left, "on_left", (), "a node is lost or excluded"),
        (_ANY, Spent, "on_spent", (), "no rank is left on a node"),
        (_ANY, Loaded, "on_loaded", (), "of which source, and how many steps are done again"),
        (_ANY, ev.CheckpointsFound, "on_checkpoints", (), "work up to there is not lost"),
        (Stage.RUNNING, Entered, "on_running", (), "one cycle ends in the account, another begins"),
        (FAILED, Entered, "on_stopping", (), "of a takeover: nobody has counted that cycle"),
        (Stage.JOINING, Entered, "on_joining", (), "nodes wait for others"),
        (Stage.FINISHED, Entered, "on_finished", (), "ranks are stopped"),
    )

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
        """The core has handled `event` in `state`. Events without a row cost no node any time."""
        self._settle()
        kind = type(event.message if isinstance(event, ev.FromAgent) else event)
        row = self.table.get((state, kind))
        if row is not None:
            getattr(self, row.do)(event, now)
        if self._core.state is Stage.CLOSED:
            self.close(now)

    # --- nodes ------------------------------------------------------------------------------------------------

    def on_joined(self, event: ev.Joined, now: float) -> None:
        """Until the first cycle here, agents tell the account of earlier coordinators."""
        counted = event.message.counted
        node = event.message.node
        if counted is not None and not self._loaded:
            known = (self._past or counted, counted)
            self._past = max(known, key=lambda one: one.account.wall_s)
        if node.node_id in self._members:
            self._book.here(peer_key(node), node.host, now)

    def on_left(self, event: ev.Left, now: float) -> None:
        """Another life of its agent may have taken its place."""
        key = peer_key(event.node)
        self._book.gone(key, now)
        if key in self._members.keys_of_nodes:
            self._book.here(key, event.node.host, now)

    def on_spent(self, event: ev.FromAgent[Spent], now: float) -> None:
        """What a node's ranks did in the cycle that has ended there."""
        job = self._core.job
        cycle = job.inherited.last_cycle if job.fresh else job.cycle
        member = self._members.get(event.node_id)
        spent = event.message
        if member is not None and spent.cycle == cycle:
            self._book.spent(peer_key(member.node), spent, now)

    def on_checkpoints(self, event: ev.CheckpointsFound, now: float) -> None:
        """The newest was saved so long ago."""
        if event.saved:
            self._book.found_save(now - event.saved[0].age_s)

    def on_loaded(self, event: ev.FromAgent[Loaded], now: float) -> None:
        """Where the cycle that runs goes on."""
        told = event.message
        if told.cycle != self._cycle:
            return
        self._book.loaded(told.source, told.took_s)
        before = self._costs.get(told.cycle - 1)
        if before is not None and told.iteration >= 0 and before.reached >= 0:
            steps = max(0, before.reached - told.iteration)
            self._costs[before.cycle] = replace(before, steps=steps)

    # --- cycles -----------------------------------------------------------------------------------------------

    def on_running(self, event: Entered, now: float) -> None:
        """A plan was sent, or the cycle of an earlier coordinator goes on."""
        if event.was is Stage.TAKEOVER:
            self.on_stopping(event, now)
            return
        self._close_cycle()
        self._planned = self._keys(self._core.job.assignment.group_ranks), now

    def on_stopping(self, event: Entered, now: float) -> None:
        """The cycle of an earlier coordinator has ended with it."""
        if event.was is Stage.TAKEOVER:
            job = self._core.job
            self._resume(
                job.cycle,
                job.assignment.group_ranks,
            )

    def on_joining(self, event: Entered, now: float) -> None:
        """Too few nodes are ready, unless a plan was sent at once."""
        if self._core.state is Stage.JOINING:
            self._book.waits(now)

    def on_finished(self, event: Entered, now: float) -> None:
        """The end was decided while ranks may run."""
        if self._ends_well:
            return
        job = self._core.job
        book = self._book
        inherited = job.inherited
        started = self._core.started
        ran = job.fresh and inherited.last_cycle >= 0
        if ran and self._past is not None:
            # Too few nodes came for a takeover: the cycle has ended with its coordinator.
            self._resume(inherited.last_cycle, inherited.places.values())
            book.failed(started, started)
            book.waits(started)
        self._mark()
        book.stops(now)

    def close(self, now: float) -> None:
        """Count the last cycle: nothing comes any more."""
        self._settle()
        self._close_cycle()
        self._note(self._book.ended(now, self._ends_well))

    @property
    def _ends_well(self) -> bool:
        end = self._core.ending.end
        return end is not None and end.code == ExitCode.OK

    def _keys(self, node_ids: Iterable[str]) -> set[str]:
        members = map(self._members.get, node_ids)
        return {peer_key(member.node) for member in members if member is not None}

    def _resume(self, cycle: int, active: Iterable[str]) -> None:
        """An earlier coordinator planned this cycle; these nodes had a group rank in it."""
        self._close_cycle()
        self._cycle = cycle
        gap = self._past is None or self._past.cycle != cycle
        self._book.resume(
            self._keys(active),
            {*self._members.keys_of_nodes},
            self._core.started,
            gap,
        )

    def _close_cycle(self) -> None:
        """No earlier coordinator is heard of any more, and all is known about the cycle that runs."""
        past = self._past
        if past is not None and not self._loaded:
            started = self._core.started
            before_s = past.account.wall_s - self._ledger.at_s(started)
            self._book.load(
                past.account,
                started + min(before_s, 0.0),
            )
            self._costs = {cost.cycle: cost for cost in past.costs}
        self._loaded = True
        self._mark()

    def _mark(self) -> None:
        """When the cycle that runs has failed, if it has."""
        marks = self._ledger.marks
        if marks is not None and marks[0] == self._cycle:
            self._book.failed(*marks[1:])

    def _settle(self) -> None:
        """Add the cycle that has ended with the last plan."""
        if self._planned is not None:
            active, now = self._planned
            self._planned = None
            self._note(self._book.planned(active, now))
            self._cycle = self._core.job.cycle

    def _note(self, means: Mapping[str, float]) -> None:
        cycle = self._cycle
        again_s = sum(means.get(bucket, 0.0) for bucket in _AGAIN)
        recomputed_s = means.get("recomputed", 0.0)
        self._costs[cycle] = CycleCost(
            cycle,
            again_s,
            recomputed_s,
            self._book.reached,
        )
        self._costs.pop(cycle - LISTED, None)

    # --- what is told -----------------------------------------------------------------------------------------

    @property
    def is_due(self) -> bool:
        """Whether a plan was sent, so that `count` has something new."""
        return self._planned is not None

    def count(self) -> Counted:
        """The account until the last plan, for all agents."""
        self._settle()
        counted_s = self._ledger.at_s(self._book.counted_at)
        account = self._book.told(max(0.0, counted_s), TOLD)
        counted = Counted(
            self._cycle,
            account,
            tuple(self._costs.values())[-_COSTS:],
        )
        if self._loaded:
            self._past = counted
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
        report = replace(
            done.report,
            account=self._book.told(done.report.duration_s),
            restarts=priced(done.report.restarts, self._costs.values()),
        )
        return replace(done, report=report)
