"""What ranks, people and Slurm ask of the job, in all states before the end."""

from __future__ import annotations

from typing import ClassVar

from nvrx_slurm import types as t
from nvrx_slurm.core.duration import in_words
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.job_data import ANY, LIVE, OVER, STOPPING, Phase, rows
from nvrx_slurm.core.job.part import JobPart
from nvrx_slurm.core.job.restarts import headline
from nvrx_slurm.core.machine import Row, Table
from nvrx_slurm.errors import ExitCode

_UNSCORED = tuple(phase for phase in LIVE if phase not in STOPPING)


class Requests(JobPart):
    """Handles workload control requests, warnings, the end on request, and answers of the coordinator's program."""

    table: ClassVar[Table] = rows(
        (LIVE, ev.GotAsked, Row("on_asked", ANY, "exclude, shut down or go on")),
        (LIVE, ev.GotWarnJob, Row("on_warn_job", (), "tell all agents")),
        (LIVE, ev.GotEndJob, Row("on_end_job", OVER, "told to end")),
        (LIVE, ev.TimeLeft, Row("on_time_left", OVER, "warn, stop or wait")),
        (_UNSCORED, ev.ProgressRead, Row("on_progress", (), "where the job begins; a late answer")),
    )

    def on_asked(self, event: ev.GotAsked, now: float) -> None:
        """A rank wants its node out, or the job to end."""
        member, asked = self.job.members.get(event.node_id), event.message
        if member is None:
            return
        by = f"rank {asked.rank}" if asked.rank >= 0 else "a health check"
        asker = f"{by} on node {member.node.host}"
        if asked.action is t.WorkloadAction.ShutdownWorkload:
            why = f"{asker} asked to shut down the workload: {asked.description}"
            self.finish(t.Finish(self.job.settings.limits.no_restart_code, why), now)
        elif asked.action is t.WorkloadAction.ExcludeThisNode:
            self._exclude(member.node, asked.rank, asked.description, now)
        else:
            self.say(f"{asker} asked to continue: {asked.description}")

    def _exclude(self, node: t.Node, rank: int, why: str, now: float) -> None:
        """The node leaves at once and is not taken again; the job ends if no node can ever take its place. `rank`: the
        rank that asked; -1 = a health check of the node failed."""
        job = self.job
        kind = t.FaultKind.EXCLUDED if rank >= 0 else t.FaultKind.UNHEALTHY
        fault = t.RankFault(kind, node.host, node.infra_rank, rank, message=why)
        job.budget.exclude(node)
        if job.nodes_left < job.settings.min_nodes:
            job.add_fault(fault, now)
            needed = f"{job.settings.min_nodes} are needed"
            some = f"{job.nodes_left} nodes are left after the exclusion of {node.host}, {needed}"
            job.members.remove(node.node_id)
            self.send_away(node.node_id, headline(fault))
            self.finish(t.Finish(ExitCode.TOO_FEW_NODES, f"{some}: {headline(fault)}"), now)
            return
        if self.core.state is not Phase.RUNNING or job.assignment.group_rank(node.node_id) is None:
            self.say(headline(fault))  # otherwise that is why the cycle has failed
        self.refuse(node.node_id, headline(fault), now, fault)

    def on_progress(self, event: ev.ProgressRead, now: float) -> None:
        """The checkpoint that the job begins with. The answer about a failed cycle comes too late."""
        if event.cycle < 0:
            self.job.budget.begin_at(event.iteration)

    def on_time_left(self, event: ev.TimeLeft, now: float) -> None:
        """Say it once; warn or stop when it is time."""
        clock = self.job.clock
        if event.left_s is not None and not clock.known:
            self.say(f"the allocation ends in {in_words(event.left_s)}")
        self.mind_the_clock(clock.answer(event.left_s, now), now)

    def on_warn_job(self, event: ev.GotWarnJob, now: float) -> None:
        """One agent was warned: all ranks should know."""
        self.warn(t.Warn(event.message.signum, event.message.reason))

    def on_end_job(self, event: ev.GotEndJob, now: float) -> None:
        """Slurm or a person told an agent to end the job."""
        told = event.message
        self.finish(t.Finish(told.code, told.reason, told.signum), now)
