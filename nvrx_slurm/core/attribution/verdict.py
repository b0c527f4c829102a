"""Which of the faults of a cycle caused the others, and what is to blame. Pure.

What a fault is counts first, when it became known counts last: a rank that lost its peer often reports sooner than
the peer's node (Llama 3 paper, section 3.3.4; L4, FSE 2025).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nvrx_slurm.core.attribution.named_node import in_words
from nvrx_slurm.core.attribution.raised import RAISED
from nvrx_slurm.core.attribution.recurrence import repeats
from nvrx_slurm.types import (
    Alike,
    Blame,
    Confidence,
    FaultKind,
    Finding,
    LineRole,
    RankFault,
    Remedy,
    RestartRecord,
)

if TYPE_CHECKING:
    from nvrx_slurm.core.attribution.signatures import Signature

_SIGTERM = 15
_SIGABRT = 6  # how C++ ends on an uncaught exception, e.g. gloo or NCCL when a peer is gone
_STOPPED = "stopped"  # the rule of exceptions that handlers of SIGTERM and SIGINT raise
_BAD_NODE = (FaultKind.NODE_LOST, FaultKind.UNHEALTHY, FaultKind.UNKILLABLE)
_OF_NODE = (*_BAD_NODE, FaultKind.EXCLUDED)
_BY_SIGNAL = 128  # a shell's exit code for a child that a signal ended is more
_SURE = 2  # the highest `_level` of what a rank does not do because of another one
_FULL = (
    "disk-full",
    "checkpoint-not-written",
)  # rules of a full disk, which stays full until somebody frees it
_MOST_ALIKE = 8  # nodes
_NO_FINDING = Finding("", LineRole.UNCLEAR, Blame.UNKNOWN, Confidence.GUESS, Remedy.RESTART)


class JudgedCause(NamedTuple):
    """The first cause, and what is to blame for it."""

    cause: RankFault
    rule: str  # "" = none matched
    blame: Blame
    confidence: Confidence
    remedy: Remedy
    ranks: int  # that show the same
    nodes: int
    one_node: bool = False  # a single node may lack what the rule is about
    times: int = 1  # in a row that the job has failed like this
    fingerprint: str = ""
    alone: bool = False  # as far as this cycle tells, it may be the node's own failure
    alike: tuple[Alike, ...] = ()  # or that of these nodes as well

    @property
    def sentence(self) -> str:
        """For people, for example "node n3 is to blame (certain): gpu-ecc"; "" where nothing is known."""
        if not self.rule or self.blame is Blame.UNKNOWN:
            return ""
        # a line may tell of another node than the one that prints it
        node = in_words(_finding(self.cause).node or self.cause.host)
        who = {Blame.NODE: node, Blame.USER: "the script or its settings"}
        to_blame = f"{who.get(self.blame, self.blame.value)} is to blame"
        spread = f", on {self.ranks} ranks of {self.nodes} nodes" if self.ranks > 1 else ""
        return f"{to_blame} ({self.confidence.value}): {self.rule}{spread}"


def first_cause(faults: Collection[RankFault]) -> RankFault | None:
    """The fault that most likely caused the others, from faults in order of arrival at the coordinator."""
    return min(faults, key=_level, default=None)


def _level(fault: RankFault) -> float:
    """The order of evidence.

    0, 0.1: facts about a node, or from Slurm.
    0.3, 0.6: Megatron-LM rejects a result, and says why or does not; ranks may crash as they end then.
    1: a hang, or a signal that no program sends itself.
    2, 3: an error of the rank's own, sure or not.
    4: one of the network or of a library, which a dead peer may bring about.
    5, 6: a consequence.
    """
    f = _finding(fault)
    if fault.rejects:
        return 0.3 if f.role is LineRole.CAUSE else 0.6
    aborted = fault.kind is FaultKind.SIGNAL and fault.exit_code == -_SIGABRT
    outright = fault.kind is not FaultKind.EXIT and not aborted
    if f.role is LineRole.ECHO:
        return 5 if outright else 6
    is_fact = f.role is LineRole.CAUSE and f.blame in (Blame.NODE, Blame.SLURM)
    if fault.kind in _OF_NODE or is_fact:
        return 0.1 if f.node else 0  # the coordinator's own knowledge of a lost node goes first
    if outright or fault.exit_code > _BY_SIGNAL:
        return 1
    is_unclear = f.role is LineRole.UNCLEAR
    if f.blame is Blame.NETWORK or (f.blame is Blame.UNKNOWN and is_unclear):
        return 4
    return 3 if is_unclear and f.confidence is Confidence.GUESS else 2


def is_victim(fault: RankFault) -> bool:
    """Whether an error only follows from the end of another rank; False where it follows from a signal."""
    f = fault.finding
    if f is None or f.role is not LineRole.ECHO:
        return False
    by_signal = f.rule == _STOPPED or f.blame is Blame.SLURM
    return not by_signal and not is_told_to_end(fault)


def is_told_to_end(fault: RankFault) -> bool:
    """Whether a rank has only done what SIGTERM asks for."""
    is_term = fault.exit_code in (-_SIGTERM, _BY_SIGNAL + _SIGTERM)
    return is_term and _finding(fault).role is LineRole.ECHO


def _finding(fault: RankFault) -> Finding:
    """What its agent has found.

    Where an agent has found nothing, the sentence about a rank is read here, by the built-in rules: `nvrx replay` does
    not have the site's.
    """
    if fault.finding is None and fault.rank >= 0:
        # not at the start: it takes 10 ms
        from nvrx_slurm.core.attribution.evidence import examine
        from nvrx_slurm.core.attribution.signatures import SIGNATURES

        return examine(fault, b"", signatures=SIGNATURES)
    return fault.finding or _NO_FINDING


def judge(
    faults: Collection[RankFault], job_nodes: int, restarts: Sequence[RestartRecord] = ()
) -> JudgedCause | None:
    """The verdict on the faults of one cycle; None without any. `job_nodes`: active nodes of that cycle."""
    cause = first_cause(faults)
    if cause is None:
        return None
    f = _finding(cause)
    same = [fault for fault in faults if fault is cause or _are_alike(f, _finding(fault))]
    nodes = len({fault.infra_rank for fault in same})
    blame, confidence, remedy = f.blame, f.confidence, f.remedy
    echo = f.role is LineRole.ECHO
    is_bad_node = cause.kind in _BAD_NODE
    if echo or (is_bad_node and not f.rule):
        blame = Blame.NODE if is_bad_node else f.blame
        confidence = Confidence.GUESS
    rule, spawn = _signature(f.rule), cause.kind is FaultKind.SPAWN
    one_node = rule is not None and rule.one_node
    lacks = spawn or (one_node and len(same) > 1)
    if lacks and nodes == 1 and job_nodes > 1:
        blame, confidence, remedy = Blame.NODE, Confidence.GUESS, Remedy.RESTART
    # several nodes at once: rather their image, or the rule itself
    elsewhere = f.node not in (
        "",
        cause.host,
    )  # nor leaves the node that prints what another one has
    if remedy is Remedy.ELSEWHERE and (nodes > 1 or elsewhere):
        confidence, remedy = Confidence.LIKELY, Remedy.RESTART
    alike = _others(same, cause, job_nodes) if nodes > 1 and _is_own(cause, f) else ()
    return JudgedCause(
        cause=cause,
        rule=f.rule or (cause.kind.value if is_bad_node or spawn else ""),
        blame=blame,
        confidence=confidence,
        remedy=remedy,
        ranks=len(same),
        nodes=nodes,
        one_node=one_node,
        times=repeats(f.fingerprint, restarts) if blame is Blame.USER or f.rule in _FULL else 1,
        fingerprint=f.fingerprint,
        alone=_is_own(cause, f) and (nodes == 1 or len(alike) > 0),
        alike=alike,
    )


def _is_own(cause: RankFault, f: Finding) -> bool:
    """Whether a failure may be its node's own."""
    echo = f.role is LineRole.ECHO
    # a KeyError and its like is no node's doing
    code = f.rule == RAISED and f.confidence is Confidence.LIKELY
    # perhaps not the first one
    any_rank = cause.rejects or (cause.kind is FaultKind.HANG and cause.finding is None)
    is_here = f.node in ("", cause.host)  # what its line tells
    return cause.host != "" and is_here and not (echo or code or any_rank)


