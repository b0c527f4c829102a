"""Which rank the others wait for: a comparison of what all ranks do at the moment of a hang. Pure.

A hang timeout names the rank that fell silent first, which is often a victim: it waits in a collective for a rank that
never came. ByteRobust (SOSP 2025) and torch's flight recorder analysis compare all ranks instead, as this does.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from nvrx_slurm.types import Blame, Confidence

_MOST_NAMED = 8
_MINORITY = 0.25  # of the ranks: more than these at another place are no outliers
# Frames of a rank that waits for others. Line numbers differ between versions of torch, files and functions hardly do.
_WAITS = re.compile(
    r"/torch/distributed/|/torch/futures/|/torch/_?cuda/.* in (synchronize|wait)|/horovod/|/mpi4py/"
    r"| in (barrier|all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|monitored_barrier|synchronize)$"
)
_STATES = {
    "T": "it is stopped (SIGSTOP, or a debugger)",
    "t": "it is stopped (SIGSTOP, or a debugger)",
    "D": "it is blocked in the kernel: storage or a driver does not answer",
    "Z": "it is dead",
    "": "it does not answer",
}


class Doing(Enum):
    """What a rank does, as far as its evidence tells."""

    ABSENT = "stopped, blocked in the kernel, dead, or without an answer"
    OWN_CODE = "outside any collective"
    WAITS = "in a collective"


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """One rank at the moment of a hang."""

    rank: int
    infra_rank: int
    host: str
    state: str = ""  # of the process in /proc/PID/stat; "" = no answer in time
    moves: bool = False  # it used processor time between two looks
    frames: tuple[str, ...] = ()  # of its main thread, innermost first: "FILE:LINE in FUNCTION"
    section: str = ""  # that its monitor knows as open
    silent_s: float = -1.0  # since its last sign of life; -1 = not known
    iteration: int = -1  # that it reported last

    @property
    def doing(self) -> Doing:
        """What it does. A rank without a stack is taken to wait, unless its process is stopped or blocked."""
        if self.state in _STATES:
            return Doing.ABSENT
        if not self.frames or any(_WAITS.search(frame) for frame in self.frames):
            return Doing.WAITS
        return Doing.OWN_CODE

    @property
    def place(self) -> str:
        """Its innermost frame outside libraries; "" if not known."""
        own = (frame for frame in self.frames if not re.search(r"/(site|dist)-packages/|/lib(64)?/python\d|^<", frame))
        return next(own, self.frames[0] if self.frames else "")


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """What the comparison says. `culprits`: () = not known."""

    culprits: tuple[RankEvidence, ...]
    blame: Blame
    confidence: Confidence
    why: str  # one sentence

    @property
    def node(self) -> tuple[int, str] | None:
        """(infra rank, host) where all culprits are on one node."""
        nodes = {(culprit.infra_rank, culprit.host) for culprit in self.culprits}
        return nodes.pop() if len(nodes) == 1 else None


def compare(ranks: Collection[RankEvidence]) -> HangVerdict:
    """The rank that the others wait for, from the evidence of all ranks that should take part (>= 0 of them)."""
    by_doing = {doing: [rank for rank in ranks if rank.doing is doing] for doing in Doing}
    waiting = len(by_doing[Doing.WAITS])
    for doing in (Doing.ABSENT, Doing.OWN_CODE):
        if by_doing[doing]:
            return _named(by_doing[doing], waiting)
    return _by_place(sorted(ranks, key=lambda rank: rank.rank))


def _named(found: list[RankEvidence], waiting: int) -> HangVerdict:
    culprits = tuple(sorted(found, key=lambda rank: rank.rank))
    first = culprits[0]
    sure = (
        Confidence.LIKELY
        if waiting and len(culprits) <= max(1, int(_MINORITY * (waiting + len(culprits))))
        else Confidence.GUESS
    )
    if not waiting and len(culprits) > 1:  # no rank waits: each may be as slow as the others
        return HangVerdict((), Blame.UNKNOWN, Confidence.GUESS, f"no rank waits for another: {_places(culprits)}")
    blame = Blame.STORAGE if first.state == "D" else Blame.UNKNOWN if first.doing is Doing.ABSENT else Blame.USER
    what = _STATES.get(first.state, "it moves" if first.moves else "it sleeps")
    at = f" at {first.place}" if first.place else ""
    for_s = f", silent for {first.silent_s:.1f} s" if first.silent_s >= 0 else ""
    more = f" (and {len(culprits) - 1} more)" if len(culprits) > 1 else ""
    others = f"{waiting} ranks wait for it" if waiting else "no other rank is known"
    why = f"rank {first.rank} on node {first.host}{more}{at}: {what}{for_s}; {others}"
    return HangVerdict(culprits[:_MOST_NAMED], blame, sure, why)


def _by_place(ranks: Sequence[RankEvidence]) -> HangVerdict:
    """All wait: those that wait at another place than most have skipped a collective, or entered another one."""
    places = Counter(rank.place for rank in ranks)
    iterations = {rank.iteration for rank in ranks}
    if len(places) > 1:
        (most, count), rest = places.most_common(1)[0], len(ranks) - places.most_common(1)[0][1]
        few = tuple(rank for rank in ranks if rank.place != most)
        if rest <= _MINORITY * len(ranks):
            why = f"rank {few[0].rank} on node {few[0].host} waits at {few[0].place}, {count} ranks wait at {most}"
            return HangVerdict(few[:_MOST_NAMED], Blame.USER, Confidence.LIKELY, why)
        why = f"ranks wait for each other: {_places(ranks)}"
        return HangVerdict((), Blame.USER, Confidence.GUESS, why)
    if len(iterations) > 1 and min(iterations) >= 0:
        behind = tuple(rank for rank in ranks if rank.iteration == min(iterations))
        if len(behind) <= _MINORITY * len(ranks):
            why = f"rank {behind[0].rank} on node {behind[0].host} is behind, in iteration {behind[0].iteration}"
            return HangVerdict(behind[:_MOST_NAMED], Blame.UNKNOWN, Confidence.GUESS, why)
    where = f" at {ranks[0].place}" if ranks and ranks[0].place else ""
    return HangVerdict((), Blame.UNKNOWN, Confidence.GUESS, f"all {len(ranks)} ranks wait in one collective{where}")


def _places(ranks: Sequence[RankEvidence]) -> str:
    """ "rank 0 at a.py:1, rank 3 at b.py:2": one rank for each place."""
    first = {rank.place: rank for rank in reversed(ranks)}
    told = [f"rank {rank.rank} at {place or 'an unknown place'}" for place, rank in sorted(first.items())]
    return ", ".join(told[:_MOST_NAMED])
