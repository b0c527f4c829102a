"""Which of the faults of a cycle caused the others, and what is to blame. Pure.

What a fault is counts first, when it became known counts last: a rank that lost its peer often reports sooner than
the peer's node (seed 000; Llama 3 paper, section 3.3.4; L4, FSE 2025).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from nvrx_slurm.types import Blame, Confidence, FaultKind, Finding, RankFault, Remedy, RestartRecord, Role

REPEATS = 3  # equal failures of the user's code that end the job, where the user asks for that
_SIGABRT = 6  # how C++ ends on an uncaught exception, e.g. gloo or NCCL when a peer is gone
_SLACK_S = 60.0
_BAD_NODE = (FaultKind.NODE_LOST, FaultKind.UNHEALTHY, FaultKind.UNKILLABLE)
_NO_FINDING = Finding("", Role.UNCLEAR, Blame.UNKNOWN, Confidence.GUESS, Remedy.RESTART)


class Verdict(NamedTuple):
    """The first cause, and what is to blame for it."""

    cause: RankFault
    rule: str  # "" = none matched
    blame: Blame
    confidence: Confidence
    remedy: Remedy
    ranks: int  # that show the same
    nodes: int

    @property
    def sentence(self) -> str:
        """For people, for example "node n3 is to blame (certain): gpu-ecc"; "" where nothing is known."""
        if not self.rule or self.blame is Blame.UNKNOWN:
            return ""
        what = {Blame.NODE: f"node {self.cause.host}", Blame.USER: "the script or its settings"}
        spread = f", on {self.ranks} ranks of {self.nodes} nodes" if self.ranks > 1 else ""
        return f"{what.get(self.blame, self.blame.value)} is to blame ({self.confidence.value}): {self.rule}{spread}"


def first_cause(faults: Collection[RankFault]) -> RankFault | None:
    """The fault that most likely caused the others, from faults in order of arrival at the coordinator."""
    return min(faults, key=_level, default=None)


def _level(fault: RankFault) -> int:
    """0 is a cause: a lost node, a hang, a rank killed from outside, or what a rule knows as one. Such a fault makes
    the peers fail with errors that can be reported sooner. 2 is a consequence of a fault elsewhere."""
    aborted = fault.kind is FaultKind.SIGNAL and fault.exit_code == -_SIGABRT
    outright = fault.kind is not FaultKind.EXIT and not aborted
    role = _finding(fault).role
    if role is Role.ECHO:
        return 1 if outright else 2
    return 0 if outright or role is Role.CAUSE else 1


def _finding(fault: RankFault) -> Finding:
    """What its agent has found; the sentence about a rank is read here where an agent has found nothing."""
    if fault.finding is None and fault.rank >= 0:
        from nvrx_slurm.core.attribution.evidence import examine  # not at the start: its patterns take 10 ms

        return examine(fault, b"")
    return fault.finding or _NO_FINDING


def judge(faults: Collection[RankFault], job_nodes: int) -> Verdict | None:
    """The verdict on the faults of one cycle; None without any. `job_nodes`: active nodes of that cycle, >= 1."""
    cause = first_cause(faults)
    if cause is None:
        return None
    f = _finding(cause)
    same = [fault for fault in faults if fault is cause or (f.rule and _finding(fault).rule == f.rule)]
    nodes = len({fault.infra_rank for fault in same})
    blame, confidence, remedy = f.blame, f.confidence, f.remedy
    if f.role is Role.ECHO or (not f.rule and cause.kind in _BAD_NODE):
        blame, confidence = (Blame.NODE if cause.kind in _BAD_NODE else Blame.UNKNOWN), Confidence.GUESS
    if nodes == 1 and len(same) > 1 and job_nodes > 1 and _is_of_one_node(f.rule):
        blame, confidence, remedy = Blame.NODE, Confidence.GUESS, Remedy.RESTART
    if remedy is Remedy.ELSEWHERE and nodes > 1:  # several nodes at once: rather their image, or the rule itself
        confidence, remedy = Confidence.LIKELY, Remedy.RESTART
    rule = f.rule or (cause.kind.value if cause.kind in _BAD_NODE else "")
    return Verdict(cause, rule, blame, confidence, remedy, len(same), nodes)


def _is_of_one_node(rule: str) -> bool:
    from nvrx_slurm.core.attribution.signatures import SIGNATURES  # not at the start, as above

    return any(signature.one_node for signature in SIGNATURES if signature.name == rule)


def lacks_module(verdict: Verdict, nodes: int) -> bool:
    """Whether a rank of each of the job's `nodes` ended because Python does not find a module."""
    cause = verdict.cause
    return cause.kind is FaultKind.EXIT and cause.message.startswith("ModuleNotFoundError:") and verdict.nodes == nodes


def repeats(verdict: Verdict, restarts: Sequence[RestartRecord]) -> int:
    """How often in a row the job has failed like this with this one: the same failure of the user's code, on whichever
    rank, after about the same time. A cycle that lasted much longer has got further."""
    f = _finding(verdict.cause)
    if not f.fingerprint or verdict.blame is not Blame.USER:
        return 1
    lasted_s: list[float] = []
    for number in range(len(restarts) - 1, -1, -1):
        old, before = restarts[number], restarts[number - 1] if number else None
        if old.fingerprint != f.fingerprint:
            break
        lasted_s.append(old.at_s - (before.at_s + before.down_s if before is not None else 0.0))
    alike = not lasted_s or max(lasted_s) <= 2 * min(lasted_s) + _SLACK_S
    return 1 + len(lasted_s) if alike else 1
