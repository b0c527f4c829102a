"""What the last output of a faulty rank says: one `Finding` per rank, made on its node. Pure; about 5 ms for 64 KiB."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import NamedTuple

from nvrx_slurm.core.attribution.signatures import ADVICE, PROGRESS, RETRIED, SIGNATURES, Signature
from nvrx_slurm.core.attribution.verdict import failing_line
from nvrx_slurm.types import Blame, Confidence, FaultKind, Finding, LineRole, RankFault, Remedy

TAIL_BYTES = 64 * 1024  # of each file that is looked at
_LINE_CHARS = 300
_BEFORE_BYTES, _BEHIND_BYTES = 512, 2048  # of a line around a text; patterns may take quadratic time
_MOST_LINES = 20  # per text of a signature
_ROLES, _CONFIDENCE = list(LineRole), list(Confidence)
_PEER = re.compile(
    rb"(?:closed by(?: remote)? peer|completion from peer|connect to) \[?([\w.:-]{1,100}?)\]?(?:[:<]\d+|$|[\s>])"
)
_VARIABLE = re.compile(rb"0x[0-9a-f]+|\d+|\[rank\s*\]:?|(?:/[\w.+-]+)+/")  # differs between equal failures
_SIGABRT, _SIGTERM = 6, 15
_OF_KILLS = "cgroup-out-of-memory"  # the only rule of the user's about a death by a signal
_NATIVE = (4, 7, 8, 11)  # SIGILL, SIGBUS, SIGFPE, SIGSEGV
_ADVICE = tuple(text.encode() for text in ADVICE)
_PATTERNS = {s.name: re.compile(s.pattern.encode()) for s in SIGNATURES if s.pattern}
_TEXTS = [(signature, tuple(text.encode() for text in signature.texts)) for signature in SIGNATURES]


class _Match(NamedTuple):
    signature: Signature
    line: bytes
    is_last: bool  # it is the exception that ended the rank
    at: int


def examine(fault: RankFault, stderr: bytes, stdout: bytes = b"") -> Finding:
    """The finding for `fault`, from the ends of what its rank wrote (each at most `TAIL_BYTES` are looked at)."""
    own_error = fault.kind is FaultKind.EXIT and fault.traceback
    last = fault.message.encode("utf-8", "replace")
    if fault.kind is FaultKind.EXIT and not last:  # as argparse ends
        last = stderr.rstrip().rpartition(b"\n")[2]
    found = [match for text in (last, stderr, stdout) for match in _matches(text[-TAIL_BYTES:], last.lower())]
    if own_error:  # ranks quote logs of other jobs: a node is to blame only for the exception that ended the rank
        found = [match for match in found if match.is_last or match.signature.blame is not Blame.NODE]
    if fault.kind is FaultKind.HANG or _ended_by(fault) not in (0, _SIGABRT):  # killed, not ended by its own error
        found = [m for m in found if m.signature.blame is not Blame.USER or m.signature.name == _OF_KILLS]
    best = min(found, key=_order, default=None)
    if best is None or (best.signature.role is LineRole.ECHO and not best.is_last and own_error):
        return _without_signature(fault)
    s, line = best.signature, best.line.decode("utf-8", "replace").strip()[:_LINE_CHARS]
    peers = tuple(dict.fromkeys(peer.decode("ascii", "replace") for peer in _PEER.findall(best.line)))[:4]
    remedy = s.remedy if s.remedy is not Remedy.STOP or best.is_last else Remedy.RESTART
    return Finding(s.name, s.role, s.blame, s.confidence, remedy, _fingerprint(fault, s.name, line), line, peers)


def _order(match: _Match) -> tuple[int, bool, int, int]:
    """A cause goes first; then the exception that ended the rank; then the surer rule; then the earlier line."""
    sure = _CONFIDENCE.index(match.signature.confidence)
    return _ROLES.index(match.signature.role), not match.is_last, sure, match.at


def _matches(text: bytes, last: bytes) -> Iterator[_Match]:
    lower = text.lower()
    progress_at = max((found.start() for found in PROGRESS.finditer(lower)), default=-1)
    for signature, wanted in _TEXTS:
        for at, line in _lines_with(lower, wanted):
            pattern = _PATTERNS.get(signature.name)
            if (pattern and not pattern.search(line)) or any(hint in line for hint in _ADVICE) or RETRIED.search(line):
                continue
            if at >= progress_at:  # otherwise the rank went on after it
                is_last = bool(last) and last[:_BEFORE_BYTES] in line
                yield _Match(signature, text[at : at + len(line)], is_last, at)


def _lines_with(lower: bytes, wanted: tuple[bytes, ...]) -> Iterator[tuple[int, bytes]]:
    """(position of its first byte, line) of each line that holds one of the texts; of a long line what is around it."""
    for text in wanted:
        at = -1
        for _ in range(_MOST_LINES):
            at = lower.find(text, at + 1)
            if at < 0:
                break
            begin, end = lower.rfind(b"\n", 0, at) + 1, lower.find(b"\n", at)
            end = end if end >= 0 else len(lower)
            begin = max(begin, at - _BEFORE_BYTES)
            yield begin, lower[begin : min(end, at + _BEHIND_BYTES)]
            at = end


def _without_signature(fault: RankFault) -> Finding:
    """No rule knows what it printed: how it ended is all there is."""
    ended_by = _ended_by(fault)
    if fault.kind is FaultKind.EXIT and fault.traceback:
        print_ = _fingerprint(fault, "", fault.message)
        return Finding(
            "python-exception",
            LineRole.UNCLEAR,
            Blame.USER,
            Confidence.LIKELY,
            Remedy.RESTART,
            print_,
            fault.message[:_LINE_CHARS],
        )
    if ended_by == _SIGTERM:
        return Finding("stopped", LineRole.ECHO, Blame.UNKNOWN, Confidence.LIKELY, Remedy.NONE)
    rule = "native-crash" if ended_by in _NATIVE else ""
    return Finding(
        rule,
        LineRole.UNCLEAR,
        Blame.UNKNOWN,
        Confidence.GUESS,
        Remedy.RESTART,
        _fingerprint(fault, rule, fault.message),
    )


def _ended_by(fault: RankFault) -> int:
    """The signal that ended it, also where a shell between says so; 0 = none."""
    return -fault.exit_code if fault.exit_code < 0 else max(0, fault.exit_code - 128)


def _fingerprint(fault: RankFault, rule: str, line: str) -> str:
    """Equal for equal failures: what differs between ranks, nodes and runs is left out."""
    text = _VARIABLE.sub(b"", line.lower().encode("utf-8", "replace"))
    where = failing_line(fault.traceback) or ""
    return hashlib.sha256(b"\0".join((rule.encode(), text, where.encode("utf-8", "replace")))).hexdigest()[:16]
