"""Which of the faults of a cycle caused the others, what is to blame, and what follows from it. Pure.

What a fault is counts first, when it became known counts last: a rank that lost its peer often reports sooner than
the peer's node (Llama 3 paper, section 3.3.4; L4, FSE 2025).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nvrx_slurm.core.attribution.raised import RAISED, failing_line
from nvrx_slurm.core.attribution.recurrence import NEAR, nodes_of, place, repeats
from nvrx_slurm.declared import Record
from nvrx_slurm.types import (
    RERUN,
    Alike,
    Blame,
    Confidence,
    FaultKind,
    Finding,
    LineRole,
    Node,
    RankFault,
    Remedy,
    RestartRecord,
)

if TYPE_CHECKING:
    from nvrx_slurm.core.coordinator.restarts import RestartLimits

REPEATS = 3  # equal failures of the user's code that end the job, where the user asks for that
_SIGTERM = 15
_SIGABRT = 6  # how C++ ends on an uncaught exception, e.g. gloo or NCCL when a peer is gone
_BAD_NODE = (FaultKind.NODE_LOST, FaultKind.UNHEALTHY, FaultKind.UNKILLABLE)
_OF_NODE = (*_BAD_NODE, FaultKind.EXCLUDED)
_BY_SIGNAL = 128  # a shell's exit code for a child that a signal ended is more
_START_S = 120.0  # what is missing later may be on a file system that is away
_OWN_SIGNALS = (-4, -6, -7, -8, -11)  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: a program brings them upon itself
_OUTSIDE = (Blame.NODE, Blame.SLURM, Blame.NETWORK, Blame.SERVICE, Blame.STORAGE)  # an outage may pass by itself
_TORN = ("checkpoint-torn", "data-torn")  # rules about a file that stays damaged
_TORN_CHECKPOINT = "checkpoint-torn"
# Rules about the three verdicts of Megatron-LM before all ranks exit with REJECTED.
_TRANSIENT, _PERSISTENT, _APPLICATION = "rejected-transient", "rejected-persistent", "rejected-application"
_SURE = 2  # the highest `_level` of what a rank does not do because of another one
_MOST_ALIKE = 8  # nodes
_NO_FINDING = Finding("", LineRole.UNCLEAR, Blame.UNKNOWN, Confidence.GUESS, Remedy.RESTART)

_BY_KIND = {
    FaultKind.HANG: "Look at hang.json of the cycle: who waits for whom, and where. A timeout may be too short.",
    FaultKind.LOSS: "Look at its loss before: data, learning rate, precision, or a GPU that computes wrong.",
    FaultKind.NODE_LOST: "Nothing: the job goes on with the other nodes or a spare. Report a node that is lost again.",
    FaultKind.UNHEALTHY: "Report the node: its health check failed.",
    FaultKind.UNKILLABLE: "Report the node: a process there does not end, as with a stuck driver or file system.",
    FaultKind.INEXACT: "Export the variable in the batch script; then ranks are forked from the start.",
    FaultKind.SPAWN: "Correct path and mode of the program, or the image.",
    FaultKind.SIGNAL: "Look for what sent this signal, and at the last lines of its log.",
    FaultKind.EXIT: "Look at its last lines: the program has ended itself with this code.",
}
# What a signal means for a program, where nothing else is known. A shell tells it as 128 + its number.
_BY_SIGNAL_NUMBER = {
    2: "It was interrupted (SIGINT): by a person or by the program that started it.",
    3: "It was told to quit (SIGQUIT), mostly by a process of its own job.",
    4: "An instruction that this processor does not have: use builds for it. On one node only: report that node.",
    6: "The program ended itself (abort): its last lines and the stack above say why.",
    7: "A page could not be read: look at /dev/shm, at full disks and at the file system of a mapped file.",
    8: "Native code divided by zero, or the like: look at the core file or the stack above.",
    9: "Look for what killed it: the out-of-memory killer (dmesg, sacct), or a person.",
    11: "Native code used memory that is not its own: look at the core file or the stack above.",
    15: "It was asked to end from outside: scancel, preemption, a time limit, or a peer's failure.",
    31: "A system call is forbidden here: look at the seccomp profile of the container.",
}
_BY_CODE = {255: "Code 255 says only that it failed (-1 in many programs, ssh and srun): its last lines say more."}
_CODE = "Correct the script or its data: its exception is above."


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
        told_of = _finding(self.cause).node  # a line may name another node than the one that prints it
        what = {Blame.NODE: f"node {told_of or self.cause.host}", Blame.USER: "the script or its settings"}
        spread = f", on {self.ranks} ranks of {self.nodes} nodes" if self.ranks > 1 else ""
        return f"{what.get(self.blame, self.blame.value)} is to blame ({self.confidence.value}): {self.rule}{spread}"


def first_cause(faults: Collection[RankFault]) -> RankFault | None:
    """The fault that most likely caused the others, from faults in order of arrival at the coordinator."""
    return min(faults, key=_level, default=None)


def _level(fault: RankFault) -> float:
    """The order of evidence. 0, 0.1: facts about a node, or from Slurm. 0.3, 0.6: Megatron-LM rejects a result, and
    says why or does not; ranks may crash as they end then. 1: a hang, or a signal that no program sends itself.
    2, 3: an error of the rank's own, sure or not. 4: one of the network or of a library, which a dead peer may bring
    about. 5, 6: a consequence."""
    f = _finding(fault)
    if fault.rejects:
        return 0.3 if f.role is LineRole.CAUSE else 0.6
    aborted = fault.kind is FaultKind.SIGNAL and fault.exit_code == -_SIGABRT
    outright = fault.kind is not FaultKind.EXIT and not aborted
    if f.role is LineRole.ECHO:
        return 5 if outright else 6
    if fault.kind in _OF_NODE or (f.role is LineRole.CAUSE and f.blame in (Blame.NODE, Blame.SLURM)):
        return 0.1 if f.node else 0  # the coordinator's own knowledge of a lost node goes first
    if outright or fault.exit_code > _BY_SIGNAL:
        return 1
    if f.blame is Blame.NETWORK or (f.blame is Blame.UNKNOWN and f.role is LineRole.UNCLEAR):
        return 4
    return 3 if f.role is LineRole.UNCLEAR and f.confidence is Confidence.GUESS else 2


def is_told_to_end(fault: RankFault) -> bool:
    """Whether a rank has only done what SIGTERM asks for."""
    return fault.exit_code in (-_SIGTERM, _BY_SIGNAL + _SIGTERM) and _finding(fault).role is LineRole.ECHO


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
    same = [fault for fault in faults if fault is cause or _are_alike(f, _finding(fault))]
    nodes = len({fault.infra_rank for fault in same})
    blame, confidence, remedy = f.blame, f.confidence, f.remedy
    echo = f.role is LineRole.ECHO
    if echo or (not f.rule and cause.kind in _BAD_NODE):
        blame, confidence = (Blame.NODE if cause.kind in _BAD_NODE else Blame.UNKNOWN), Confidence.GUESS
    one_node, spawn = _may_lack(f.rule), cause.kind is FaultKind.SPAWN
    if nodes == 1 and job_nodes > 1 and (spawn or (one_node and len(same) > 1)):
        blame, confidence, remedy = Blame.NODE, Confidence.GUESS, Remedy.RESTART
    if remedy is Remedy.ELSEWHERE and nodes > 1:  # several nodes at once: rather their image, or the rule itself
        confidence, remedy = Confidence.LIKELY, Remedy.RESTART
    rule = f.rule or (cause.kind.value if cause.kind in _BAD_NODE or spawn else "")
    times = repeats(f.fingerprint, restarts) if blame is Blame.USER else 1
    code = f.rule == RAISED and f.confidence is Confidence.LIKELY  # a KeyError and its like is no node's doing
    any_rank = cause.rejects or (cause.kind is FaultKind.HANG and cause.finding is None)  # perhaps not the first one
    is_here = f.node in ("", cause.host)  # what its line tells
    own = cause.host != "" and is_here and not (echo or code or any_rank)
    alike = _others(same, cause, job_nodes) if own and nodes > 1 else ()
    alone = own and (nodes == 1 or len(alike) > 0)
    of_nodes = one_node, times, f.fingerprint, alone, alike
    return JudgedCause(cause, rule, blame, confidence, remedy, len(same), nodes, *of_nodes)


def _others(same: Sequence[RankFault], cause: RankFault, job_nodes: int) -> tuple[Alike, ...]:
    """The nodes that fail together with the one of the cause, where they are at most half of the active ones. () where
    it may be a consequence of another rank's end, which can come to any node."""
    first = {fault.infra_rank: fault for fault in reversed(same)}
    if _level(cause) > _SURE or len(first) > min(_MOST_ALIKE, job_nodes // 2):
        return ()
    return tuple(Alike(n, one.host, one.rank) for n, one in sorted(first.items()) if n != cause.infra_rank)


def _are_alike(one: Finding, other: Finding) -> bool:
    """Whether two ranks show the same: the same rule, or the same failure where no rule knows more than its kind."""
    named = one.rule not in ("", RAISED)
    return one.rule == other.rule if named else one.fingerprint != "" and one.fingerprint == other.fingerprint


def _may_lack(rule: str) -> bool:
    """Whether a single node may lack what the rule is about."""
    from nvrx_slurm.core.attribution.rules import named  # not at the start, as above

    found = named(rule) if rule else None
    return found is not None and found.one_node


# --- what follows -----------------------------------------------------------------------------------------------------


class FailedCycle(Record):
    """What is known of a cycle of which nothing is left. Iterations are -1 where they are not known."""

    nodes: int  # active ones
    ranks: int  # 0 = not known
    has_spare: bool
    first: bool  # of the job
    lasted_s: float  # the longest cycle of those in a row that have failed like this
    reached: int = -1  # iteration that the ranks' output tells
    checkpoint: int = -1  # iteration of the last checkpoint
    resume_before: int = -1  # what ranks were told
    held_before: Node | None = None  # that had the rank of the first cause in the cycle before; None = not known


class Course(Record):
    """What the coordinator does besides the restart. The default: nothing."""

    why: str = ""  # one sentence; "" = there is nothing to say
    end: int = 0  # code with which the job ends; 0 = it goes on
    elsewhere: bool = False  # the next cycle runs on other nodes
    suspect: int = -1  # rank whose node a spare should replace then; -1 = not known
    resume_before: int = -1  # ranks are told to take a checkpoint older than this; -1 = as before
    exclude: Node | RankFault | None = None  # the node there leaves the job, if enough nodes are left
    strike: str = ""  # host that is under suspicion


def course(
    v: JudgedCause, cycle: FailedCycle, past: Sequence[RestartRecord], limits: RestartLimits, excludes_hung: bool
) -> Course:
    """What follows from a cause. `past`: the restarts before, oldest first, which every plan carries on.
    `excludes_hung`: the node of a rank that hung leaves the job."""
    for found in (
        _hopeless(v, cycle, limits),
        _failed_starts(v, cycle, limits),
        _rejected(v, cycle, past, limits),
        _poisoned(v, cycle, past, limits),
        _at_one_iteration(v, cycle, past, limits),
    ):
        if found is not None:
            return found
    again, sure = f"the same failure {v.times} times", v.confidence is Confidence.CERTAIN
    if v.times < REPEATS:
        bad = v.remedy is Remedy.ELSEWHERE and (sure or (v.cause.kind is FaultKind.HANG and excludes_hung))
        return Course(v.sentence, exclude=v.cause) if bad else Course()
    if limits.stops_on_repeats:
        return Course(f"{headline(v.cause)}; {again}: a restart does not help", limits.no_restart_code)
    return Course(f"{again}: a restart may not help; the job goes on (--ft-attribution-stop-action log)")


def reruns(past: Sequence[RestartRecord]) -> int:
    """How many cycles in a row have ended because Megatron-LM asked for other GPUs."""
    return next((n for n, one in enumerate(reversed(past)) if one.exit_code != RERUN), len(past))


def _hopeless(v: JudgedCause, cycle: FailedCycle, limits: RestartLimits) -> Course | None:
    """An error of the user that is certain. What a single node may lack is certain at the start, and on each node."""
    if v.remedy is not Remedy.STOP or v.confidence is not Confidence.CERTAIN:
        return None
    if v.one_node and not (cycle.first and cycle.lasted_s < _START_S and v.nodes == cycle.nodes):
        return None
    return Course(f"{headline(v.cause)}; no restart: it would fail like this again ({v.rule})", limits.hopeless_code)


def _failed_starts(v: JudgedCause, cycle: FailedCycle, limits: RestartLimits) -> Course | None:
    """All ranks have ended with the same exception before the first step, again. A job of one node tries a spare first,
    which may have what that one lacks."""
    most = limits.max_failed_starts
    enough = most and v.times >= most + (cycle.nodes == 1 and cycle.has_spare)
    started = cycle.reached >= 0 or cycle.lasted_s >= _START_S
    raised = v.cause.kind is FaultKind.EXIT and v.cause.traceback
    if started or not (enough and 0 < cycle.ranks <= v.ranks and raised):
        return None
    how = f"all {v.ranks} ranks have ended with the same exception before the first step, {v.times} times"
    return Course(f"{headline(v.cause)}; {how}: no restart (--ft-max-failed-starts)", limits.hopeless_code)


def _rejected(
    v: JudgedCause, cycle: FailedCycle, past: Sequence[RestartRecord], limits: RestartLimits
) -> Course | None:
    """Megatron-LM has rejected a result: it asks for other GPUs (16), or has come to a verdict (17)."""
    cause, first = v.cause, cycle.held_before
    if not cause.rejects:
        return None
    if cause.exit_code == RERUN:
        return Course(elsewhere=cycle.nodes > 1, suspect=cause.rank if v.rule else -1)
    if v.rule == _APPLICATION:
        return Course(f"{headline(cause)}; other GPUs get the same result: no restart", limits.no_restart_code)
    if v.rule == _TRANSIENT:
        return Course("a second run on the same GPU gave another result", strike=cause.host)
    if v.rule != _PERSISTENT or first is None or first.infra_rank == cause.infra_rank or not reruns(past):
        return None
    # The node that says so is the second one. The first one, which had that rank before, is to blame.
    why = f"its rank {cause.rank} got another result on node {cause.host}"
    return Course(why, strike=first.host, exclude=first)


def _poisoned(
    v: JudgedCause, cycle: FailedCycle, past: Sequence[RestartRecord], limits: RestartLimits
) -> Course | None:
    """The same failure twice soon after the same checkpoint, which may be damaged."""
    last, most, checkpoint = _same(v, past), limits.poison_iterations, cycle.checkpoint
    if last is None or not most or checkpoint < 0 or last.checkpoint != checkpoint:
        return None
    torn = v.rule == _TORN_CHECKPOINT and v.confidence is Confidence.CERTAIN
    if not torn and not 0 <= cycle.reached - checkpoint <= most:
        return None
    if cycle.resume_before >= 0:
        why = f"{headline(v.cause)}; an older checkpoint than {cycle.resume_before} did not help: no restart"
        return Course(why, limits.no_restart_code)
    why = f"the same failure twice at the checkpoint of iteration {checkpoint}: ranks should take an older one"
    moves = cycle.nodes > 1 and v.nodes == 1 and not torn  # it may be the node's as well
    suspect = v.cause.rank if moves else -1
    return Course(f"{why} (NVRX_RESUME_BEFORE={checkpoint})", 0, moves, suspect, resume_before=checkpoint)


def _at_one_iteration(
    v: JudgedCause, cycle: FailedCycle, past: Sequence[RestartRecord], limits: RestartLimits
) -> Course | None:
    """The same failure at the same iteration: is it the node's, or the code's or the data's?"""
    last, cause = _same(v, past), v.cause
    if last is None or cycle.reached < 0 or abs(cycle.reached - last.iteration) > NEAR or cycle.nodes < 2:
        return None
    at = f"the same failure at iteration {cycle.reached}"
    if v.nodes > 1:  # other nodes show it as well
        why = f"{headline(cause)}; {at} {v.times} times on {v.nodes} nodes: code or data, no restart"
        return Course(why, limits.no_restart_code) if v.times >= REPEATS else None
    if not last.elsewhere:
        return Course(f"{at} again: the next cycle runs on other nodes", elsewhere=True, suspect=cause.rank)
    if last.infra_rank == cause.infra_rank:
        return Course(f"{at} with other ranks", strike=last.host)
    if any({place(last), (cause.infra_rank, cause.host)} <= nodes_of(one).keys() for one in past):
        return None  # they have failed together: both may be bad
    why = f"{headline(cause)}; {at} on node {last.host} and on node {cause.host}: code or data, no restart"
    return Course(why, limits.no_restart_code)


def _same(v: JudgedCause, past: Sequence[RestartRecord]) -> RestartRecord | None:
    """The restart before, if its cause was the same and may come from code, data or a checkpoint."""
    cause, last = v.cause, past[-1] if past else None
    print_ = v.fingerprint if cause.finding is not None else ""
    own = cause.kind in (FaultKind.EXIT, FaultKind.LOSS) or cause.exit_code in _OWN_SIGNALS
    same = last is not None and own and print_ and last.fingerprint == print_
    echo = cause.finding is not None and cause.finding.role is LineRole.ECHO
    outside = (v.blame in _OUTSIDE or v.one_node) and v.rule not in _TORN  # a full disk, a mount, a port, a permission
    return last if same and not echo and not outside else None


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
        FaultKind.LOSS: f"{rank} reported a wrong loss",
        FaultKind.SPAWN: f"{rank} could not be started",
        FaultKind.UNKILLABLE: f"{rank} does not end",
        FaultKind.INEXACT: f"{rank} has to be executed, not forked",
    }[fault.kind]
    return f"{what}: {fault.message}" if fault.message else what


