"""The coordinator waits for enough nodes and plans the next cycle."""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.duration import in_words
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.assignment import Assignment
from nvrx_slurm.core.job.job_data import ANY, LIVE, Phase, rows
from nvrx_slurm.core.job.part import JobPart
from nvrx_slurm.core.job.placement import Placement, place
from nvrx_slurm.core.machine import Tick, earliest
from nvrx_slurm.errors import ExitCode

_MINE = (Phase.JOINING, Phase.LAST_CALL, Phase.PAUSED)


class Gathering(JobPart):
    """Owns the states from the first agent, or from the end of a failed cycle, to the next plan."""

    states = _MINE
    table = rows(
        (_MINE, t.Failed, "ignore", (), "of a cycle that is over"),
        (_MINE, t.Succeeded, "ignore", (), "of a cycle that is over"),
        (_MINE, t.Stopped, "on_stopped", (*LIVE, Phase.FINISHED), "one more is ready"),
        (_MINE, Tick, "on_tick", ANY, "join timeout, last call or pause is over"),
    )

    join_by: float = 0.0
    announce_at: float | None = None
    last_call_until: float = 0.0
    fenced_until: float | None = None  # enough nodes are ready, but ranks may still run elsewhere

    def enter(self, now: float) -> None:
        """The job begins, the workers of a failed cycle are gone, or a takeover has come to nothing."""
        if now < self.job.pause_until:
            self.core.go(Phase.PAUSED, now)
        else:
            self._begin(now)

    def _begin(self, now: float) -> None:
        if not self.job.fresh or not self.join_by:
            self.join_by = now + self.job.settings.join_timeout_s
        self.core.go(Phase.JOINING, now)
        self._plan_if_possible(now)
        if self.core.state is Phase.JOINING:
            self._wait(now)

    # --- nodes come and go ----------------------------------------------------------------------------------

    def joined(self, message: t.Register, now: float) -> None:
        """It may complete the nodes that are needed, or begin a takeover."""
        mine = self.job.fresh and self.job.inherited.claim(message)
        if self.job.inherited.running:
            self.core.go(Phase.TAKEOVER, now)
            return
        if mine and not message.busy:
            self.job.add_faults(message.faults, now)
        elif not mine:
            self.stop_old_workers(message, now)
        self._plan_if_possible(now)

    def left(self, node: t.Node, fault: t.RankFault, now: float) -> None:
        """One fewer."""
        self._plan_if_possible(now)

    def stopped(self, node_id: str, now: float) -> None:
        """A node has passed its preflight, or has stopped workers of an older cycle."""
        self._plan_if_possible(now)

    # --- waiting --------------------------------------------------------------------------------------------

    def timer_at(self) -> float | None:
        """The end of the join timeout and the announcement, of the last call, or of the pause."""
        if self.core.state is Phase.PAUSED:
            return self.job.pause_until
        if self.core.state is Phase.LAST_CALL:
            return self.last_call_until
        return earliest(self.join_by, self.announce_at, self.fenced_until)

    def on_timer(self, now: float) -> None:
        """Start without the rest, say which nodes are missing, or give up."""
        if self.core.state is Phase.PAUSED:
            self._begin(now)
        elif self.core.state is Phase.LAST_CALL:
            self._start(now)
        elif self.fenced_until is not None and now >= self.fenced_until:
            self.fenced_until = None
            self._plan_if_possible(now)
        elif now < self.join_by:
            self._announce(now)
        else:
            waited = f"{self.job.settings.join_timeout_s:g} s (join timeout) are over"
            self.finish(t.Finish(ExitCode.TOO_FEW_NODES, f"{waited}; {self._missing()}"), now)

    def _wait(self, now: float) -> None:
        """Too few nodes are ready. Those that are being checked are ready within milliseconds, as a rule."""
        self.core.go(Phase.JOINING, now)
        self.announce_at = now + self.job.settings.announce_s
        if 0 < len(self.job.members) < self.job.settings.min_nodes:
            self._announce(now)

    def _announce(self, now: float) -> None:
        self.announce_at = None
        more = self.job.settings.min_nodes - self.job.members.ready
        awaited = f"{more} more" if more > 0 else "the rest of a segment"
        self.say(f"{self._missing()}; waiting up to {self.join_by - now:.0f} s for {awaited}")

    def _missing(self) -> str:
        s, members = self.job.settings, self.job.members
        if s.segment and members.ready >= s.min_nodes:
            return members.missing_segments(s.min_nodes, s.segment)
        return members.missing(s.expected, s.min_nodes)

    # --- planning -------------------------------------------------------------------------------------------

    def _plan_if_possible(self, now: float) -> None:
        """Plan a restart with enough nodes at once; the first cycle when all nodes are here, or after a last call.

        A restart that would move a segment elsewhere first waits a moment for nodes that are still being checked.
        """
        job, s, state = self.job, self.job.settings, self.core.state
        if state is Phase.PAUSED:
            return
        if not job.members.enough(s.min_nodes, s.segment):
            if state is Phase.LAST_CALL:
                self._wait(now)
        elif (not job.fresh and not self._may_improve()) or job.members.ready >= job.nodes_left or self._are_all_here():
            self._start(now)
        elif state is Phase.JOINING:
            self.last_call_until = min(now + s.last_call_s, self.join_by)
            if job.fresh and job.quorum.needed and job.inherited.last_cycle >= 0:
                # A member registers before its lease is over.
                self.last_call_until = min(self.last_call_until, max(now, job.quorum.fenced_until()))
            self.core.go(Phase.LAST_CALL, now)

    def _start(self, now: float) -> None:
        """A cycle of an older term that did not go on has failed, and costs a restart like any other."""
        if self.job.fresh and self.job.inherited.last_cycle >= 0:
            self.core.go(Phase.TAKEOVER, now)
            return
        job, s = self.job, self.job.settings
        if job.quorum.needed and self._is_fenced(now):
            return
        placement = self._placement()
        if job.fresh and s.tracks_progress:
            self.core.emit(ev.ReadProgress(-1))
        job.cycle = max(job.cycle, job.inherited.last_cycle) + 1
        job.fresh, job.faults = False, {}
        self._send_plans(placement, now)

    def _placement(self) -> Placement:
        """Of the ready nodes, which are enough."""
        job, s = self.job, self.job.settings
        ready = job.members.ready_nodes()
        most = min(len(ready), s.max_active or len(ready)) if job.min_healthy else s.min_nodes
        placement = place(ready, job.assignment.places, max(most, s.min_nodes), s.segment)
        assert placement is not None
        return placement

    def _may_improve(self) -> bool:
        """Whether an active node would lose its place, while nodes that may keep its segment whole are not ready."""
        job = self.job
        if not job.settings.segment or job.members.ready == len(job.members):
            return False
        return not set(job.assignment.places.values()).isdisjoint(self._placement().spares)

    def _are_all_here(self) -> bool:
        """After a takeover: whether every node is ready or proven dead, so that no last call is needed."""
        quorum, members = self.job.quorum, self.job.members
        known = quorum.needed and self.job.inherited.last_cycle >= 0
        return known and members.ready == len(members) and not quorum.missing(members.keys_of_nodes)

    def _is_fenced(self, now: float) -> bool:
        """Whether ranks of an older cycle may run on a node that is not a member, or this may be no quorum."""
        until = self.job.quorum.fenced_until()
        if self.job.quorum.resign_at is None and now >= until:
            self.fenced_until = None
            return False
        if self.fenced_until is None and now < until:
            self.say(f"waiting up to {until - now:.1f} s: ranks may still run on a node that is out of reach")
        self.fenced_until = until if now < until else None
        self.core.go(Phase.JOINING, now)
        return True

    def unfenced(self, now: float) -> None:
        """The plan may have waited for this."""
        self._plan_if_possible(now)

    def _send_plans(self, placement: Placement, now: float) -> None:
        job, s = self.job, self.job.settings
        before = set(job.assignment.places.values())
        active = [job.members[node_id] for node_id in placement.active]
        promoted = [member.node.host for member in active if before and member.node.node_id not in before]
        down_s = job.report.cycle_began(promoted, now)
        job.assignment = Assignment.plan(active, s.term, job.cycle, job.history, s.max_restarts)
        job.assignment.shared = self.elected(job.assignment.plan_for(""))
        self.note_dead()
        took = "" if down_s is None else f"; {in_words(down_s)} after the fault"
        self.say(f"cycle {job.cycle}: {placement.why}{took}")
        for node_id in (*placement.active, *placement.spares):
            self.send_plan(node_id)
        for node_id in placement.active:
            job.members.set_busy(node_id, job.cycle)
        self.core.go(Phase.RUNNING, now)
