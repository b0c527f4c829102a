"""What follows from slow ranks: a sentence, a look at their node, and with --ft-straggler-exclude the end of its part.

A restart that moves ranks to other nodes is an experiment: slowness that stays with the host is the host's, slowness
that stays with the rank is of its work. Only the first is a strike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nvrx_slurm import types as t
from nvrx_slurm.core.account.figures import priced
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.part import Part
from nvrx_slurm.core.coordinator.states import LIVE, OVER, Stage, live_but
from nvrx_slurm.core.machine import rows
from nvrx_slurm.core.straggler.detector import Seat, Slowness, Where
from nvrx_slurm.core.words import in_words
from nvrx_slurm.declared import replace

if TYPE_CHECKING:
    from nvrx_slurm.core.coordinator.assignment import Assignment
    from nvrx_slurm.core.coordinator.exclusion import Exclusion
    from nvrx_slurm.core.coordinator.members import Member
from nvrx_slurm.core.coordinator.roster import Roster

_LISTED = 32
_QUIET = 4  # windows without slow ranks after which it is over
_MOVED = 6  # the same in a new cycle, after which the slowness has not followed the rank
_SHOWN = 8
_WHAT = {
    Where.SWITCH: "all nodes of a switch ({hosts}) work",
    Where.STAGE: "{count} ranks ({ranks}) have more work or are slower: an imbalance, no node's fault. They work",
    Where.ALL: "the whole job, compared with its own past, takes",
}


class Suspects(Part):
    """Handles what the detector finds."""

    table = rows(
        (Stage.RUNNING, ev.SlowSeen, "on_slow", (), "say it; it may cost the node its place"),
        ((Stage.ELECTING, *live_but(Stage.RUNNING), *OVER[:2]), ev.SlowSeen, "ignore", (), "of a cycle that is over"),
        ((*LIVE, *OVER[:2]), t.Examined, "on_examined", (), "say what slows the node down"),
        ((*LIVE, *OVER[:2]), t.Counted, "on_counted", (), "what restarts have cost"),
    )  # fmt: skip

    def __init__(
        self, roster: Roster, exclusion: Exclusion, records: list[t.StragglerRecord]
    ) -> None:
        super().__init__(roster)
        self._exclusion = exclusion
        self._records = records
        self._quiet = 0
        self._last_at = 0.0
        self._costs: tuple[t.CycleCost, ...] = ()
        self._struck: set[str] = set()
        self._placed: dict[
            int, tuple[int, str]
        ] = {}  # rank -> cycle in which it was slow, and its host then

    @property
    def goes_on(self) -> bool:
        """Whether the last record is of what is slow now."""
        return (
            bool(self._records)
            and self._records[-1].cycle == self._job.cycle
            and self._quiet < _QUIET
        )

    @property
    def watches(self) -> bool:
        """Whether it matters that nothing is slow."""
        return self.goes_on or bool(self._placed)

    def on_counted(self, event: t.Counted, now: float) -> None:
        """Keep what the last cycles have cost."""
        self._costs = event.costs

    def on_slow(self, event: ev.SlowSeen, now: float) -> None:
        """Take what one window has shown."""
        found = event.found
        job = self._job
        if event.cycle != job.cycle:
            return
        if found is None:
            went_on = self.goes_on
            self._quiet += 1
            if went_on and not self.goes_on:
                self._say(f"not slow any more: {self._records[-1].what}")
            if event.windows == _MOVED:
                self._settle()
            return
        known = self.goes_on and self._records[-1]
        self._quiet = 0
        if known and (known.where, known.ranks) == (found.where.value, found.ranks):
            lost_s = known.lost_s + found.share * (now - self._last_at)
            self._records[-1] = replace(known, lost_s=lost_s, excess=found.excess)
        else:
            lost_s = known.lost_s if known else 0.0
            self._begin(found, lost_s, now)
        self._last_at = now
        if self._s.straggler_exclude and found.where in (Where.RANK, Where.NODE):
            self._exclude(found, lost_s, now)

    def _begin(self, found: Slowness, lost_s: float, now: float) -> None:
        """Something else is slow than before."""
        follows, what = self._followed(found), sentence(found)
        record = t.StragglerRecord(
            now,
            self._job.cycle,
            found.where.value,
            found.ranks,
            found.hosts,
            what,
            found.excess,
            lost_s,
            follows,
        )
        if len(self._records) >= _LISTED:
            del self._records[0]
        self._records.append(record)
        if found.where not in (Where.RANK, Where.NODE):
            self._say(f"slow: {what}")
            return
        told = {
            "": "",
            "host": "; so was its host with other ranks",
            "rank": "; so was this rank on another host",
        }
        self._say(f"slow: {what}{told[follows]}")
        if follows == "host":
            self._strike(found.hosts[0], what)
        self._placed.update({rank: (self._job.cycle, self._host(rank)) for rank in found.ranks})
        nodes = dict.fromkeys(self._job.assignment.node_of(rank) for rank in found.ranks)
        self._out += [
            ev.SendTo(node, t.Examine(self._job.term, self._job.cycle))
            for node in [*nodes][:_SHOWN]
            if node
        ]

    def _host(self, rank: int) -> str:
        node = self._exclusion.holder(self._job.assignment, rank)
        return "" if node is None else node.host

    def _followed(self, found: Slowness) -> str:
        """What slowness of an earlier cycle has stayed with."""
        before = {
            rank: host for rank, (cycle, host) in self._placed.items() if cycle < self._job.cycle
        }
        if any(rank in before and before[rank] != self._host(rank) for rank in found.ranks):
            return "rank"
        others = {
            host for rank, host in before.items() if self._host(rank) != host
        }  # their rank has left them
        return "host" if others.intersection(found.hosts) else ""

    def _settle(self) -> None:
        """No rank is slow for a while: ranks that were, and have been moved, have left the slowness behind."""
        for rank, (cycle, host) in list(self._placed.items()):
            if cycle < self._job.cycle and self._host(rank) not in ("", host):
                del self._placed[rank]
                self._strike(host, f"rank {rank} was slow there, and is not on {self._host(rank)}")
                for number, one in enumerate(self._records):
                    if rank in one.ranks and one.cycle == cycle:
                        self._records[number] = replace(one, follows="host")

    def _strike(self, host: str, why: str) -> None:
        if host not in self._struck:
            self._struck.add(host)
            self._exclusion.strike((host,), why)

    def on_examined(self, event: ev.FromAgent[t.Examined], now: float) -> None:
        """A node tells what slows it down."""
        member = self._members.get(event.node_id)
        told = event.message.message
        if (
            member is None
            or event.message.cycle != self._job.cycle
            or not told
            or not self._records
        ):
            return
        self._say(f"node {member.node.host}, of a slow rank: {told}")
        self._records[-1] = replace(self._records[-1], signs=told)

    def _exclude(self, found: Slowness, lost_s: float, now: float) -> None:
        """The node leaves with the next restart, or now, where it has cost more than the restarts of this job did."""
        node = self._exclusion.holder(self._job.assignment, found.ranks[0])
        if node is None or len(found.hosts) > 1 or self._records[-1].follows == "rank":
            return
        why = f"its ranks are slow: {self._records[-1].what}"
        costs = [
            one.down_s + one.recomputed_s + one.again_s
            for one in priced(self._ledger.restarts, self._costs)
        ]
        if costs and lost_s > sum(costs) / len(costs):
            cost = f"this has cost {in_words(lost_s)}, a restart costs {in_words(sum(costs) / len(costs))}"
            self._exclusion.by_rule(node, f"{why}; {cost}", now)
        else:
            self._exclusion.after_this_cycle(node, why)


def seats(assignment: Assignment, members: Mapping[str, Member]) -> list[Seat]:
    """Who sits where in a cycle."""
    return [
        Seat(node.host, slot.ranks, node.domain or node.order[:-1] or None)
        for slot in assignment.slots.values()
        if (member := members.get(slot.node_id)) and (node := member.node)
    ]


def sentence(found: Slowness) -> str:
    """What is slow, where, and what it costs."""
    ranks, hosts = (
        ", ".join(map(str, some[:_SHOWN])) + (", ..." if len(some) > _SHOWN else "")
        for some in (found.ranks, found.hosts)
    )
    more, many = f"{100 * found.excess:.0f} % longer", "s" if len(found.ranks) > 1 else ""
    begin = _WHAT.get(found.where, "").format(hosts=hosts, ranks=ranks, count=len(found.ranks))
    if found.where is Where.RANK:
        begin = f"rank{many} {ranks} on node {hosts} work{'' if many else 's'}"
    elif found.where is Where.NODE:
        begin = f"node {hosts} (ranks {ranks}) works"
    than = "" if found.where is Where.ALL else " than the others, which wait"
    return f"{begin} {more}{than}: {100 * found.share:.0f} % of the job's time"
