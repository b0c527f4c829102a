"""What the last output of a faulty rank says: one `Finding` per rank, made on its node. Pure; about 5 ms for 64 KiB."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from nvrx_slurm.core.attribution.chains import of_chain
from nvrx_slurm.core.attribution.fields import fields_of
from nvrx_slurm.core.attribution.matches import (
    ELSEWHERE,
    HEADLINE,
    Match,
    errors,
    last_said,
    printed,
    told,
)
from nvrx_slurm.core.attribution.named_node import node_of
from nvrx_slurm.core.attribution.places import RaisedPlace, is_of_io, place_of
from nvrx_slurm.core.attribution.raised import (
    FIRST_FRAME,
    OF_CODE,
    RAISED,
    WRAPPERS,
    clean,
    failing_line,
    frames,
    raised_in,
)
from nvrx_slurm.core.attribution.rules import named, used
from nvrx_slurm.core.attribution.signatures import Signature
from nvrx_slurm.types import Blame, Confidence, FaultKind, Finding, LineRole, RankFault, Remedy

TAIL_BYTES = 64 * 1024  # of each file that is looked at
_LINE_CHARS = 300
_LAST_LINES, _LAST_BYTES = 5, 8192  # that may tell why a program ended that raised no exception
_ABORT_BYTES = 16 * 1024  # before the end, in which native code tells why it aborts
_ROLES, _CONFIDENCE = list(LineRole), list(Confidence)
# differs between equal failures
_VARIABLE = re.compile(rb"0x[0-9a-f]+|\d+|\[rank\s*\]:?|(?:/[\w.+-]+)+/")
_SIGABRT, _SIGTERM = 6, 15
_NATIVE = (4, 6, 7, 8, 11)  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV
_BY_SIGNAL = range(129, 160)  # a shell's exit codes for a child that a signal ended
_YIELDS, _LAST = 2, 3  # rows
_SHARED, _FULL = "shared-memory", "disk-full"
_LAST_ERROR = b"Last error:"  # of NCCL: its own verdict is in the next line
# the rule of a rank that was told to end: what follows that says nothing of a cause
_STOPPED = "stopped"
_FACTS = (Blame.NODE, Blame.SLURM)
# How native code says why it aborts.
_NATIVE_LINE = re.compile(
    rb"what\(\):|terminated with exception|check failed|failed call to|\bfailed:"
)
# Those that a library raises to say something: whose failure it is, the words have to tell.
_CARRIES = re.compile(r"(?:Value|Assertion|NotImplemented|Lookup)Error")
# Headlines of CUDA, NCCL and NVML. Another exception may quote what somebody else wrote. So may a RuntimeError that
# does not name the library before the first quote.
_OF_DEVICE = re.compile(
    rb"RuntimeError: [^'\"`]*(?i:cuda|nccl|nvml|nvidia|hip )|Cuda failure \d"
    rb"|(?:(?:torch\.)?AcceleratorError|(?:torch\.(?:cuda\.)?)?OutOfMemoryError|torch\.cuda\.\w+"
    rb"|(?:torch\.distributed\.(?:\w+\.)*)?Dist\w*Error|(?:\w+\.)*(?:\w*(?:Cuda|CUDA|CUDARuntime)Error|NVMLError\w*)):"
)


def examine(
    fault: RankFault,
    stderr: bytes,
    stdout: bytes = b"",
    signatures: Sequence[Signature] | None = None,
) -> Finding:
    """The finding for `fault`, from the ends of what its rank wrote (each at most `TAIL_BYTES` are looked at).

    By `signatures`, or else by all rules of this process.
    """
    rules = used() if signatures is None else signatures
    texts = [_plain(text[-TAIL_BYTES:]) for text in (stderr, stdout)]
    elsewhere = [*printed(texts, rules)]
    found = _examined(fault, texts, rules, elsewhere)
    if not _is_raised(fault):
        return found

    def by_itself(one: RankFault) -> Finding:
        return _examined(one, (), rules, ())

    return of_chain(fault, found, texts[0], by_itself)


def _examined(
    fault: RankFault,
    texts: Sequence[bytes],
    signatures: Sequence[Signature],
    elsewhere: Sequence[Match],
) -> Finding:
    """The finding by the exception, or what stands for it, and by matches `elsewhere`."""
    ended_by = _ended_by(fault)
    own = _is_raised(fault)
    lines = _lines(fault, own, texts[0] if texts else b"")
    headline = lines[0].decode("utf-8", "replace")
    where = place_of(headline, fault.traceback) if own else None
    has_vetoes = where is not None and (is_of_io(fault.message) or not where.rule)
    vetoes = where.vetoes if where is not None and has_vetoes else ()
    matches = [one for one in told(lines, signatures) if one.signature.topic not in vetoes]
    matches += elsewhere
    if "/" not in headline and any(one.signature.topic == _SHARED for one in elsewhere):
        matches = [one for one in matches if one.signature.topic != _FULL]  # of /dev/shm
    found = []
    for match in matches:
        weighed = _weighed(match, where)
        found.append(_no_surer(weighed, own, ended_by))
    if texts and _is_cut(fault, own):
        found = [_guessed(one) if own and one.place == HEADLINE else one for one in found]
        end = texts[0][-_ABORT_BYTES:]
        found += map(_guessed, errors(end, signatures))
    if own:
        best = _of_exception(found, headline)
    else:
        may = [one for one in found if _may_explain(one.signature, fault, ended_by)]
        best = min(may, key=_without_exception, default=None)
    if best is None:
        of_place = _of_place(fault, where)
        return of_place or _without_signature(fault, texts)
    return _of_match(_of_several(best, found), fault, where)


def _of_several(best: Match, found: Sequence[Match]) -> Match:
    """The match; if the rule's lines name several nodes, no single one is to blame, or leaves."""
    s = best.signature
    same = [one for one in found if one.signature.name == s.name]
    nodes = {fields_of(one.line.decode("utf-8", "replace")).get("node", "") for one in same}
    if s.blame is not Blame.NODE or len(nodes - {""}) < 2:
        return best
    return _with(_guessed(best), blame=s.or_blame or s.blame, remedy=Remedy.RESTART)


