"""What the last output of a faulty rank says: one `Finding` per rank, made on its node. Pure; about 5 ms for 64 KiB."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from nvrx_slurm.core.attribution.places import RaisedPlace, is_of_io, place_of
from nvrx_slurm.core.attribution.raised import WRAPPERS, clean, failing_line, raised_in
from nvrx_slurm.core.attribution.rules import named, used
from nvrx_slurm.core.attribution.signatures import ADVICE, NO_PROGRESS, PROGRESS, RETRIED, Signature
from nvrx_slurm.types import Blame, Confidence, FaultKind, Finding, LineRole, RankFault, Remedy

BETWEEN_LINES = " | "  # between lines of a program without a rule
TAIL_BYTES = 64 * 1024  # of each file that is looked at
_LINE_CHARS = 300
_BEFORE_BYTES, _BEHIND_BYTES = 512, 2048  # of a line around a text; patterns may take quadratic time
_MOST_LINES = 20  # per text of a signature
_LAST_LINES = 5  # that may tell why a program ended that raised no exception
_ABORT_BYTES = 16 * 1024  # before the end, in which native code tells why it aborts
_ROLES, _CONFIDENCE = list(LineRole), list(Confidence)
_HEADLINE, _DETAILS, _ELSEWHERE = range(3)  # where a match is
_EXACT = 10  # steps between two lines; with more, one cannot tell two failures apart
_ITERATION = re.compile(rb"\b(?:step|iter|iteration)\b[^\w\n]{0,12}(\d{1,3}(?:,\d{3})+|\d{1,15})\b(?!\.\d)")
_BAR = re.compile(rb"\b(\d{1,15})/\d{3,15} \[\d\d:")
_NO_STEP = re.compile(rb"load|resum|restor|eval|valid|sav|shard|warm|checkpoint")
_NODE = re.compile(r"(?:[Nn]ode failure on | on (?=\S+ CANCELLED .*NODE FAILURE))([\w.-]+)")
_VARIABLE = re.compile(rb"0x[0-9a-f]+|\d+|\[rank\s*\]:?|(?:/[\w.+-]+)+/")  # differs between equal failures
_SIGABRT, _SIGTERM = 6, 15
_NATIVE = (4, 6, 7, 8, 11)  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV
_SAID_LINES = 3  # that say how a program ended, where no rule knows more
_NOISE = re.compile(r"\d+%\||it/s|destroy_process_group|^Extension modules|^\s*$")
_LAST_ERROR = b"Last error:"  # of NCCL: its own verdict is in the next line
_STOPPED = "stopped"  # the rule of a rank that was told to end: what follows that says nothing of a cause
_FACTS = (Blame.NODE, Blame.SLURM)
# How native code says why it aborts.
_NATIVE_LINE = re.compile(rb"what\(\):|terminated with exception|check failed|failed call to|\bfailed:")
# Exceptions that a script raises by itself; others may be raised because of something else.
_OF_CODE = re.compile(
    r"(?:Key|Value|Type|Index|Name|Attribute|Assertion|ZeroDivision|UnboundLocal|NotImplemented|Lookup|Unicode\w+)Error"
)
# Headlines of CUDA, NCCL and NVML. Another exception may quote what somebody else wrote. So may a RuntimeError that
# does not name the library before the first quote.
_OF_DEVICE = re.compile(
    rb"RuntimeError: [^'\"`]*(?i:cuda|nccl|nvml|nvidia|hip )|Cuda failure \d"
    rb"|(?:(?:torch\.)?AcceleratorError|(?:torch\.(?:cuda\.)?)?OutOfMemoryError|torch\.cuda\.\w+"
    rb"|(?:torch\.distributed\.(?:\w+\.)*)?Dist\w*Error|(?:\w+\.)*(?:\w*(?:Cuda|CUDA|CUDARuntime)Error|NVMLError\w*)):"
)
_ADVICE = tuple(text.encode() for text in ADVICE)


class _Match(NamedTuple):
    signature: Signature
    line: bytes
    place: int
    is_common: bool = False  # its words alone are no proof


def examine(
    fault: RankFault, stderr: bytes, stdout: bytes = b"", signatures: Sequence[Signature] | None = None
) -> Finding:
    """The finding for `fault`, from the ends of what its rank wrote (each at most `TAIL_BYTES` are looked at), by
    `signatures` or else by all rules of this process."""
    ended_by = _ended_by(fault)
    signatures = used() if signatures is None else signatures
    texts = [_plain(text[-TAIL_BYTES:]) for text in (stderr, stdout)]
    exited = fault.kind is FaultKind.EXIT
    own = exited and bool(fault.traceback) and not WRAPPERS.search(fault.message)  # it ended by its own exception
    told = _exception(fault) if own else _last_lines(texts[0]) if exited else _abort(texts[0])
    if exited and fault.message and not (own and told[0]):
        told[:1] = [fault.message.encode("utf-8", "replace")]

    where = place_of(told[0].decode("utf-8", "replace"), fault.traceback) if own else None
    vetoes = where.vetoes if where and (is_of_io(fault.message) or not where.rule) else ()
    matches = [m for m in _told(told, signatures) if m.signature.topic not in vetoes]
    matches += _printed(texts, signatures)
    found = [_no_surer(_weighed(m, where), own, ended_by) for m in matches]
    if own:
        best = _of_exception(found, told[0])
    else:
        may = (m for m in found if _may_explain(m.signature, fault, ended_by))
        best = min(may, key=_without_exception, default=None)
    if best is None:
        return _of_place(fault, where) or _without_signature(fault, texts)
    return _of_match(best, fault, where)


def _of_match(best: _Match, fault: RankFault, where: RaisedPlace | None) -> Finding:
    s = best.signature
    line = best.line.decode("utf-8", "replace").strip()[:_LINE_CHARS]
    stops = s.remedy is Remedy.STOP and best.place != _ELSEWHERE
    remedy = s.remedy if stops or s.remedy is not Remedy.STOP else Remedy.RESTART
    of_place = where is not None and s.topic in where.proves
    rests_on = "field" if s.is_field else "frame" if of_place else "text"
    named_in = _NODE.search(line)
    node = named_in[1] if named_in and s.blame is Blame.NODE else ""
    print_ = _fingerprint(fault, s.name, line)
    return Finding(s.name, s.role, s.blame, s.confidence, remedy, print_, line, rests_on, node)


# --- which match counts -----------------------------------------------------------------------------------------------


def _of_exception(found: list[_Match], headline: bytes) -> _Match | None:
    """For a rank that ended by its own exception: what that says. Where it only says that a library failed, or a peer
    is gone, a cause that was printed counts. Ranks quote logs of other jobs: what was printed, or what a script raises
    as a KeyError or its like, blames no node."""
    own = [m for m in found if m.place == _HEADLINE or (m.place == _DETAILS and m.signature.role is LineRole.CAUSE)]
    of_code = _OF_CODE.match(headline.decode("utf-8", "replace"))
    if not own and not of_code:
        own = [m for m in found if m.place == _DETAILS and m.signature.role is LineRole.ECHO]
    if of_code:
        own = [m for m in own if m.signature.role is LineRole.CAUSE and m.signature.blame is not Blame.NODE]
    for match in own:
        if match.signature.name == _STOPPED and match.place == _HEADLINE:
            return match
    best = min(own, key=_order, default=None)
    if best is None or best.signature.role is LineRole.CAUSE:
        return best
    printed = (m for m in found if m.signature.role is LineRole.CAUSE and m.signature.blame is not Blame.NODE)
    return min(printed, key=_order, default=best)


def _weighed(match: _Match, where: RaisedPlace | None) -> _Match:
    """The match with the confidence that its place gives it.

    A likely finding is certain where the place proves its class, unless it would end the job. Common words without such
    a place are a guess.
    """
    s = match.signature
    is_proved = where is not None and s.topic in where.proves
    if match.is_common and not is_proved:
        return match._replace(signature=s._replace(confidence=Confidence.GUESS))
    if is_proved and not match.is_common and s.confidence is Confidence.LIKELY and s.remedy is Remedy.RESTART:
        return match._replace(signature=s._replace(confidence=Confidence.CERTAIN))
    return match


def _no_surer(match: _Match, own: bool, ended_by: int) -> _Match:
    """The match, without its exclusion where the line may be a quotation. A rule about an exception excludes a node for
    a headline that a device library raised, or for what native code said as it aborted; a rule about output does so
    outside an exception."""
    s = match.signature
    if s.blame is not Blame.NODE or s.confidence is not Confidence.CERTAIN:
        return match
    native = not own and ended_by == _SIGABRT and _NATIVE_LINE.search(match.line.lower())
    if not own if s.printed else native or (match.place == _HEADLINE and _OF_DEVICE.match(match.line)):
        return match
    return match._replace(signature=s._replace(confidence=Confidence.LIKELY, remedy=Remedy.RESTART))


def _may_explain(s: Signature, fault: RankFault, ended_by: int) -> bool:
    """Whether a rule can explain an end without an exception. A signal from outside is neither the script's doing, but
    for the limits that the kernel enforces, nor the consequence of what a peer did."""
    if fault.kind is FaultKind.HANG or ended_by not in (0, _SIGABRT):
        return (s.blame is not Blame.USER or s.kills) and (s.role is not LineRole.ECHO or ended_by == _SIGTERM)
    return True


def _order(match: _Match) -> tuple[int, int, int]:
    """A cause goes first; then what is nearer to the headline; then the surer rule."""
    s = match.signature
    return _ROLES.index(s.role), match.place, _CONFIDENCE.index(s.confidence)


def _without_exception(match: _Match) -> tuple[int, bool, bool, int, int]:
    """A cause goes first; then what the kernel, a driver or Slurm says; then what only such programs print."""
    s = match.signature
    return _ROLES.index(s.role), s.blame not in _FACTS, not s.printed, match.place, _CONFIDENCE.index(s.confidence)


# --- what matches -----------------------------------------------------------------------------------------------------


def _told(lines: Sequence[bytes], signatures: Sequence[Signature]) -> Iterator[_Match]:
    """Matches in the lines of the exception, or in those that stand for one; the first is the headline."""
    for number, line in enumerate(lines):
        yield from _matches(line, line.lower(), _HEADLINE if number == 0 else _DETAILS, signatures)


def _printed(texts: Sequence[bytes], signatures: Sequence[Signature]) -> Iterator[_Match]:
    """Matches of the rules that count anywhere, behind the last progress."""
    for text in texts:
        lower = text.lower()
        begin = max(0, progress(lower))
        yield from _matches(text[begin:], lower[begin:], _ELSEWHERE, [one for one in signatures if one.printed])
        facts = [one for one in signatures if one.printed and one.is_field] if begin else ()
        yield from _matches(text[:begin], lower[:begin], _ELSEWHERE, facts)  # never void


def _matches(text: bytes, lower: bytes, place: int, signatures: Sequence[Signature]) -> Iterator[_Match]:
    for signature in signatures:
        for first, more, is_common in _pieces(signature.texts):
            for at, line in _lines_with(lower, first, more) if first in lower else ():
                if _fits(signature, line):
                    yield _Match(signature, text[at : at + len(line)], place, is_common)


def _fits(signature: Signature, line: bytes) -> bool:
    if (signature.pattern and not _pattern(signature.pattern).search(line)) or RETRIED.search(line):
        return False
    return not any(hint in line for hint in _ADVICE)


def progress(lower: bytes) -> int:
    """Where the last line begins (of a text in lower case) that shows that the rank went on; -1 without one."""
    for found in reversed(list(PROGRESS.finditer(lower))):
        first, last = lower.rfind(b"\n", 0, found.start()) + 1, lower.find(b"\n", found.end())
        if not NO_PROGRESS.search(lower[first : last if last >= 0 else len(lower)][:_BEHIND_BYTES]):
            return first
    return -1


def iteration(text: bytes) -> int:
    """The last step or iteration of the training that an output tells, also by tqdm's bar; -1 = none is known to within
    10 steps. Lines about checkpoints, evaluation and the like tell none."""
    for pattern in (_ITERATION, _BAR):
        lines = (line for line in text.lower().replace(b"\r", b"\n").split(b"\n") if not _NO_STEP.search(line))
        found = [int(match[1].replace(b",", b"")) for line in lines if (match := pattern.search(line))]
        steps = [number for number, before in zip(found, [-1, *found], strict=False) if number != before]
        if len(steps) > 1 and 0 < steps[-1] - steps[-2] <= _EXACT:
            return steps[-1]
    return -1


@cache
def _pattern(text: str) -> re.Pattern[bytes]:
    """Compiled when a text of its rule is found: to compile all takes 6 ms of a restart."""
    return re.compile(text.encode())


@cache
def _pieces(texts: Sequence[str]) -> Sequence[tuple[bytes, Sequence[bytes], bool]]:
    """Of each text: what is before the first asterisk, what has to follow, and whether these are common words."""
    split = [(text.removeprefix("?").encode().split(b"*"), text.startswith("?")) for text in texts]
    return [(first, more, is_common) for (first, *more), is_common in split]


def _lines_with(lower: bytes, text: bytes, more: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
    """(position of its first byte, line) of each line with that text, and `more` behind it; of a long line what is
    around it."""
    at = -1
    for _ in range(_MOST_LINES):
        at = lower.find(text, at + 1)
        if at < 0:
            break
        begin, end = lower.rfind(b"\n", 0, at) + 1, lower.find(b"\n", at)
        end = end if end >= 0 else len(lower)
        begin, last = max(begin, at - _BEFORE_BYTES), min(end, at + _BEHIND_BYTES)
        if _holds(lower, at + len(text), last, more):
            yield begin, lower[begin:last]
        at = end


def _holds(lower: bytes, begin: int, end: int, pieces: Sequence[bytes]) -> bool:
    """Whether the pieces follow one another between two positions."""
    for piece in pieces:
        begin = lower.find(piece, begin, end) + len(piece)
        if begin < len(piece):
            return False
    return True


def _exception(fault: RankFault) -> list[bytes]:
    """The lines of the exception that ended it; the first is the headline."""
    raised = raised_in(fault.traceback)
    lines = ("",) if raised is None else (raised.headline, *raised.details)
    told = [line.encode("utf-8", "replace") for line in lines]
    if _LAST_ERROR in told[:-1]:  # NCCL's own verdict goes first
        told[0] = told.pop(told.index(_LAST_ERROR) + 1) + b" / " + told[0]
    return told


def _last_lines(stderr: bytes) -> list[bytes]:
    """The last line, then those before it."""
    return [line for line in stderr[-8192:].split(b"\n") if line.strip()][-_LAST_LINES:][::-1]


def _abort(stderr: bytes) -> list[bytes]:
    """An empty headline, then what native code said of the reason to abort."""
    return [b"", *(line for line in stderr[-_ABORT_BYTES:].split(b"\n") if _NATIVE_LINE.search(line.lower()))]


def _plain(text: bytes) -> bytes:
    return clean(text.decode("utf-8", "replace")).encode("utf-8", "replace")


# --- without a rule ---------------------------------------------------------------------------------------------------


def _of_place(fault: RankFault, where: RaisedPlace | None) -> Finding | None:
    """An error of input and output that no rule knows: its place tells with what."""
    rule = where.rule if where is not None and is_of_io(fault.message) else ""
    return of_rule(fault, rule, fault.message, "frame") if rule else None


def of_rule(fault: RankFault, rule: str, line: str, rests_on: str) -> Finding:
    """The finding of a rule that other facts than its texts have shown."""
    s = named(rule)
    assert s is not None
    print_ = _fingerprint(fault, rule, line)
    head = line[:_LINE_CHARS]
    return Finding(rule, s.role, s.blame, s.confidence, s.remedy, print_, head, rests_on)


def _without_signature(fault: RankFault, texts: Sequence[bytes]) -> Finding:
    """No rule knows what it printed: how it ended is all there is, with its last lines."""
    ended_by = _ended_by(fault)
    if fault.kind is FaultKind.EXIT and fault.traceback:
        print_, line = _fingerprint(fault, "", fault.message), fault.message[:_LINE_CHARS]
        sure = Confidence.LIKELY if _OF_CODE.match(fault.message) else Confidence.GUESS
        return Finding("python-exception", LineRole.UNCLEAR, Blame.USER, sure, Remedy.RESTART, print_, line, "text")
    if ended_by == _SIGTERM:
        return Finding(_STOPPED, LineRole.ECHO, Blame.UNKNOWN, Confidence.LIKELY, Remedy.NONE, rests_on="exit")
    rule = "native-crash" if ended_by in _NATIVE else ""
    print_ = _fingerprint(fault, rule, fault.message)
    line = _said_last(texts)[:_LINE_CHARS]
    return Finding(rule, LineRole.UNCLEAR, Blame.UNKNOWN, Confidence.GUESS, Remedy.RESTART, print_, line, "exit")


def _said_last(texts: Sequence[bytes]) -> str:
    """The last lines of stderr, else of stdout, that are neither progress nor advice, in one line; "" = none."""
    for text in texts:
        lines = text[-_ABORT_BYTES:].decode("utf-8", "replace").split("\n")
        said = [line.strip() for line in lines if not _is_noise(line)]
        if said:
            return BETWEEN_LINES.join(said[-_SAID_LINES:])
    return ""


def _is_noise(line: str) -> bool:
    lower = line.lower().encode("utf-8", "replace")
    return _NOISE.search(line) is not None or progress(lower) >= 0 or any(hint in lower for hint in _ADVICE)


def _ended_by(fault: RankFault) -> int:
    """The signal that ended it, also where a shell between says so; 0 = none."""
    return -fault.exit_code if fault.exit_code < 0 else fault.exit_code - 128 if 128 < fault.exit_code < 160 else 0


def _fingerprint(fault: RankFault, rule: str, line: str) -> str:
    """Equal for equal failures: what differs between ranks, nodes and runs is left out."""
    text = _VARIABLE.sub(b"", line.lower().encode("utf-8", "replace"))
    where = failing_line(fault.traceback) or ""
    return hashlib.sha256(b"\0".join((rule.encode(), text, where.encode("utf-8", "replace")))).hexdigest()[:16]