def _others(same: Sequence[RankFault], cause: RankFault, job_nodes: int) -> tuple[Alike, ...]:
    """The nodes that fail together with the one of the cause, where they are at most half of the active ones.

    () where it may be a consequence of another rank's end, which can come to any node.
    """
    first = {fault.infra_rank: fault for fault in reversed(same)}
    if _level(cause) > _SURE or len(first) > min(_MOST_ALIKE, job_nodes // 2):
        return ()
    others = sorted(first.keys() - {cause.infra_rank})
    return tuple(Alike(n, first[n].host, first[n].rank) for n in others)


def _are_alike(one: Finding, other: Finding) -> bool:
    """Whether two ranks show the same: the same rule, or the same failure where no rule knows more than its kind."""
    if one.rule not in ("", RAISED):
        return one.rule == other.rule
    return one.fingerprint != "" and one.fingerprint == other.fingerprint


def owners_of(rule: str, blame: Blame) -> list[Blame]:
    """Whose the failure may be: two where the text cannot tell."""
    found = _signature(rule)
    second = found.or_blame if found is not None and found.blame is blame else None
    return [blame, second] if second else [blame]


def _signature(rule: str) -> Signature | None:
    from nvrx_slurm.core.attribution.rules import named  # not at the start, as above

    return named(rule) if rule else None