def _of_match(best: Match, fault: RankFault, where: RaisedPlace | None) -> Finding:
    s = best.signature
    line = best.line.decode("utf-8", "replace").strip()
    is_stop = s.remedy is Remedy.STOP
    remedy = Remedy.RESTART if is_stop and best.place == ELSEWHERE else s.remedy
    of_place = where is not None and s.topic in where.proves
    rests_on = "field" if s.is_field else "frame" if of_place else "text"
    fields = fields_of(line)
    node = node_of(fields) if s.blame is Blame.NODE else ""
    s = s._replace(remedy=remedy)
    return _of_signature(fault, s, line, rests_on, node)


# --- which match counts -------------------------------------------------------------------------


def _of_exception(found: list[Match], headline: str) -> Match | None:
    """For a rank that ended by its own exception.

    Ranks quote logs of other jobs: what was printed, or what a script raises as a KeyError or its like, blames no node.
    """
    causes = [one for one in found if one.signature.role is LineRole.CAUSE and _may_quote(one)]
    if OF_CODE.match(headline):
        found = [one for one in causes if one.place != ELSEWHERE]
    best = min(found, key=_row, default=None)
    if best is None:
        return None
    row = _row(best)[0]
    if row < _YIELDS:
        return best
    printed = min(causes, key=_order, default=None)
    if row <= _LAST:
        return printed or best
    return printed and _guessed(printed)


def _row(match: Match) -> tuple[int, ...]:
    """The order of what an exception says; from _YIELDS on, that a library failed or a peer is gone, which yields to a
    cause that was printed; behind _LAST nothing of its reason."""
    s, place = match.signature, match.place
    is_own = place != ELSEWHERE
    is_headline = place == HEADLINE
    rows = (
        is_headline and s.name == _STOPPED,
        is_own and s.role is LineRole.CAUSE,
        is_headline,
        is_own and s.role is LineRole.ECHO,
        True,
    )
    return rows.index(True), *_order(match)


def _may_quote(match: Match) -> bool:
    s = match.signature
    return s.blame is not Blame.NODE or s.or_blame is not None


