"""Which of the faults of a cycle caused the others, where in the user's code it was, and what is to blame. Pure.

What a fault is counts first, when it became known counts last: a rank that lost its peer often reports sooner than
the peer's node (seed 000; Llama 3 paper, section 3.3.4; L4, FSE 2025).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

from nvrx_slurm.types import Blame, Confidence, FaultKind, Finding, LineRole, RankFault, Remedy, RestartRecord

REPEATS = 3  # equal failures of the user's code that end the job, where the user asks for that
_SIGABRT = 6  # how C++ ends on an uncaught exception, e.g. gloo or NCCL when a peer is gone
_SLACK_S = 60.0
_BAD_NODE = (FaultKind.NODE_LOST, FaultKind.UNHEALTHY, FaultKind.UNKILLABLE)
_OF_NODE = (*_BAD_NODE, FaultKind.EXCLUDED)
_BY_SIGNAL = 128  # a shell's exit code for a child that a signal ended is more
_NO_FINDING = Finding("", LineRole.UNCLEAR, Blame.UNKNOWN, Confidence.GUESS, Remedy.RESTART)

_BY_KIND = {
    FaultKind.HANG: "Look at hang.json of the cycle: who waits for whom, and where. A timeout may be too short.",
    FaultKind.NODE_LOST: "Nothing: the job goes on with the other nodes or a spare. Report a node that is lost again.",
    FaultKind.UNHEALTHY: "Report the node: its health check failed.",
    FaultKind.UNKILLABLE: "Report the node: a process there does not end, as with a stuck driver or file system.",
    FaultKind.SPAWN: "Correct path and mode of the program, or the image.",
    FaultKind.SIGNAL: "Look for what killed it: the out-of-memory killer (dmesg, sacct), or a person.",
    FaultKind.EXIT: "Look at its last lines: the program has ended itself with this code.",
}
_CODE = "Correct the script or its data: its exception is above."

_FRAME = re.compile(r'^[ |]*File "([^"\n]+)", line (\d+)(?:,? in (\S+))?', re.MULTILINE)
_LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python\d|/nvrx_slurm/")
_PYTHON = "Traceback (most recent call last)"
_CURRENT = "Current thread "  # of faulthandler's dump, whose frames begin with the most recent call


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
    """The order of evidence. 0: facts about a node, or from Slurm. 1: a hang, or a signal that no program sends itself.
    2, 3: an error of the rank's own, sure or not. 4: one of the network or of a library, which a dead peer may bring
    about. 5, 6: a consequence."""
    f = _finding(fault)
    aborted = fault.kind is FaultKind.SIGNAL and fault.exit_code == -_SIGABRT
    outright = fault.kind is not FaultKind.EXIT and not aborted
    if f.role is LineRole.ECHO:
        return 5 if outright else 6
    if fault.kind in _OF_NODE or (f.role is LineRole.CAUSE and f.blame in (Blame.NODE, Blame.SLURM)):
        return 0
    if outright or fault.exit_code > _BY_SIGNAL:
        return 1
    if f.blame is Blame.NETWORK or (f.blame is Blame.UNKNOWN and f.role is LineRole.UNCLEAR):
        return 4
    return 3 if f.role is LineRole.UNCLEAR and f.confidence is Confidence.GUESS else 2


def _finding(fault: RankFault) -> Finding:
    """What its agent has found. Where an agent has found nothing, the sentence about a rank is read here, by the
    built-in rules: `nvrx replay` does not have the site's."""
    if fault.finding is None and fault.rank >= 0:
        from nvrx_slurm.core.attribution.evidence import examine  # not at the start: it takes 10 ms
        from nvrx_slurm.core.attribution.signatures import SIGNATURES

        return examine(fault, b"", signatures=SIGNATURES)
    return fault.finding or _NO_FINDING


def judge(faults: Collection[RankFault], job_nodes: int, restarts: Sequence[RestartRecord] = ()) -> JudgedCause | None:
    """The verdict on the faults of one cycle; None without any. `job_nodes`: active nodes of that cycle."""
    cause = first_cause(faults)
    if cause is None:
        return None
    f = _finding(cause)
    same = [fault for fault in faults if fault is cause or (f.rule and _finding(fault).rule == f.rule)]
    nodes = len({fault.infra_rank for fault in same})
    blame, confidence, remedy = f.blame, f.confidence, f.remedy
    if f.role is LineRole.ECHO or (not f.rule and cause.kind in _BAD_NODE):
        blame, confidence = (Blame.NODE if cause.kind in _BAD_NODE else Blame.UNKNOWN), Confidence.GUESS
    one_node = _is_of_one_node(f.rule)
    if nodes == 1 and len(same) > 1 and job_nodes > 1 and one_node:
        blame, confidence, remedy = Blame.NODE, Confidence.GUESS, Remedy.RESTART
    if remedy is Remedy.ELSEWHERE and nodes > 1:  # several nodes at once: rather their image, or the rule itself
        confidence, remedy = Confidence.LIKELY, Remedy.RESTART
    rule = f.rule or (cause.kind.value if cause.kind in _BAD_NODE else "")
    times = repeats(f.fingerprint, restarts) if blame is Blame.USER else 1
    return JudgedCause(cause, rule, blame, confidence, remedy, len(same), nodes, one_node, times)


