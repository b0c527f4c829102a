"""The coordinator waits for enough nodes for the next cycle, which `planning` plans.

With `--ft-segment N` group ranks are given in segments: N of them in a row, all to nodes of one (NVLink) domain.
"""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.ending import Ending
from nvrx_slurm.core.coordinator.members import missing
from nvrx_slurm.core.coordinator.part import Part
from nvrx_slurm.core.coordinator.planning import Planner
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.states import Stage
from nvrx_slurm.core.coordinator.stopping import Stopping
from nvrx_slurm.core.machine import Entered, earliest, rows
from nvrx_slurm.errors import ExitCode

_MINE = (Stage.JOINING, Stage.LAST_CALL, Stage.PAUSED)
_OPEN = (Stage.JOINING, Stage.LAST_CALL)
_FIND_S = 2.0  # for a file system to tell which checkpoints there are, before the first plan
_PLANNED = (Stage.LAST_CALL, Stage.RUNNING, Stage.TAKEOVER)


class Gathering(Part):
    """Owns the states from the first agent, or from the end of a failed cycle, to the next plan."""

    states = _MINE
    table = rows(
        (
            Stage.JOINING,
            Entered,
            "on_entered",
            (Stage.PAUSED, *_PLANNED),
            "plan at once, or wait for nodes",
        ),
        (Stage.JOINING, ev.Review, "on_review", _PLANNED, "enough nodes may be ready now"),
        (
            Stage.JOINING,
            ev.Timer,
            "on_timer",
            (Stage.FINISHED,),
            "say who is missing; the join timeout",
        ),
        (
            Stage.LAST_CALL,
            ev.Review,
            "on_review_in_last_call",
            (Stage.JOINING, *_PLANNED),
            "all are here, or too few",
        ),
        (
            Stage.LAST_CALL,
            ev.Timer,
            "on_last_call_over",
            (Stage.JOINING, *_PLANNED),
            "start without the rest",
        ),
        (_OPEN, ev.Arrived, "on_arrived", (Stage.TAKEOVER,), "it may run a cycle"),
        (_OPEN, (ev.Available, ev.Cleared, ev.Left), "on_change", (), "one more or fewer"),
        (Stage.PAUSED, ev.Arrived, "on_arrived_in_pause", (), "no cycle starts yet"),
        (Stage.PAUSED, (ev.Available, ev.Cleared, ev.Left), "ignore", (), "no cycle starts yet"),
        (Stage.PAUSED, ev.Timer, "on_pause_over", (Stage.JOINING,), "the pause is over"),
        (_MINE, (t.RanksFailed, t.Succeeded), "ignore", (), "of a cycle that is over"),
    )

    def __init__(self, roster: Roster, ending: Ending, stopping: Stopping) -> None:
        super().__init__(roster)
        self._ending = ending
        self._stopping = stopping
        self._planner = Planner(roster, stopping)
        self.join_by = 0.0  # the job ends then where too few nodes are ready
        self._announce_at: float | None = None
        self._last_call_until = 0.0
        self._found_by: float | None = (
            None  # checkpoints are not waited for any longer; None = nobody has asked
        )
        self._fenced_until: float | None = (
            None  # enough nodes are ready, but ranks may still run elsewhere
        )

    def begin(self, now: float) -> Stage | None:
        """The job begins, the workers of a failed cycle are gone, or a takeover has come to nothing."""
        if not self._job.fresh or not self.join_by:
            self.join_by = now + self._s.join_timeout_s
        to = self._plan_if_possible(now)
        return self._wait(now) if to in (None, Stage.JOINING) else to

    def on_entered(self, event: Entered, now: float) -> Stage | None:
        """Not where a last call has come to nothing."""
        if event.was is Stage.LAST_CALL:
            return None
        return Stage.PAUSED if now < self._stopping.pause_until else self.begin(now)

    # --- nodes come and go ----------------------------------------------------------------------------------

    def on_arrived(self, event: ev.Arrived, now: float) -> Stage | None:
        """It may complete the nodes that are needed, or begin a takeover."""
        job = self._job
        message = event.message
        mine = job.fresh and job.inherited.claim(message)
        if job.inherited.running:
            return Stage.TAKEOVER
        if mine and not message.busy:
            self._ledger.add(message.faults, job.cycle, now)
        elif not mine:
            self._roster.stop_old_workers(message, now)
        self._out.post(ev.Review())
        return None

    def on_arrived_in_pause(self, event: ev.Arrived, now: float) -> None:
        """What it runs is of no use."""
        self._roster.stop_old_workers(event.message, now)

    def on_change(self, event: ev.Left | ev.Available | ev.Cleared, now: float) -> None:
        """One fewer; or a node has passed its preflight, or has stopped workers of an older cycle; or a plan may have
        waited for ranks elsewhere."""
        self._out.post(ev.Review())

    def on_review(self, event: ev.Review, now: float) -> Stage | None:
        """Plan if that is possible now."""
        return self._plan_if_possible(now)

    def on_review_in_last_call(self, event: ev.Review, now: float) -> Stage | None:
        """The same; the call is not made again."""
        if not self._planner.is_possible():
            return self._wait(now)
        return self._start(now) if self._is_time() else None

    # --- waiting --------------------------------------------------------------------------------------------

    def timer_at(self, state: Stage) -> float | None:
        """The end of the join timeout and the announcement, of the last call, or of the pause."""
        if state is Stage.PAUSED:
            return self._stopping.pause_until
        if state is Stage.LAST_CALL:
            return self._last_call_until
        return earliest(self.join_by, self._announce_at, self._fenced_until)

    def on_pause_over(self, event: ev.Timer, now: float) -> Stage:
        """Nodes may have come meanwhile."""
        return Stage.JOINING

    def on_last_call_over(self, event: ev.Timer, now: float) -> Stage:
        """Start without the rest."""
        return self._start(now)

    def on_timer(self, event: ev.Timer, now: float) -> Stage | None:
        """Say which nodes are missing, or give up."""
        if self._fenced_until is not None and now >= self._fenced_until:
            self._fenced_until = None
            self._out.post(ev.Review())
            return None
        if now < self.join_by:
            self._announce(now)
            return None
        waited = f"{self._s.join_timeout_s:g} s (join timeout) are over"
        return self._ending.decide(t.Finish(ExitCode.TOO_FEW_NODES, f"{waited}; {self.missing()}"))

    def _wait(self, now: float) -> Stage:
        """Too few nodes are ready. Those that are being checked are ready within milliseconds, as a rule."""
        self._announce_at = now + self._s.announce_s
        if 0 < len(self._members) < self._s.min_nodes:
            self._announce(now)
        return Stage.JOINING

    def _announce(self, now: float) -> None:
        self._announce_at = None
        more = self._s.min_nodes - self._members.ready
        if more <= 0 and self._fenced_until is not None:
            return  # what is waited for has been said
        awaited = f"{more} more" if more > 0 else "the rest of a segment"
        self._say(f"{self.missing()}; waiting up to {self.join_by - now:.0f} s for {awaited}")

    def missing(self) -> str:
        """Which nodes, or segments, are waited for."""
        s, members = self._s, self._members
        if s.segment and members.ready >= s.min_nodes:
            return members.missing_segments(s.min_nodes, s.segment)
        return missing(members.keys_of_nodes, s.expected, s.min_nodes)

    # --- planning -------------------------------------------------------------------------------------------

    def _plan_if_possible(self, now: float) -> Stage | None:
        """Plan a restart with enough nodes at once; the first cycle when all nodes are here, or after a last call.

        A restart that would move a segment elsewhere first waits a moment for nodes that are still being checked.
        """
        job = self._job
        never_asked = job.fresh and self._found_by is None
        if never_asked and self._s.finds_checkpoints and len(self._members):
            self._found_by = now + _FIND_S
            self._out.append(ev.ReadProgress(-1))
        if not self._planner.is_possible():
            return None
        if self._is_time():
            return self._start(now)
        until = min(now + self._s.last_call_s, self.join_by)
        after_another_term = job.fresh and job.inherited.last_cycle >= 0
        if after_another_term and self._quorum.needed:
            # Every agent that lives registers before its lease ends: after the fence nobody is waited for.
            until = min(until, max(now, self._quorum.fenced_until()))
        self._last_call_until = until
        return Stage.LAST_CALL

    def _is_time(self) -> bool:
        """Whether nothing can be gained by waiting for further nodes."""
        if not self._job.fresh and not self._planner.may_improve():
            return True
        return self._members.ready >= self._roster.nodes_left or self._are_all_here()

    def _are_all_here(self) -> bool:
        """After a takeover: whether every node is ready or proven dead, so that no last call is needed."""
        members = self._members
        all_ready = members.ready == len(members)
        known = self._quorum.needed and self._job.inherited.last_cycle >= 0
        return known and all_ready and not self._quorum.missing(members.keys_of_nodes)

    def _start(self, now: float) -> Stage:
        """A cycle of an older term that did not go on has failed, and costs a restart like any other."""
        job = self._job
        if job.fresh and job.inherited.last_cycle >= 0:
            return Stage.TAKEOVER
        if self._quorum.electors and self._is_fenced(now):
            return Stage.JOINING
        is_asked = self._found_by is not None and now < self._found_by
        if is_asked and job.fresh and self._budget.saved is None:
            self._fenced_until = self._found_by
            return Stage.JOINING
        self._planner.plan(now)
        return Stage.RUNNING

    def _is_fenced(self, now: float) -> bool:
        """Whether ranks of an older cycle may run on a node that is not a member, or this may be no quorum."""
        until = self._quorum.fenced_until()
        is_over = now >= until
        if is_over and self._quorum.resign_at is None:
            self._fenced_until = None
            return False
        if self._fenced_until is None and not is_over:
            why = "ranks may still run on a node that is out of reach"
            self._say(f"waiting up to {until - now:.1f} s: {why}")
        self._fenced_until = None if is_over else until
        return True