def _weighed(match: Match, where: RaisedPlace | None) -> Match:
    """The match with the confidence that its place gives it.

    A likely finding is certain where the place proves its class, unless it would end the job. Common words without such
    a place are a guess.
    """
    s = match.signature
    is_proved = where is not None and s.topic in where.proves
    if match.is_common:
        return match if is_proved else _guessed(match)
    is_likely = s.confidence is Confidence.LIKELY
    if is_proved and is_likely and s.remedy is Remedy.RESTART:
        return _with(match, confidence=Confidence.CERTAIN)
    return match


def _no_surer(match: Match, own: bool, ended_by: int) -> Match:
    """The match, without its exclusion where the line may be a quotation.

    A rule about an exception excludes a node for a headline that a device library raised, or for what native code said
    as it aborted; a rule about output does so outside an exception.
    """
    s = match.signature
    if s.blame is not Blame.NODE or s.confidence is not Confidence.CERTAIN:
        return match
    of_device = match.place == HEADLINE and _OF_DEVICE.match(match.line)
    is_abort = not own and ended_by == _SIGABRT
    native = is_abort and _NATIVE_LINE.search(match.line.lower())
    is_shown = not own if s.printed else native or of_device
    if is_shown:
        return match
    return _with(match, confidence=Confidence.LIKELY, remedy=Remedy.RESTART)


def _guessed(match: Match) -> Match:
    return _with(match, confidence=Confidence.GUESS)


def _with(match: Match, **changes: object) -> Match:
    return match._replace(signature=match.signature._replace(**changes))  # type: ignore[arg-type]


def _may_explain(s: Signature, fault: RankFault, ended_by: int) -> bool:
    """Whether a rule can explain an end without an exception.

    A signal from outside is neither the script's doing, but for the limits that the kernel enforces, nor the
    consequence of what a peer did.
    """
    if fault.kind is not FaultKind.HANG and ended_by in (0, _SIGABRT):
        return True
    may_be_user = s.blame is not Blame.USER or s.kills
    is_end = ended_by == _SIGTERM or s.blame is Blame.SLURM
    return may_be_user and (s.role is not LineRole.ECHO or is_end)


def _order(match: Match) -> tuple[int, int, int]:
    """A cause goes first; then what is nearer to the headline; then the surer rule.

    Of echoes the surer goes before the nearer: the last line is often only that the process ends.
    """
    s = match.signature
    role = _ROLES.index(s.role)
    confidence = _CONFIDENCE.index(s.confidence)
    if s.role is LineRole.ECHO:
        return role, confidence, match.place
    return role, match.place, confidence


def _without_exception(match: Match) -> tuple[int, bool, bool, int, int]:
    """A cause goes first; then what the kernel, a driver or Slurm says; then what only such programs print."""
    s = match.signature
    role, place, confidence = _order(match)
    is_no_fact = s.blame not in _FACTS
    is_of_any = not s.printed
    return role, is_no_fact, is_of_any, place, confidence


# --- what a rank says ---------------------------------------------------------------------------


def _is_raised(fault: RankFault) -> bool:
    """Whether it ended by its own exception."""
    is_exit = fault.kind is FaultKind.EXIT
    is_wrapped = WRAPPERS.search(fault.message)
    return is_exit and bool(fault.traceback) and not is_wrapped


def _is_cut(fault: RankFault, own: bool) -> bool:
    """Whether it ended by itself, but what it raised cannot be read."""
    if fault.kind is not FaultKind.EXIT or raised_in(fault.traceback):
        return False
    return not own or FIRST_FRAME in fault.traceback


def _lines(fault: RankFault, own: bool, stderr: bytes) -> list[bytes]:
    """What stands for the reason of its end; the headline, perhaps an empty one, is the first."""
    if fault.kind is not FaultKind.EXIT:
        return _abort(stderr)
    lines = _exception(fault) if own else _last_lines(stderr)
    if fault.message and not (own and lines[0]):
        lines[:1] = [fault.message.encode("utf-8", "replace")]
    return lines or [b""]


def _exception(fault: RankFault) -> list[bytes]:
    """The lines of the exception that ended it; the first is the headline."""
    raised = raised_in(fault.traceback)
    texts = ("",) if raised is None else (raised.headline, *raised.details)
    lines = [line.encode("utf-8", "replace") for line in texts]
    if _LAST_ERROR in lines[:-1]:  # NCCL's own verdict goes first
        lines[0] = lines.pop(lines.index(_LAST_ERROR) + 1) + b" / " + lines[0]
    return lines


