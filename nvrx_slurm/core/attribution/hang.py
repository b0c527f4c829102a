"""Which rank the others wait for: a comparison of what all ranks do at the moment of a hang. Pure.

A hang timeout names the rank that fell silent first, which is often a victim: it waits in a collective for a rank that
never came. ByteRobust (SOSP 2025) and torch's flight recorder analysis compare all ranks instead, as this does.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from enum import Enum

from nvrx_slurm.declared import Record
from nvrx_slurm.types import (
    Blame,
    Collective,
    Confidence,
    FaultKind,
    Finding,
    LineRole,
    RankEvidence,
    RankFault,
    Remedy,
)

RULE = "hang-culprit"
_MOST_NAMED = 8
_MINORITY = 0.25  # of the ranks: more than these at another place are no outliers
# Frames of a rank that waits for others. Line numbers differ between versions of torch, files and functions hardly do.
_WAITS = re.compile(
    r"/torch/distributed/|/torch/futures/|/torch/_?cuda/.* in (synchronize|wait)|/horovod/|/mpi4py/"
    r"| in (barrier|all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|monitored_barrier|synchronize)$"
)
# The same as the innermost frame: DDP waits in C++. Above it, it may be code of the user.
_DDP_WAITS = re.compile(
    r"/torch/autograd/graph\.py:\d+ in _engine_run_backward$|/torch/nn/parallel/distributed\.py:"
)
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib(64)?/python\d|^<")
_STATES = {
    "T": "it is stopped (SIGSTOP, or a debugger)",
    "t": "it is stopped (SIGSTOP, or a debugger)",
    "D": "it is blocked in the kernel: storage or a driver does not answer",
    "Z": "it is dead",
    "": "its node does not answer",
}


class Doing(Enum):
    """What a rank does, as far as its evidence tells."""

    ABSENT = "stopped, blocked in the kernel, dead, or without an answer"
    OWN_CODE = "outside any collective"
    WAITS = "in a collective"


class HangVerdict(Record):
    """What the comparison says. `culprits`: () = not known; else in the order of ranks, at most 8."""

    culprits: tuple[RankEvidence, ...]
    blame: Blame
    confidence: Confidence
    why: str  # one sentence; about the first culprit where there is one

    @property
    def node(self) -> tuple[int, str] | None:
        """(infra rank, host) where all culprits are on one node, and this is no guess."""
        nodes = {(culprit.infra_rank, culprit.host) for culprit in self.culprits}
        return nodes.pop() if len(nodes) == 1 and self.confidence is not Confidence.GUESS else None

    @property
    def fault(self) -> RankFault | None:
        """The fault of the first culprit; None where none is known."""
        if not self.culprits:
            return None
        rank = self.culprits[0]
        print_ = hashlib.sha256(f"{RULE}\0{place(rank)}".encode()).hexdigest()[:16]
        remedy = Remedy.RESTART if self.node is None else Remedy.ELSEWHERE
        finding = Finding(
            RULE, LineRole.CAUSE, self.blame, self.confidence, remedy, print_, self.why[:300]
        )
        return RankFault(
            FaultKind.HANG, rank.host, rank.infra_rank, rank.rank, rank.local_rank, rank.pid, 0,
            self.why, stack(rank), rank.log, finding,
        )  # fmt: skip


def stack(rank: RankEvidence) -> str:
    """Its frames as faulthandler prints them; "" without any."""
    split = (re.match(r"(.*):(\d+) in (.*)", frame) for frame in rank.frames)
    lines = [f'  File "{found[1]}", line {found[2]} in {found[3]}' for found in split if found]
    return "\n".join(["Current thread (most recent call first):", *lines]) if lines else ""


def doing(rank: RankEvidence) -> Doing:
    """What it does. A rank without a stack is taken to wait, unless its process is stopped or blocked."""
    in_ddp = not rank.moves and any(map(_DDP_WAITS.search, rank.frames[:1]))
    in_call = any(map(_WAITS.search, rank.frames))
    in_collective = in_ddp or in_call or any(c.open for c in rank.collectives)
    # A rank that waits in a collective may be seen in D for a moment: a page is read in, or a driver works.
    if rank.state in _STATES and not (rank.state == "D" and rank.frames and in_collective):
        return Doing.ABSENT
    return Doing.WAITS if in_collective or not rank.frames else Doing.OWN_CODE


def place(rank: RankEvidence) -> str:
    """Its innermost frame outside libraries, else its innermost one; "" if not known."""
    return next(
        (frame for frame in rank.frames if not _LIBRARY.search(frame)), (rank.frames or ("",))[0]
    )


def compare(ranks: Collection[RankEvidence], first: int = -1) -> HangVerdict:
    """The rank that the others wait for, from the evidence of all ranks that should take part (>= 0 of them). `first`:
    the rank that was seen to hang; -1 = none."""
    ranks = sorted(ranks, key=lambda rank: rank.rank)
    found = {kind: [rank for rank in ranks if doing(rank) is kind] for kind in Doing}
    absent = [rank for rank in found[Doing.ABSENT] if rank.state]
    late, what = _late(ranks)
    if late:  # what the flight recorder proves comes before what one look shows
        return _named(late, len(ranks) - len(late), f", and has not entered {what}")
    for some in (
        absent,
        found[Doing.OWN_CODE],
        found[Doing.ABSENT],
    ):  # last, ranks of nodes that do not answer
        if some:
            return _named(some, len(found[Doing.WAITS]))
    mute = [rank for rank in ranks if not rank.frames]
    if any(rank.rank == first for rank in mute) and len(mute) < len(
        ranks
    ):  # it may never have begun
        return _named(mute, len(ranks) - len(mute), ", and shows no stack")
    return _mismatch(ranks) or _deadlock(ranks) or _by_place(ranks)


def _named(found: list[RankEvidence], waiting: int, more: str = "") -> HangVerdict:
    longest_s = max(rank.silent_s for rank in found)
    culprits = [
        rank for rank in found if rank.silent_s < 0 or rank.silent_s >= longest_s / 2
    ]  # the others live
    first = culprits[0]
    if not waiting and len(culprits) > 1:  # no rank waits: each may be as slow as the others
        return _nobody(f"no rank waits for another: {_places(culprits)}")
    few = waiting and len(culprits) <= max(1, int(_MINORITY * (waiting + len(culprits))))
    blame = Blame.UNKNOWN if first.state in _STATES else Blame.USER
    if first.state == "D":
        blame = Blame.STORAGE
    what = _STATES.get(first.state, "it moves" if first.moves else "it sleeps")
    at = f" at {place(first)}" if place(first) else ""
    for_s = f", silent for {first.silent_s:.1f} s" if first.silent_s >= 0 else ""
    same = f"; {len(culprits) - 1} more ranks do the same" if len(culprits) > 1 else ""
    wait = "1 rank waits" if waiting == 1 else f"{waiting} ranks wait"
    others = f"; {wait} for it" if waiting else ""
    sure = Confidence.LIKELY if few and first.state else Confidence.GUESS
    return HangVerdict(
        tuple(culprits[:_MOST_NAMED]), blame, sure, f"{what}{at}{for_s}{more}{others}{same}"
    )


# --- torch's flight recorder ------------------------------------------------------------------------------------


def _fronts(ranks: Sequence[RankEvidence]) -> Iterator[list[tuple[RankEvidence, Collective]]]:
    """For each process group in which a rank waits: the last collective of each of its ranks."""
    groups: dict[str, list[tuple[RankEvidence, Collective]]] = {}
    for rank in ranks:
        for collective in rank.collectives:
            groups.setdefault(collective.group, []).append((rank, collective))
    yield from (members for members in groups.values() if any(last.open for _, last in members))


def _late(ranks: Sequence[RankEvidence]) -> tuple[list[RankEvidence], str]:
    """Ranks that have not entered a collective in which others wait, and that wait in no other; and that collective."""
    for members in _fronts(ranks):
        newest = max((last for _, last in members), key=lambda last: last.seq)
        behind = [rank for rank, last in members if last.seq < newest.seq]
        late = [rank for rank in behind if not any(other.open for other in rank.collectives)]
        if late and len(late) < len(members):
            return late, f"{newest.what} (number {newest.seq} of group {newest.group})"
    return [], ""


def _mismatch(ranks: Sequence[RankEvidence]) -> HangVerdict | None:
    """Ranks of a group that wait in different collectives: a defect of the script."""
    for members in _fronts(ranks):
        at = [(rank, f"{last.what} (number {last.seq})") for rank, last in members if last.open]
        entered = Counter(where for _, where in at)
        if len(entered) > 1:
            most = entered.most_common(1)[0][0]
            few = [(rank, where) for rank, where in at if where != most]
            if len(few) <= max(1, int(_MINORITY * len(members))) and len(members) > 2:
                rank, where = few[0]
                why = (
                    f"it has entered {where} at {place(rank)}, {entered[most]} ranks wait in {most}"
                )
                return HangVerdict(
                    tuple(rank for rank, _ in few[:_MOST_NAMED]), Blame.USER, Confidence.LIKELY, why
                )
            told = ", ".join(
                f"{count} in {where}" for where, count in entered.most_common(_MOST_NAMED)
            )
            why = f"ranks of one group wait in different ones: {told}"
            return HangVerdict((), Blame.USER, Confidence.LIKELY, why)
    return None


def _deadlock(ranks: Sequence[RankEvidence]) -> HangVerdict | None:
    """Ranks that wait in several groups, none of which is known to lack a rank that could go on."""
    waits: dict[str, list[int]] = {}
    for rank in ranks:
        for last in rank.collectives:
            if last.open:
                waits.setdefault(f"{last.what} of group {last.group}", []).append(rank.rank)
    if len(waits) < 2:
        return None
    told = [f"rank {where[0]} ({len(where)} in all) in {what}" for what, where in waits.items()]
    why = f"ranks wait for each other in {len(waits)} groups: {', '.join(told[:_MOST_NAMED])}"
    return _nobody(why, Blame.USER)


def _nobody(why: str, blame: Blame = Blame.UNKNOWN) -> HangVerdict:
    return HangVerdict((), blame, Confidence.GUESS, why)


# --- stacks alone -----------------------------------------------------------------------------------------------


def _by_place(ranks: Sequence[RankEvidence]) -> HangVerdict:
    """All wait: those that wait at another place than most have skipped a collective, or entered another one."""
    places = Counter(place(rank) for rank in ranks)
    if len(places) <= 1:
        where = f" at {place(ranks[0])}" if ranks and place(ranks[0]) else ""
        return _nobody(f"all {len(ranks)} ranks wait in one collective{where}")
    most, count = places.most_common(1)[0]
    few = tuple(rank for rank in ranks if place(rank) != most)
    if len(few) <= _MINORITY * len(ranks):
        why = f"it waits at {place(few[0])}, {count} ranks wait at {most}"
        return HangVerdict(few[:_MOST_NAMED], Blame.USER, Confidence.LIKELY, why)
    return _nobody(f"ranks wait for each other: {_places(ranks)}", Blame.USER)


def _places(ranks: Sequence[RankEvidence]) -> str:
    """ "rank 0 at a.py:1, rank 3 at b.py:2": one rank for each place."""
    first = {place(rank): rank for rank in reversed(ranks)}
    told = [
        f"rank {rank.rank} at {where or 'an unknown place'}"
        for where, rank in sorted(first.items())
    ]
    return ", ".join(told[:_MOST_NAMED])
