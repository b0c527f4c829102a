"""How the ranks of a node spent their time in a cycle, from what their pages say. Pure; seconds of the node's clock.

A rank can write anything to its page: times outside its life count as never.
"""

from __future__ import annotations

from collections.abc import Collection

from nvrx_slurm.declared import Record
from nvrx_slurm.types import FaultKind, SectionTime, Spent

_MOST_SECTIONS = 16
_STUCK = 3.0  # a rank that was silent for so many of its steps was stuck before it ended
_LONGER = 1.5  # than the others: a first step with warm-up


class RankTimes(Record):
    """One rank. 0 = never; all times are in its life, from `released_s` to `until_s`."""

    released_s: float
    until_s: float  # its end, or now
    init_s: float = 0.0  # init_workload_monitoring(), or when the optimizers were imported whose steps are counted
    first_s: float = 0.0  # heartbeat, or "step", or step of an optimizer
    second_s: float = 0.0  # the same without "step"
    last_s: float = 0.0
    turn_s: float = 0.0  # a section began or ended
    saved_s: float = 0.0
    before_s: float = 0.0  # in sections other than "step" before `first_s`
    after_s: float = 0.0  # the same after `saved_s`
    beats: int = 0  # or steps
    longest_s: float = 0.0  # pause between two steps of an optimizer; 0 = it tells more itself
    reached: int = -1  # iteration; -1 = not known
    counts: bool = False  # its steps are seen, so that it has not trained where there is none
    suspended_s: float = 0.0
    sections: tuple[SectionTime, ...] = ()
    section: str = ""  # the open section that began last
    since_s: float = 0.0  # when it did

    @property
    def pace_s(self) -> float:
        """Mean time between heartbeats after the second; 0 = not known."""
        return (
            (self.last_s - self.second_s) / (self.beats - 2)
            if self.beats > 2 and self.second_s
            else 0.0
        )

    def silent_s(self, kind: FaultKind, now_s: float) -> float:
        """From its last sign of life until `now_s`. The end of a rank that did not hang is such a sign, unless it was
        silent for several of its steps before that."""
        sign_s = max(self.released_s, self.init_s, self.last_s, self.turn_s)
        stuck = (
            self.pace_s > 0.0 and not self.section and self.until_s - sign_s > _STUCK * self.pace_s
        )
        return max(0.0, now_s - (sign_s if kind is FaultKind.HANG or stuck else self.until_s))


def node_spent(
    ranks: Collection[RankTimes],
    plan_s: float,
    now_s: float,
    term: int,
    cycle: int,
    template_s: float = 0.0,
) -> Spent:
    """The record for the coordinator. The slowest rank of the node counts for each phase.

    `template_s`: how long the start waited for a template that imports; it is a part of the imports.
    """
    if not ranks:
        return Spent(term, cycle)
    released_s = max(rank.released_s for rank in ranks)
    init_s = max(rank.init_s for rank in ranks)
    first_s = max(rank.first_s for rank in ranks)
    saved = [rank.saved_s for rank in ranks if rank.saved_s]
    longest: dict[str, SectionTime] = {}
    for section in (section for rank in ranks for section in rank.sections):
        if section.name not in longest or section.took_s > longest[section.name].took_s:
            longest[section.name] = section
    return Spent(
        term,
        cycle,
        start_s=max(0.0, released_s - plan_s - template_s),
        import_s=max(0.0, init_s - released_s) + template_s if init_s else -1.0,
        init_s=max(0.0, first_s - init_s - min(rank.before_s for rank in ranks))
        if init_s and first_s
        else -1.0,
        reload_s=max(_longer_s(rank) for rank in ranks),
        suspended_s=max(rank.suspended_s for rank in ranks),
        saved_s=now_s - min(saved) if saved else -1.0,
        after_s=max(rank.after_s for rank in ranks),
        sections=tuple(sorted(longest.values(), key=lambda one: -one.took_s)[:_MOST_SECTIONS]),
        reached=max(rank.reached for rank in ranks),
        idle=not first_s and any(rank.counts for rank in ranks),
    )


def _longer_s(rank: RankTimes) -> float:
    first_s = rank.second_s - rank.first_s
    return first_s - rank.pace_s if rank.pace_s and first_s > _LONGER * rank.pace_s else 0.0