def _last_lines(stderr: bytes) -> list[bytes]:
    """The last line, then those before it."""
    lines = [line for line in stderr[-_LAST_BYTES:].split(b"\n") if line.strip()]
    return lines[-_LAST_LINES:][::-1]


def _abort(stderr: bytes) -> list[bytes]:
    """An empty headline, then what native code said of the reason to abort."""
    lines = stderr[-_ABORT_BYTES:].split(b"\n")
    return [b"", *(line for line in lines if _NATIVE_LINE.search(line.lower()))]


def _plain(text: bytes) -> bytes:
    return clean(text.decode("utf-8", "replace")).encode("utf-8", "replace")


# --- without a rule -----------------------------------------------------------------------------


def _of_place(fault: RankFault, where: RaisedPlace | None) -> Finding | None:
    """An error of input and output that no rule knows: its place tells with what."""
    rule = where.rule if where is not None and is_of_io(fault.message) else ""
    return of_rule(fault, rule, fault.message, "frame") if rule else None


def of_rule(fault: RankFault, rule: str, line: str, rests_on: str) -> Finding:
    """The finding of a rule that other facts than its texts have shown."""
    s = named(rule)
    assert s is not None
    return _of_signature(fault, s, line, rests_on)


def _of_signature(
    fault: RankFault, s: Signature, line: str, rests_on: str, node: str = ""
) -> Finding:
    head = line[:_LINE_CHARS]
    print_ = _fingerprint(fault, s.name, head)
    return Finding(
        rule=s.name,
        role=s.role,
        blame=s.blame,
        confidence=s.confidence,
        remedy=s.remedy,
        fingerprint=print_,
        line=head,
        rests_on=rests_on,
        node=node,
    )


def _without_signature(fault: RankFault, texts: Sequence[bytes]) -> Finding:
    """No rule knows what it printed: how it ended is all there is, with its last lines."""
    ended_by = _ended_by(fault)
    if _is_raised(fault):
        found = frames(fault.traceback)
        is_library = not found or found[0][1]
        carries = is_library and _CARRIES.match(fault.message)
        is_sure = OF_CODE.match(fault.message) and not carries and not _is_cut(fault, True)
        sure = Confidence.LIKELY if is_sure else Confidence.GUESS
        return _unclear(fault, RAISED, fault.message, "text", Blame.USER, sure)
    if ended_by == _SIGTERM:
        return of_rule(fault, _STOPPED, "", "exit")
    rule = "native-crash" if ended_by in _NATIVE else ""
    return _unclear(
        fault,
        rule,
        last_said(texts, _ABORT_BYTES, _LINE_CHARS),
        "exit",
        Blame.UNKNOWN,
        Confidence.GUESS,
    )


def _unclear(
    fault: RankFault, rule: str, line: str, rests_on: str, blame: Blame, sure: Confidence
) -> Finding:
    """The same rule is none where equal failures are looked for: an exception is known by its own words."""
    known_by = "" if rule == RAISED else rule
    return Finding(
        rule=rule,
        role=LineRole.UNCLEAR,
        blame=blame,
        confidence=sure,
        remedy=Remedy.RESTART,
        fingerprint=_fingerprint(fault, known_by, fault.message),
        line=line[:_LINE_CHARS],
        rests_on=rests_on,
    )


def _ended_by(fault: RankFault) -> int:
    """The signal that ended it, also where a shell between says so; 0 = none."""
    code = fault.exit_code
    if code in _BY_SIGNAL:
        return code - _BY_SIGNAL.start + 1
    return max(0, -code)


def _fingerprint(fault: RankFault, rule: str, line: str) -> str:
    """Equal for equal failures: what differs between ranks, nodes and runs is left out."""
    text = _VARIABLE.sub(b"", line.lower().encode("utf-8", "replace"))
    where = failing_line(fault.traceback).encode("utf-8", "replace")
    all_of_it = b"\0".join((rule.encode(), text, where))
    return hashlib.sha256(all_of_it).hexdigest()[:16]
