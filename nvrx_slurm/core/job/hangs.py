"""A rank of the running cycle hangs: look at all ranks, name the one that the others wait for, and stop the cycle.

The hung rank's monitor waits for this, because its death would wake the ranks that wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nvrx_slurm import types as t
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.part import JobPart

_ON_THE_WAY_S = 0.2  # for the answers of nodes that took all the time they have


@dataclass
class Search:
    """What is known since the first hang of a cycle. `by`: monotonic seconds."""

    first: t.RankFault
    pending: set[str]  # node_ids that have yet to answer
    by: float
    seen: list[t.RankEvidence] = field(default_factory=list)


class HangSearch(JobPart):
    """The part of `running` that is about hangs."""

    search: Search | None = None

    def on_hung(self, event: ev.FromAgent[t.Hung], now: float) -> None:
        """The first one starts the search; later ones of the cycle are looked at with all others."""
        job, message = self.job, event.message
        if self.search is not None or message.cycle != job.cycle or job.min_healthy:
            return
        nodes = {node_id for node_id in job.assignment.places.values() if job.members.may_run(node_id)}
        self.search = Search(message.fault, set(nodes), now + job.settings.hang_collect_s + _ON_THE_WAY_S)
        for node_id in sorted(nodes):
            self.send(node_id, t.Collect(job.settings.term, job.cycle))

    def on_evidence(self, event: ev.FromAgent[t.Evidence], now: float) -> None:
        """One node has looked at its ranks."""
        search = self.search
        if search is None or event.message.cycle != self.job.cycle or event.node_id not in search.pending:
            return
        search.pending.discard(event.node_id)
        search.seen += event.message.ranks_seen
        if not search.pending:
            self.end_search(now)

    def end_search(self, now: float) -> None:
        """Compare what has been seen, and fail the cycle. A node that has not answered is a candidate, too."""
        from nvrx_slurm.core.attribution.hang import compare, stack  # not at the start: its patterns take 3 ms

        job, search = self.job, self.search
        assert search is not None
        for _, slot in sorted(job.assignment.slots.items()):
            if slot.node_id in search.pending and slot.node_id in job.members:
                node = job.members[slot.node_id].node
                search.seen.append(t.RankEvidence(slot.ranks[0], node.infra_rank, node.host, local_rank=0))
        verdict = compare(search.seen)
        self.core.emit(ev.HangFound(job.cycle, verdict.why, verdict.culprits, tuple(search.seen)))
        cause, first = verdict.fault, search.first
        if cause is None:
            self.say(f"hang: {verdict.why}")
            stacks = (stack(rank) for rank in search.seen if rank.rank == first.rank)
            cause = replace(first, traceback=next(stacks, ""))
        else:
            whose = "" if cause.rank == first.rank else f"rank {first.rank} was the first to be seen: "
            cause = replace(cause, message=f"{cause.message} ({whose}{first.message})")
        job.add_faults((cause,), now)
        self.fail_cycle(cause, now)