def _is_of_one_node(rule: str) -> bool:
    from nvrx_slurm.core.attribution.rules import named  # not at the start, as above

    found = named(rule)
    return found is not None and found.one_node


def repeats(fingerprint: str, restarts: Sequence[RestartRecord]) -> int:
    """How often in a row the job has failed like this with this one: the same failure of the user's code, on whichever
    rank, after about the same time. A cycle that lasted much longer has got further."""
    if not fingerprint:
        return 1
    lasted_s: list[float] = []
    for number in range(len(restarts) - 1, -1, -1):
        old, before = restarts[number], restarts[number - 1] if number else None
        if old.fingerprint != fingerprint:
            break
        lasted_s.append(old.at_s - (before.at_s + before.down_s if before is not None else 0.0))
    alike = not lasted_s or max(lasted_s) <= 2 * min(lasted_s) + _SLACK_S
    return 1 + len(lasted_s) if alike else 1


# --- what is said of it -----------------------------------------------------------------------------------------------


def headline(fault: RankFault) -> str:
    """One line without the traceback: rank, node and fault."""
    where = f"node {fault.infra_rank} ({fault.host})"
    rank = f"rank {fault.rank} (local rank {fault.local_rank}, pid {fault.pid}) on {where}"
    if fault.kind is FaultKind.NODE_LOST and not fault.host:  # no single node is to blame
        return fault.message
    if fault.kind is FaultKind.SIGNAL:
        return f"{rank} was killed by {fault.message or f'signal {-fault.exit_code}'}"
    what = {
        FaultKind.NODE_LOST: f"{where} was lost",
        FaultKind.EXCLUDED: f"{where} was excluded on request of its rank {fault.rank}",
        FaultKind.UNHEALTHY: f"{where} is not healthy",
        FaultKind.EXIT: f"{rank} exited with code {fault.exit_code}",
        FaultKind.HANG: f"{rank} hung",
        FaultKind.SPAWN: f"{rank} could not be started",
        FaultKind.UNKILLABLE: f"{rank} does not end",
    }[fault.kind]
    return f"{what}: {fault.message}" if fault.message else what


def evidence(fault: RankFault, advises: bool = False, of_site: bool = False) -> str:
    """Lines (each behind a newline) that say where a rank failed in the user's code, in which file its log is, and
    (if it `advises`) what the user can do, by rules of the site, too (`of_site`)."""
    f = fault.finding
    told = {
        "rule": f"{f.rule} ({f.blame.value}, {f.confidence.value})" if f is not None and f.rule else "",
        "at": failing_line(fault.traceback),
        "log": fault.log,
        "to do": what_to_do(fault, of_site) if advises else "",
    }
    return "".join(f"\n  {name}: {text}" for name, text in told.items() if text)


def what_to_do(fault: RankFault, of_site: bool = False) -> str:
    """One line that a user can act on; "" where there is nothing to say."""
    if fault.finding is None or not fault.finding.rule:
        return _BY_KIND.get(fault.kind, "")
    from nvrx_slurm.core.attribution.rules import RAISED, named  # not at the start, as above

    found = named(fault.finding.rule, of_site)
    return found.advice if found is not None else _CODE if fault.finding.rule == RAISED else ""


def report(fault: RankFault) -> str:
    """The first-cause report, several lines: headline, log file, traceback."""
    lines = [f"first cause: {headline(fault)}{evidence(fault, advises=True, of_site=True)}"]
    lines += ["  | " + line for line in fault.traceback.rstrip().splitlines()]
    return "\n".join(lines)


# --- where in the code ------------------------------------------------------------------------------------------------


def failing_line(traceback: str) -> str:
    """`FILE:LINE` of the innermost frame that is not a library's, else of the innermost frame; "" without any frame.

    `traceback`: Python's, of which the last exception counts, or faulthandler's dump, of which the current thread does.
    """
    found = frames(traceback)
    own = [place for place, library in found if not library]
    return (own or [place for place, _ in found] or [""])[0].partition(" in ")[0]


def frames(traceback: str) -> list[tuple[str, bool]]:
    """("FILE:LINE in FUNCTION", whether that is a library's) of the same thread, innermost first."""
    if _PYTHON in traceback:
        found = _FRAME.findall(traceback[traceback.rfind(_PYTHON) :])[::-1]
    else:
        found = _FRAME.findall(traceback.partition(_CURRENT)[2].partition("\n\n")[0] or traceback)
    return [(f"{file}:{line} in {function}", bool(_LIBRARY.search(file))) for file, line, function in found]
