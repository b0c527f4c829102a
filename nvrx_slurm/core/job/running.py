"""A cycle runs: faults, successes, and nodes that come and go."""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.verdict import first_cause
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.hangs import HangSearch
from nvrx_slurm.core.job.job_data import ANY, LIVE, Phase, rows
from nvrx_slurm.core.job.part import lost
from nvrx_slurm.core.job.restarts import evidence, headline
from nvrx_slurm.core.machine import Tick
from nvrx_slurm.errors import ExitCode, signal_exit_code

_MINE = (Phase.RUNNING, Phase.LAST_RANKS)


class Running(HangSearch):
    """Owns the states from a plan to the first fault that stops the cycle, or to the success of the job."""

    states = _MINE
    table = rows(
        (_MINE, t.Failed, "on_failed", ANY, "restart, go on, or the end"),
        (Phase.RUNNING, t.Hung, "on_hung", (), "look at all ranks before any is stopped"),
        (Phase.RUNNING, t.Evidence, "on_evidence", (Phase.STOPPING, Phase.FINISHED), "when all nodes have answered"),
        (_MINE, t.Succeeded, "on_succeeded", (Phase.LAST_RANKS, Phase.FINISHED), "the end when all have"),
        (_MINE, t.Stopped, "on_stopped", (*LIVE, Phase.FINISHED), "a returned node is a spare now"),
        (Phase.RUNNING, Tick, "on_tick", (Phase.STOPPING, Phase.FINISHED), "the answers about a hang take too long"),
        (Phase.LAST_RANKS, Tick, "on_tick", (Phase.FINISHED,), "the last ranks take too long"),
    )

    last_ranks_by: float = 0.0

    def enter(self, now: float) -> None:
        """The plans of a cycle have been sent; one that was taken over may be done already."""
        self.job.cycle_started_at, self.search = now, None
        self._finish_if_done(now)

    # --- nodes come and go ----------------------------------------------------------------------------------

    def joined(self, message: t.Register, now: float) -> None:
        """An active node that made its stream anew goes on; any other node is a spare."""
        node, plan, assignment = message.node, message.plan, self.job.assignment
        group_rank = assignment.group_rank(node.node_id)
        if group_rank is None:
            self._joined_as_spare(message, now)
            return
        current = plan is not None and plan.cycle == self.job.cycle
        goes_on = current and message.doing in (t.Doing.RUNNING, t.Doing.SUCCEEDED)
        if goes_on and group_rank not in assignment.gone:
            self.send_plan(node.node_id)
            if message.doing is t.Doing.SUCCEEDED:
                self._note_success(group_rank, message.early, now)
            elif message.faults:
                self._node_failed(group_rank, message.faults, now)
        elif group_rank in assignment.gone:  # the others were told that its ranks are dead
            self.stop_old_workers(message, now)
        elif group_rank not in assignment.succeeded:
            unseen = lost(node, "its agent had no coordinator for a while and stopped its workers")
            self._node_failed(group_rank, (current and message.faults) or (unseen,), now, gone=True)

    def _joined_as_spare(self, message: t.Register, now: float) -> None:
        if message.busy:
            self.stop_old_workers(message, now)
        else:
            self.say(f"node {message.node.host} joined as a spare")
            self.send_plan(message.node.node_id)

    def left(self, node: t.Node, fault: t.RankFault, now: float) -> None:
        """A fault, unless the node was a spare or is past its part in the cycle."""
        assignment = self.job.assignment
        group_rank = assignment.group_rank(node.node_id)
        if group_rank is not None and group_rank not in assignment.succeeded | assignment.gone:
            self._node_failed(group_rank, (fault,), now, gone=True)

    # --- what agents report ---------------------------------------------------------------------------------

    def on_failed(self, event: ev.FromAgent[t.Failed], now: float) -> None:
        """Ranks failed on an active node."""
        group_rank = self._active(event)
        if group_rank is None:
            return
        if event.message.faults:
            self._node_failed(group_rank, event.message.faults, now)
        else:
            self.refuse(event.node_id, "it reported a failure without a fault", now)

    def on_succeeded(self, event: ev.FromAgent[t.Succeeded], now: float) -> None:
        """One node is done."""
        group_rank = self._active(event)
        if group_rank is not None:
            self._note_success(group_rank, event.message.early, now)

    def stopped(self, node_id: str, now: float) -> None:
        """A returned node has stopped its old workers: it is a spare. An active one has stopped by itself, or
        (min-healthy) has lost its last worker."""
        assignment = self.job.assignment
        group_rank = assignment.group_rank(node_id)
        if group_rank is None:
            self.send_plan(node_id)
        elif group_rank in assignment.broken:
            self._finish_if_done(now)
        elif group_rank not in assignment.succeeded:
            unasked = lost(self.job.members[node_id].node, "it stopped its workers unasked")
            self._node_failed(group_rank, (unasked,), now, gone=True)

    def _active(self, event: ev.FromAgent[t.Failed | t.Succeeded]) -> int | None:
        """The group rank of the sender, if it takes part in the running cycle and speaks of that one."""
        group_rank = self.job.assignment.group_rank(event.node_id)
        current = event.message.cycle == self.job.cycle and event.node_id in self.job.members
        return group_rank if current and group_rank not in self.job.assignment.gone else None

    # --- what follows ---------------------------------------------------------------------------------------

    def _node_failed(self, group_rank: int, faults: Sequence[t.RankFault], now: float, gone: bool = False) -> None:
        """Something happened to an active node; `gone`: none of its workers is left."""
        job, assignment = self.job, self.job.assignment
        self.job.add_faults(faults, now)
        if not job.min_healthy:
            self.fail_cycle(first_cause(job.faults), now)
            return
        assignment.broken.add(group_rank)
        dead = tuple(fault.rank for fault in faults if fault.rank >= 0)
        if gone:
            assignment.gone.add(group_rank)
            assignment.succeeded.discard(group_rank)
            dead = assignment.slots[group_rank].ranks
        what = headline(faults[0])
        self._tell_wrappers(group_rank, dead, what)
        if assignment.good < job.settings.min_nodes:
            self.fail_cycle(faults[0], now)
        elif not self._finish_if_done(now):
            some = f"{assignment.good} of {assignment.planned} nodes are good, {job.settings.min_nodes} are needed"
            self.say(f"{what}; going on: {some}{evidence(faults[0])}")

    def _tell_wrappers(self, group_rank: int, ranks: tuple[int, ...], why: str) -> None:
        """The in-process wrappers of the other nodes need not wait for a heartbeat to be late."""
        for other, slot in self.job.assignment.slots.items():
            if ranks and other != group_rank and slot.node_id in self.job.members:
                self.send(slot.node_id, t.RanksGone(self.job.cycle, ranks, why))

    def _note_success(self, group_rank: int, early: bool, now: float) -> None:
        self.job.assignment.succeeded.add(group_rank)
        self.job.assignment.early = self.job.assignment.early or early
        self._finish_if_done(now)

    def _finish_if_done(self, now: float) -> bool:
        """The end once enough nodes are done. The last ranks of nodes with a fault may be about to end well, too."""
        job, assignment = self.job, self.job.assignment
        enough = job.settings.min_nodes if job.min_healthy else len(assignment)
        if assignment.healthy or len(assignment.succeeded) < enough:
            return False
        some_run = any(job.members.may_run(assignment.places[g]) for g in assignment.broken - assignment.gone)
        if some_run and self.core.state is Phase.RUNNING:
            self.last_ranks_by = now + job.settings.stop_timeout_s
            self.core.go(Phase.LAST_RANKS, now)
        elif not some_run or now >= self.last_ranks_by:
            self._succeed(now)
        return True

    def _succeed(self, now: float) -> None:
        if self.job.assignment.early:
            warning = self.job.warning
            signum = warning.signum if warning is not None else self.job.settings.warning_signum
            self.finish(t.Finish(signal_exit_code(signum), "the ranks were warned, saved their work and ended"), now)
        else:
            self.finish(t.Finish(ExitCode.OK, "all ranks finished"), now)

    def timer_at(self) -> float | None:
        """How long the last ranks of nodes with a fault may take to end, or nodes to answer about a hang."""
        if self.core.state is Phase.LAST_RANKS:
            return self.last_ranks_by
        return None if self.search is None else self.search.by

    def on_timer(self, now: float) -> None:
        """They have taken too long."""
        if self.core.state is Phase.LAST_RANKS:
            self._succeed(now)
        else:
            self.end_search(now)
