"""The coordinator waits for enough nodes and plans the next cycle: which nodes are active, and which are spares.

With `--ft-segment N` group ranks are given in segments: N of them in a row, all to nodes of one (NVLink) domain.
"""

from __future__ import annotations

from collections.abc import Mapping

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.recurrence import followed, nodes_of, suspects
from nvrx_slurm.core.attribution.recurrence import place as place_of
from nvrx_slurm.core.checkpoint.copies import Resumption
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.assignment import Assignment
from nvrx_slurm.core.coordinator.ending import Ending, cycle_over
from nvrx_slurm.core.coordinator.exclusion import Exclusion
from nvrx_slurm.core.coordinator.members import is_possible, missing
from nvrx_slurm.core.coordinator.placement import Placement, place
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.states import FAILED, CoordinatorSettings, Stage
from nvrx_slurm.core.machine import Entered, Outbox, Say, earliest, rows
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode

_MINE = (Stage.JOINING, Stage.LAST_CALL, Stage.PAUSED)
_OPEN = (Stage.JOINING, Stage.LAST_CALL)
_FIND_S = 2.0  # for a file system to tell which checkpoints there are, before the first plan
_PLANNED = (Stage.LAST_CALL, Stage.RUNNING, Stage.TAKEOVER)


class Gathering:
    """Owns the states from the first agent, or from the end of a failed cycle, to the next plan."""

    states = _MINE
    table = rows(
        (Stage.JOINING, Entered, "on_entered", (Stage.PAUSED, *_PLANNED), "plan at once, or wait for nodes"),
        (Stage.JOINING, ev.Review, "on_review", _PLANNED, "enough nodes may be ready now"),
        (Stage.JOINING, ev.Timer, "on_timer", (Stage.FINISHED,), "say who is missing; the join timeout"),
        (Stage.LAST_CALL, ev.Review, "on_review_in_last_call", (Stage.JOINING, *_PLANNED), "all are here, or too few"),
        (Stage.LAST_CALL, ev.Timer, "on_last_call_over", (Stage.JOINING, *_PLANNED), "start without the rest"),
        (_OPEN, ev.Arrived, "on_arrived", (Stage.TAKEOVER,), "it may run a cycle"),
        (_OPEN, (ev.Available, ev.Cleared, ev.Left), "on_change", (), "one more or fewer"),
        (Stage.PAUSED, ev.Arrived, "on_arrived_in_pause", (), "no cycle starts yet"),
        (Stage.PAUSED, (ev.Available, ev.Cleared, ev.Left), "ignore", (), "no cycle starts yet"),
        (Stage.PAUSED, ev.Timer, "on_pause_over", (Stage.JOINING,), "the pause is over"),
        (_MINE, (t.RanksFailed, t.Succeeded), "ignore", (), "of a cycle that is over"),
    )  # fmt: skip

    def __init__(
        self,
        s: CoordinatorSettings,
        out: Outbox,
        roster: Roster,
        ending: Ending,
        exclusion: Exclusion,
    ) -> None:
        self._s = s
        self._out = out
        self._roster = roster
        self._ending = ending
        self._exclusion = exclusion
        self._members = roster.members
        self._quorum = roster.quorum
        self._job = roster.job
        self._ledger = roster.ledger
        self._budget = roster.budget
        self.join_by = 0.0  # the job ends then where too few nodes are ready
        self._announce_at: float | None = None
        self._last_call_until = 0.0
        self._found_by: float | None = None  # checkpoints are not waited for any longer; None = nobody has asked
        self._fenced_until: float | None = None  # enough nodes are ready, but ranks may still run elsewhere

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
        if self._s.tells_of_cycles and event.was in FAILED:
            self._out.append(cycle_over(self._job, self._ledger, True, now))
        unwanted, self._job.unwanted = self._job.unwanted, None
        if unwanted is not None:
            self._exclusion.by_rule(*unwanted, now)
        return Stage.PAUSED if now < self._job.pause_until else self.begin(now)

    # --- nodes come and go ----------------------------------------------------------------------------------

    def on_arrived(self, event: ev.Arrived, now: float) -> Stage | None:
        """It may complete the nodes that are needed, or begin a takeover."""
        job, message = self._job, event.message
        mine = job.fresh and job.inherited.claim(message)
        if job.inherited.running:
            return Stage.TAKEOVER
        if mine and not message.busy:
            self._ledger.add(message.faults, job.cycle, now)
        elif not mine:
            self._roster.stop_old_workers(message, now)
        self._out.posted.append(ev.Review())
        return None

    def on_arrived_in_pause(self, event: ev.Arrived, now: float) -> None:
        """What it runs is of no use."""
        self._roster.stop_old_workers(event.message, now)

    def on_change(self, event: ev.Left | ev.Available | ev.Cleared, now: float) -> None:
        """One fewer; or a node has passed its preflight, or has stopped workers of an older cycle; or a plan may have
        waited for ranks elsewhere."""
        self._out.posted.append(ev.Review())

    def on_review(self, event: ev.Review, now: float) -> Stage | None:
        """Plan if that is possible now."""
        return self._plan_if_possible(now)

    def on_review_in_last_call(self, event: ev.Review, now: float) -> Stage | None:
        """The same; the call is not made again."""
        if not self._is_possible():
            return self._wait(now)
        return self._start(now) if self._is_time() else None

    # --- waiting --------------------------------------------------------------------------------------------

    def timer_at(self, state: Stage) -> float | None:
        """The end of the join timeout and the announcement, of the last call, or of the pause."""
        if state is Stage.PAUSED:
            return self._job.pause_until
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
            self._out.posted.append(ev.Review())
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
        awaited = f"{more} more" if more > 0 else "the rest of a segment"
        self._out.append(Say(f"{self.missing()}; waiting up to {self.join_by - now:.0f} s for {awaited}"))

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
        if job.fresh and self._s.finds_checkpoints and self._found_by is None and len(self._members):
            self._found_by = now + _FIND_S
            self._out.append(ev.ReadProgress(-1))
        if not self._is_possible():
            return None
        if self._is_time():
            return self._start(now)
        self._last_call_until = min(now + self._s.last_call_s, self.join_by)
        if job.fresh and self._quorum.needed and job.inherited.last_cycle >= 0:
            # A member registers before its lease is over.
            self._last_call_until = min(self._last_call_until, max(now, self._quorum.fenced_until()))
        return Stage.LAST_CALL

    def _is_possible(self) -> bool:
        """Whether the ready nodes are enough."""
        s, members = self._s, self._members
        enough = members.ready >= s.min_nodes
        return enough and (not s.segment or is_possible(members.ready_nodes(), s.min_nodes, s.segment))

    def _is_time(self) -> bool:
        """Whether nothing can be gained by waiting for further nodes."""
        if not self._job.fresh and not self._may_improve():
            return True
        return self._members.ready >= self._roster.nodes_left or self._are_all_here()

    def _start(self, now: float) -> Stage:
        """A cycle of an older term that did not go on has failed, and costs a restart like any other."""
        job = self._job
        if job.fresh and job.inherited.last_cycle >= 0:
            return Stage.TAKEOVER
        if self._quorum.electors and self._is_fenced(now):
            return Stage.JOINING
        if job.fresh and self._budget.saved is None and now < (self._found_by or 0.0):
            self._fenced_until = self._found_by
            return Stage.JOINING
        placement = self._placement()
        self._tell_of_suspects(placement)
        if job.fresh and self._s.tracks_progress and not self._s.finds_checkpoints:
            self._out.append(ev.ReadProgress(-1))
        job.cycle = max(job.cycle, job.inherited.last_cycle) + 1
        job.fresh = False
        job.elsewhere = False
        job.suspect = ""
        self._ledger.faults = {}
        self._send_plans(placement, now)
        return Stage.RUNNING

    def _placement(self) -> Placement:
        """Of the ready nodes, which are enough."""
        s, ready = self._s, self._members.ready_nodes()
        most = s.min_nodes
        if s.policy is t.RestartPolicy.MIN_HEALTHY:
            most = min(len(ready), s.max_active or len(ready))
        job, active, last = self._job, max(most, s.min_nodes), self._last_resort()
        places, step = self._places(), s.segment if s.segment and s.segment < active else 1
        placement = place(ready, places, active, s.segment, last)
        if job.elsewhere and (not job.suspect or (placement is not None and job.suspect in placement.active)):
            moved = {(g + step) % active: node_id for g, node_id in places.items()}
            found = place(ready, moved, active, s.segment, last)
            why = f"each group rank moves on by {step} of {active} nodes"
            placement = None if found is None else replace(found, why=why)
        assert placement is not None
        return placement

    def _last_resort(self) -> list[str]:
        """Nodes that are active only where others are not enough, the last suspected one last."""
        here = self._members.items()
        found = [n for one in suspects(self._ledger.failures) for n, member in here if place_of(member.node) == one]
        return [self._job.suspect, *found]

    def _places(self) -> Mapping[int, str]:
        """Who had which group rank in the last cycle; or in the one before, where a node has lost its place for nothing
        and can have it back."""
        job = self._job
        back = not job.elsewhere and followed(self._ledger.failures)
        if back and job.before is not None:
            return job.before.places
        return job.assignment.places

    def _tell_of_suspects(self, placement: Placement) -> None:
        """Say that a node has lost its place because its failure has come back, or that this was for nothing."""
        job, failures = self._job, self._ledger.failures
        if job.elsewhere or job.fresh or not failures:
            return
        last = failures[-1]
        replaced = job.assignment.group_ranks.keys() & placement.spares & set(self._last_resort())
        if followed(failures):
            moved = f"the failure of rank {last.rank} has moved from node {failures[-2].host} to node {last.host}"
            self._out.append(Say(f"{moved}: it is the script or its data, not a node"))
            return
        places = {place_of(self._members[node_id].node) for node_id in replaced}
        hosts = tuple(host for rank, host in nodes_of(last) if (rank, host) in places)
        if hosts:
            self._ledger.moved(hosts)
            who = f"node {last.host} alone has failed" if not last.alike else f"{len(last.alike) + 1} nodes fail alike"
            some = "a spare takes its place" if not last.alike else f"spares take the places of {', '.join(hosts)}"
            self._out.append(Say(f"{who} in two of three cycles: {some}"))

    def _may_improve(self) -> bool:
        """Whether an active node would lose its place, while nodes that may keep its segment whole are not ready."""
        if self._members.ready == len(self._members):
            return False
        places = self._job.assignment.places.values()
        if not set(places).isdisjoint(self._last_resort()):
            return True  # a spare that is still being checked should take its place
        if not self._s.segment:
            return False
        return not set(places).isdisjoint(self._placement().spares)

    def _are_all_here(self) -> bool:
        """After a takeover: whether every node is ready or proven dead, so that no last call is needed."""
        quorum, members = self._quorum, self._members
        known = quorum.needed and self._job.inherited.last_cycle >= 0
        return known and members.ready == len(members) and not quorum.missing(members.keys_of_nodes)

    def _is_fenced(self, now: float) -> bool:
        """Whether ranks of an older cycle may run on a node that is not a member, or this may be no quorum."""
        until = self._quorum.fenced_until()
        if self._quorum.resign_at is None and now >= until:
            self._fenced_until = None
            return False
        if self._fenced_until is None and now < until:
            why = "ranks may still run on a node that is out of reach"
            self._out.append(Say(f"waiting up to {until - now:.1f} s: {why}"))
        self._fenced_until = until if now < until else None
        return True

    def _send_plans(self, placement: Placement, now: float) -> None:
        job, s, members = self._job, self._s, self._members
        before = set(job.assignment.places.values())
        job.before = job.assignment
        active = [members[node_id] for node_id in placement.active]
        promoted = [member.node.host for member in active if before and member.node.node_id not in before]
        held = {node_id: kept for node_id in members if (kept := job.held.get(node_id))}
        found = Resumption([member.node for member in active], held, self._budget.history.resume_before)
        history, took = self._ledger.cycle_began(self._budget.history, promoted, now, found.iteration)
        nodes = [(member.node, member.port) for member in active]
        told = [(member.node.host, job.warmth.get(member.node.node_id)) for member in active]
        cold = [f"node {host}: {warmth.reason}" for host, warmth in told if warmth is not None and warmth.reason]
        if not self._budget.may_fork:
            cold.insert(0, "they had to begin again too often")
        plan = Assignment.plan(nodes, job.term, job.cycle, history, s.max_restarts)
        assert plan.shared is not None
        plan.shared = replace(plan.shared, forked=not cold)
        plan.memory = found.plans([members[node_id].node for node_id in placement.spares])
        self._roster.share(plan)
        self._out.append(Say(f"cycle {job.cycle}: {placement.why}{took}"))
        if found.sentence():
            self._out.append(Say(f"cycle {job.cycle}: {found.sentence()}"))
        if cold:  # ranks of two kinds may differ, and then a job may hang
            self._out.append(Say(f"cycle {job.cycle}: all ranks are executed, not forked: {cold[0]}"))
        self._roster.send_plans(placement.active, placement.spares)
