"""A cycle from its plan to its success, or to the fault that stops it: faults, successes, nodes that come and go."""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.said import evidence, headline
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.ending import Ending
from nvrx_slurm.core.coordinator.hangs import HangSearch
from nvrx_slurm.core.coordinator.members import lost
from nvrx_slurm.core.coordinator.part import Part
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.states import RUNS, Stage
from nvrx_slurm.core.machine import Entered, rows
from nvrx_slurm.errors import ExitCode, signal_exit_code


class Running(Part):
    """Owns the states from a plan to the first fault that stops the cycle, or to the success of the job."""

    states = RUNS
    table = rows(
        (Stage.RUNNING, Entered, "on_entered", (), "one that was taken over may be done already"),
        (
            Stage.RUNNING,
            ev.Review,
            "on_review",
            (Stage.LAST_RANKS, Stage.FINISHED),
            "the end when all are done",
        ),
        (Stage.LAST_RANKS, ev.Review, "on_review", (Stage.FINISHED,), "the end when all are done"),
        (
            RUNS,
            ev.Arrived,
            "on_arrived",
            (Stage.STOPPING,),
            "it goes on, is a spare, or has stopped its workers",
        ),
        (Stage.RUNNING, ev.Left, "on_left", (Stage.STOPPING,), "a fault, if it was active"),
        (
            Stage.RUNNING,
            ev.Available,
            "on_available",
            (Stage.STOPPING,),
            "a returned node is a spare now",
        ),
        (Stage.LAST_RANKS, ev.Left, "on_left", (), "it had a fault, or was done"),
        (Stage.LAST_RANKS, ev.Available, "on_available", (), "its last ranks have ended"),
        (RUNS, ev.Cleared, "ignore", (), "no plan waits"),
        (RUNS, t.RanksFailed, "on_failed", (Stage.STOPPING,), "restart, or go on"),
        (RUNS, t.Succeeded, "on_succeeded", (), "the end when all have"),
        (Stage.LAST_RANKS, ev.Timer, "on_timer", (Stage.FINISHED,), "the last ranks take too long"),
    )

    def __init__(self, roster: Roster, ending: Ending, hangs: HangSearch) -> None:
        super().__init__(roster)
        self._ending = ending
        self._hangs = hangs
        self._min_healthy = self._s.policy is t.RestartPolicy.MIN_HEALTHY
        self._last_ranks_by: float | None = None  # in LAST_RANKS

    def on_entered(self, event: Entered, now: float) -> None:
        """The plans of a cycle have been sent."""
        if self._s.tells_of_cycles:
            self._out.append(ev.CycleBegan(self._job.cycle))
        self._job.began(now)
        self._hangs.forget()
        self._last_ranks_by = None
        if event.was is Stage.TAKEOVER:
            self._out.post(ev.Review())

    # --- nodes come and go ----------------------------------------------------------------------------------

    def on_arrived(self, event: ev.Arrived, now: float) -> Stage | None:
        """An active node that made its stream anew goes on; any other node is a spare."""
        message = event.message
        node = event.message.node
        group_rank = self._job.assignment.group_ranks.get(node.node_id)
        if group_rank is not None:
            return self._active_returned(message, group_rank, now)
        if message.busy:
            self._roster.stop_old_workers(message, now)
        else:
            self._say(f"node {node.host} joined as a spare")
            self._roster.send_plan(node.node_id)
        return None

    def _active_returned(self, message: t.Register, group_rank: int, now: float) -> Stage | None:
        assignment = self._job.assignment
        plan = message.plan
        if group_rank in assignment.gone:  # the others were told that its ranks are dead
            self._roster.stop_old_workers(message, now)
            return None
        is_current = plan is not None and plan.cycle == self._job.cycle
        if is_current and message.doing in (t.Activity.RUNNING, t.Activity.SUCCEEDED):
            self._roster.send_plan(message.node.node_id)
            if message.doing is t.Activity.SUCCEEDED:
                self._node_succeeded(group_rank, message.early)
                return None
            return self._node_failed(group_rank, message.faults, now) if message.faults else None
        if group_rank in assignment.succeeded:
            return None
        faults = message.faults if is_current else ()
        if not faults:
            why = "its agent had no coordinator for a while and stopped its workers"
            faults = (lost(message.node, why),)
        return self._node_failed(group_rank, faults, now, gone=True)

    def on_left(self, event: ev.Left, now: float) -> Stage | None:
        """A fault, unless the node was a spare or is past its part in the cycle."""
        assignment = self._job.assignment
        group_rank = assignment.group_ranks.get(event.node_id)
        over = assignment.succeeded | assignment.gone
        if group_rank is None or group_rank in over:
            return None
        return self._node_failed(group_rank, (event.fault,), now, gone=True)

    # --- what agents report ---------------------------------------------------------------------------------

    def on_failed(self, event: ev.FromAgent[t.RanksFailed], now: float) -> Stage | None:
        """Ranks failed on an active node."""
        group_rank = self._active(event)
        if group_rank is None:
            return None
        faults = event.message.faults
        if faults:
            return self._node_failed(group_rank, faults, now)
        self._roster.refuse(event.node_id, "it reported a failure without a fault", now)
        return None

    def on_succeeded(self, event: ev.FromAgent[t.Succeeded], now: float) -> None:
        """One node is done."""
        group_rank = self._active(event)
        if group_rank is not None:
            self._node_succeeded(group_rank, event.message.early)

    def on_available(self, event: ev.Available, now: float) -> Stage | None:
        """A returned node has stopped its old workers: it is a spare. An active one has stopped by itself, or
        (min-healthy) has lost its last worker."""
        assignment = self._job.assignment
        group_rank = assignment.group_ranks.get(event.node_id)
        if group_rank is None:
            self._roster.send_plan(event.node_id)
        elif group_rank in assignment.broken:
            self._out.post(ev.Review())
        elif group_rank not in assignment.succeeded:
            node = self._members[event.node_id].node
            unasked = lost(node, "it stopped its workers unasked")
            return self._node_failed(group_rank, (unasked,), now, gone=True)
        return None

    def _active(self, event: ev.FromAgent[t.RanksFailed | t.Succeeded]) -> int | None:
        """The group rank of the sender, if it takes part in the running cycle and speaks of that one."""
        assignment = self._job.assignment
        group_rank = assignment.group_ranks.get(event.node_id)
        current = event.message.cycle == self._job.cycle and event.node_id in self._members
        return group_rank if current and group_rank not in assignment.gone else None

    # --- what follows ---------------------------------------------------------------------------------------

    def _node_failed(
        self,
        group_rank: int,
        faults: Sequence[t.RankFault],
        now: float,
        gone: bool = False,
    ) -> Stage | None:
        """Something happened to an active node; `gone`: none of its workers is left."""
        needed = self._s.min_nodes
        assignment = self._job.assignment
        ledger = self._ledger
        ledger.add(faults, self._job.cycle, now)
        if not self._min_healthy:
            ledger.blame()
            return Stage.STOPPING
        assignment.failed(group_rank, gone)
        dead = tuple(fault.rank for fault in faults if fault.rank >= 0)
        if gone:
            dead = assignment.slots[group_rank].ranks
        what = headline(faults[0])
        self._tell_wrappers(group_rank, dead, what)
        if assignment.good < needed:
            ledger.blame(faults[0])
            return Stage.STOPPING
        if self._is_done():
            self._out.post(ev.Review())
            return None
        some = f"{assignment.good} of {assignment.planned} nodes are good, {needed} are needed"
        self._say(f"{what}; going on: {some}{evidence(faults[0])}")
        return None

    def _tell_wrappers(self, group_rank: int, ranks: tuple[int, ...], why: str) -> None:
        """The in-process wrappers of the other nodes need not wait for a heartbeat to be late."""
        if not ranks:
            return
        told = t.RanksGone(self._job.cycle, ranks, why)
        for other, slot in self._job.assignment.slots.items():
            if other != group_rank and slot.node_id in self._members:
                self._send(slot.node_id, told)

    def _node_succeeded(self, group_rank: int, early: bool) -> None:
        self._job.assignment.done(group_rank, early)
        self._out.post(ev.Review())

    def _is_done(self) -> bool:
        """Whether enough nodes are done, and all others have a fault."""
        assignment = self._job.assignment
        enough = self._s.min_nodes if self._min_healthy else len(assignment)
        return not assignment.healthy and len(assignment.succeeded) >= enough

    def on_review(self, event: ev.Review, now: float) -> Stage | None:
        """The end, if the cycle is done. The last ranks of nodes with a fault may be about to end well, too."""
        if not self._is_done():
            return None
        assignment = self._job.assignment
        may_run = assignment.broken - assignment.gone
        last = [assignment.places[g] for g in may_run]
        if not self._members.not_ready(last):
            return self._succeed()
        if self._last_ranks_by is None:
            self._last_ranks_by = now + self._s.stop_timeout_s
            return Stage.LAST_RANKS
        return self._succeed() if now >= self._last_ranks_by else None

    def _succeed(self) -> Stage:
        if not self._job.assignment.early:
            return self._ending.decide(t.Finish(ExitCode.OK, "all ranks finished"))
        warning = self._ending.warning
        signum = self._s.warning_signum if warning is None else warning.signum
        why = "the ranks were warned and saved their work"
        return self._ending.decide(t.Finish(signal_exit_code(signum), why))

    def timer_at(self, state: Stage) -> float | None:
        """How long the last ranks of nodes with a fault may take to end, or nodes to answer about a hang."""
        if state is Stage.LAST_RANKS:
            return self._last_ranks_by
        search = self._hangs.search
        return None if search is None else search.by

    def on_timer(self, event: ev.Timer, now: float) -> Stage:
        """The last ranks have taken too long."""
        return self._succeed()
