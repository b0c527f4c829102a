"""A rank of the running cycle hangs: look at all ranks, name the one that the others wait for, and stop the cycle.

The hung rank's monitor waits for this, because its death would wake the ranks that wait for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.part import Part
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.states import Stage
from nvrx_slurm.core.machine import rows
from nvrx_slurm.declared import replace

_ON_THE_WAY_S = 0.2  # for the answers of nodes that took all the time they have


@dataclass
class Search:
    """What is known since the first hang of a cycle. `by`: monotonic seconds.

    `doubted`: a rank makes no steps. All are looked at twice, and go on unless the looks prove a hang.
    """

    first: t.RankFault
    doubted: bool = False
    # node_ids that have yet to answer; there are none between two looks
    pending: set[str] = field(default_factory=set)
    by: float = 0.0
    before: list[t.RankEvidence] | None = None  # the first of two looks
    seen: list[t.RankEvidence] = field(default_factory=list)
    sign_at: dict[int, float] = field(default_factory=dict)  # rank -> its last sign of life


class HangSearch(Part):
    """Handles what agents report about hangs."""

    table = rows(
        (Stage.RUNNING, t.Hung, "on_hung", (), "look at all ranks before any is stopped"),
        (
            Stage.RUNNING,
            t.Evidence,
            "on_evidence",
            (Stage.STOPPING,),
            "when all nodes have answered",
        ),
        (
            Stage.RUNNING,
            ev.Timer,
            "on_timer",
            (Stage.STOPPING,),
            "the answers about a hang take too long",
        ),
    )

    def __init__(self, roster: Roster) -> None:
        super().__init__(roster)
        self.search: Search | None = None

    def on_hung(self, event: ev.FromAgent[t.Hung], now: float) -> None:
        """The first one starts the search; later ones of the cycle are looked at with all others."""
        message = event.message
        any_failed = self._s.policy is t.RestartPolicy.ANY_FAILED
        if message.cycle != self._job.cycle or not any_failed:
            return
        is_known = message.doubted or self.found is not None
        if is_known and self.search is not None:
            return
        self.search = Search(message.fault, message.doubted)
        self._inspect(self.search, now)

    def forget(self) -> None:
        """Another cycle runs."""
        self.search = None

    @property
    def found(self) -> Search | None:
        """The search for the culprit of a hang that is no doubt."""
        return None if self.search is None or self.search.doubted else self.search

    def _inspect(self, search: Search, now: float) -> None:
        """Ask all nodes what their ranks do."""
        job = self._job
        nodes = self._members.not_ready(job.assignment.places.values())
        search.pending = set(nodes)
        search.seen = []
        search.by = now + self._s.hang_collect_s + _ON_THE_WAY_S
        collect = t.Collect(job.term, job.cycle)
        for node_id in sorted(nodes):
            self._send(node_id, collect)

    def on_evidence(self, event: ev.FromAgent[t.Evidence], now: float) -> Stage | None:
        """One node has looked at its ranks."""
        search = self.search
        told = event.message
        if search is None or told.cycle != self._job.cycle:
            return None
        if event.node_id not in search.pending:
            return None
        search.pending.discard(event.node_id)
        search.seen += told.ranks_seen
        for one in told.ranks_seen:
            if one.silent_s >= 0.0:
                search.sign_at[one.rank] = now - one.silent_s
        return None if search.pending else self._end(search, now)

    def on_timer(self, event: ev.Timer, now: float) -> Stage | None:
        """Some nodes have not answered in time, or the second look is due."""
        search = self.search
        assert search is not None
        if search.pending or search.before is None:
            return self._end(search, now)
        self._inspect(search, now)
        return None

    def _end(self, search: Search, now: float) -> Stage | None:
        """All have been looked at."""
        if not search.doubted:
            return self._blame(search, now)
        from nvrx_slurm.core.attribution.standstill import proven, where

        between_s = self._s.look_again_s
        if search.before is None:
            search.before = search.seen
            search.pending = set()  # an answer that comes after this is too late
            search.by = now + between_s
            return None
        if not search.pending and proven(search.before, search.seen, between_s):
            return self._blame(search, now)
        at = where(search.before, search.seen, between_s)
        self._say(f"{search.first.message}, but nothing proves a hang: {at}")
        self.search = None
        return None

    def _blame(self, search: Search, now: float) -> Stage:
        """Compare what has been seen, and fail the cycle. A node that has not answered is a candidate, too."""
        # not at the start: its patterns take 3 ms
        from nvrx_slurm.core.attribution.hang import compare, stack

        job = self._job
        for _, slot in sorted(job.assignment.slots.items()):
            member = self._members.get(slot.node_id)
            if member is not None and slot.node_id in search.pending:
                node = member.node
                unseen = t.RankEvidence(slot.ranks[0], node.infra_rank, node.host, local_rank=0)
                search.seen.append(unseen)
        verdict = compare(search.seen, search.first.rank)
        self._out.append(ev.HangFound(job.cycle, verdict.why, verdict.culprits, tuple(search.seen)))
        cause = verdict.fault
        first = search.first
        if cause is None:
            self._say(f"hang: {verdict.why}")
            stacks = (stack(rank) for rank in search.seen if rank.rank == first.rank)
            cause = replace(first, traceback=next(stacks, ""))
        else:
            whose = ""
            if cause.rank != first.rank:
                whose = f"rank {first.rank} was the first to be seen: "
            cause = replace(cause, message=f"{cause.message} ({whose}{first.message})")
        sign_at = search.sign_at.get(cause.rank, search.sign_at.get(first.rank, now))
        cause = replace(cause, silent_s=now - sign_at)
        self._ledger.add((cause,), job.cycle, now)
        self._ledger.blame(cause)
        return Stage.STOPPING
