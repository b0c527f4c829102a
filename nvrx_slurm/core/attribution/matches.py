"""The lines of an output that rules know. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from nvrx_slurm.core.attribution.fields import have
from nvrx_slurm.core.attribution.reached import progress
from nvrx_slurm.core.attribution.signatures import ADVICE, RETRIED, Signature

HEADLINE, DETAILS, ELSEWHERE = range(3)  # where a match is
# of a line around a text; patterns may take quadratic time
_BEFORE_BYTES, _BEHIND_BYTES = 512, 2048
_ERROR = re.compile(
    rb"^(?!.*(?:(?<!nccl )warn|\binfo\b|\bdebug\b))"
    rb".*(?:error|exception|fail|fatal|assert|unable|n't |not |kill).*$",
    re.MULTILINE | re.IGNORECASE,
)
_MOST_LINES = 20  # per text of a signature
_ADVICE = tuple(text.encode() for text in ADVICE)
_SAID_LINES = 3  # that say how a program ended, where no rule knows more
BETWEEN_LINES = " | "  # of these
_NOISE = re.compile(
    r"\d+%\||it/s|destroy_process_group|^Extension modules|^\s*$|[=-]{20}|error_file: |To enable traceback"
)
_OF_FIELDS = "@"  # a rule's pattern that asks for fields begins so


class Match(NamedTuple):
    """A line that a rule knows."""

    signature: Signature
    line: bytes
    place: int
    is_common: bool = False  # its words alone are no proof


class _Piece(NamedTuple):
    """A text of a rule: what is before the first asterisk, and what has to follow."""

    first: bytes
    more: Sequence[bytes]
    is_common: bool


def told(lines: Sequence[bytes], signatures: Sequence[Signature]) -> Iterator[Match]:
    """Matches in the lines of the exception, or in those that stand for one; the first is the headline."""
    text = b"\n".join(lines)
    yield from _matches(text, text.lower(), DETAILS, signatures, len(lines[0]))


def printed(texts: Sequence[bytes], signatures: Sequence[Signature]) -> Iterator[Match]:
    """Matches of the rules that count anywhere: behind the last progress, and facts before it, too."""
    anywhere = [one for one in signatures if one.printed]
    facts = [one for one in anywhere if one.is_field]  # never void
    for text in texts:
        lower = text.lower()
        begin = max(0, progress(lower))
        yield from _matches(text[begin:], lower[begin:], ELSEWHERE, anywhere)
        if begin:
            yield from _matches(text[:begin], lower[:begin], ELSEWHERE, facts)


def errors(text: bytes, signatures: Sequence[Signature]) -> Iterator[Match]:
    """Matches in the lines that tell of an error, behind the last progress: for an end whose exception is not known."""
    begin = max(0, progress(text.lower()))
    lines = _ERROR.findall(text, begin)
    for match in told([b"", *lines], signatures):
        yield match._replace(place=ELSEWHERE)


def is_advice(lower: bytes) -> bool:
    """Whether a line only says what one could do."""
    return any(hint in lower for hint in _ADVICE)


def last_said(texts: Sequence[bytes], most_bytes: int, most_chars: int) -> str:
    """The last lines of the first text that has any which are neither progress nor advice, in one line; "" = none.

    The last line that tells of an error and the last of all, or else the last three.
    """
    for text in texts:
        lines = text[-most_bytes:].decode("utf-8", "replace").split("\n")
        said = [line.strip() for line in lines if not _is_noise(line)]
        if not said:
            continue
        wrong = [line for line in said[:-1] if _ERROR.match(line.encode())]
        shown = [wrong[-1], said[-1]] if wrong else said[-_SAID_LINES:]
        most = most_chars // len(shown) - len(BETWEEN_LINES)
        return BETWEEN_LINES.join(line[:most] for line in shown)
    return ""


def _is_noise(line: str) -> bool:
    lower = line.lower().encode("utf-8", "replace")
    return bool(_NOISE.search(line)) or progress(lower) >= 0 or is_advice(lower)


def _matches(
    text: bytes, lower: bytes, place: int, signatures: Sequence[Signature], headline: int = -1
) -> Iterator[Match]:
    """Matches in a text. `headline`: where its first line ends, if that is the headline."""
    for signature in signatures:
        for piece in _pieces(signature.texts):
            if piece.first not in lower:
                continue
            for at, line in _lines_with(lower, piece):
                if not _fits(signature, line):
                    continue
                end = at + len(line)
                shown = text[at:end]
                where = HEADLINE if at < headline else place
                yield Match(signature, shown, where, piece.is_common)


def _fits(signature: Signature, line: bytes) -> bool:
    pattern = signature.pattern
    if RETRIED.search(line) or is_advice(line):
        return False
    if pattern.startswith(_OF_FIELDS):
        return have(line.decode("utf-8", "replace"), pattern.removeprefix(_OF_FIELDS))
    return not pattern or _compiled(pattern).search(line) is not None


@cache
def _compiled(text: str) -> re.Pattern[bytes]:
    """When a text of its rule is found: to compile all takes 6 ms of a restart."""
    return re.compile(text.encode())


@cache
def _pieces(texts: Sequence[str]) -> Sequence[_Piece]:
    found = []
    for text in texts:
        first, *more = text.removeprefix("?").encode().split(b"*")
        found.append(_Piece(first, more, text.startswith("?")))
    return found


def _lines_with(lower: bytes, piece: _Piece) -> Iterator[tuple[int, bytes]]:
    """(position of its first byte, line) of each line with that text; of a long line what is around it."""
    at = -1
    for _ in range(_MOST_LINES):
        at = lower.find(piece.first, at + 1)
        if at < 0:
            break
        begin = lower.rfind(b"\n", 0, at) + 1
        end = lower.find(b"\n", at)
        if end < 0:
            end = len(lower)
        begin = max(begin, at - _BEFORE_BYTES)
        last = min(end, at + _BEHIND_BYTES)
        if _holds(lower, at + len(piece.first), last, piece.more):
            yield begin, lower[begin:last]
        at = end


def _holds(lower: bytes, begin: int, end: int, pieces: Sequence[bytes]) -> bool:
    """Whether the pieces follow one another between two positions."""
    for piece in pieces:
        begin = lower.find(piece, begin, end) + len(piece)
        if begin < len(piece):
            return False
    return True