def evidence(fault: RankFault, advises: bool = False, of_site: bool = False) -> str:
    """Lines (each behind a newline) that say where a rank failed in the user's code, in which file its log is, and
    (if it `advises`) what the user can do, by rules of the site, too (`of_site`)."""
    f = fault.finding
    told = {
        "rule": f"{f.rule} ({f.blame.value}, {f.confidence.value})" if f is not None and f.rule else "",
        "at": failing_line(fault.traceback) if fault.traceback else "",
        "log": fault.log,
        "to do": what_to_do(fault, of_site) if advises else "",
    }
    return "".join(f"\n  {name}: {text}" for name, text in told.items() if text)


def what_to_do(fault: RankFault, of_site: bool = False) -> str:
    """One line that a user can act on; "" where there is nothing to say."""
    f = fault.finding
    if f is None or not f.rule or f.rests_on == "exit":
        signal = -fault.exit_code if fault.exit_code < 0 else fault.exit_code - _BY_SIGNAL
        of_end = _BY_SIGNAL_NUMBER.get(signal) or _BY_CODE.get(fault.exit_code)
        is_end = fault.kind in (FaultKind.SIGNAL, FaultKind.EXIT)
        return of_end if of_end and is_end else _BY_KIND.get(fault.kind, "")
    from nvrx_slurm.core.attribution.rules import named  # not at the start, as above

    found = named(f.rule, of_site)
    return found.advice if found is not None else _CODE if f.rule == RAISED else ""


def report(fault: RankFault) -> str:
    """The first-cause report, several lines: headline, log file, traceback."""
    lines = [f"first cause: {headline(fault)}{evidence(fault, advises=True, of_site=True)}"]
    lines += ["  | " + line for line in fault.traceback.rstrip().splitlines()]
    return "\n".join(lines)
