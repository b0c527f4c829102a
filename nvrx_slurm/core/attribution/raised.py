"""The exception that ended a program, found in what the program printed. Pure.

Its headline is the first line behind the last frame. What follows it, such as torch's advice or C++ frames, is context.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

RAISED = "python-exception"  # the rule of an exception that no other rule knows
FROM, WHILE, THREAD = "from", "while", "thread"  # how an exception follows the one before it
TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'^[ |]*File "([^"\n]+)", line (\d+)(?:,? in (\S+))?', re.MULTILINE)
_LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python\d|/nvrx_slurm/")
FIRST_FRAME = '  File "'
_CURRENT = "Current thread "  # of faulthandler's dump, whose frames begin with the most recent call
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NUMBER = re.compile(
    r"(rank:? ?\d+|pid=\d+)|\d+"
)  # a time differs from line to line, a rank's number does not
_LOG_LINE = re.compile(
    r"(?:\d+: )?(?:\[rank\d|\[?\d{4}-\d\d-|\[?[EWIF]\d{4} |\S+:\d+:\d+ \[\d+\] |WARNING|ERROR)"
)
_OTHER = re.compile(r"(?!nccl)(?:\w+\.)*\w+(?:Error|Exception|Warning): ")
# Exceptions that a script raises by itself; others may be raised because of something else.
OF_CODE = re.compile(
    r"(?:Key|Value|Type|Index|Name|Attribute|Assertion|ZeroDivision|UnboundLocal|NotImplemented|Lookup|Unicode\w+)Error"
)
_FRAME_LINES, _DETAIL_LINES = 600, 16
_PREFIX_CHARS = 200
# Exceptions that only tell of another one, which is printed before them.
WRAPPERS = re.compile(
    r"\bChildFailedError|\bProcessRaisedException|\bProcessExitedException|[Ss]ee (?:root cause|stack trace)|"
    r"WorkerProc (?:initialization )?failed|EngineDeadError|^subprocess\.CalledProcessError"
)


# What Python prints between two exceptions of a chain, or between those of a group.
_CHAIN = re.compile(r"above exception was the direct cause|(handling of the above)|\+-+ \d+ -+$")
_CHAIN_LINES = 6  # from these words to the traceback, also where two ranks print


class RaisedException(NamedTuple):
    """An exception as it was printed, without the prefixes of its lines."""

    headline: str
    details: tuple[str, ...]  # the further lines of its message, at most 16 that are not indented
    traceback: str  # from the word Traceback on, to the last detail
    follows: str  # FROM or WHILE the exception before it; THREAD: it ended a thread


def clean(text: str) -> str:
    """`text` without colours; each state of a progress bar is a line."""
    return _ANSI.sub("", text).replace("\r", "\n") if "\x1b" in text or "\r" in text else text


def raised(text: str) -> Iterator[RaisedException]:
    """All exceptions in `text` (of `clean`), the last first."""
    lines, cut = _lines(text)
    for number in range(len(lines) - 1, -1, -1):
        is_ignored = number and "Exception ignored in" in lines[number - 1]
        if TRACEBACK in lines[number] and not is_ignored:
            found = _raised_at(lines, number)
            if found is None or (number == cut and not _OTHER.match(found.headline)):
                continue
            quoted = _quoted(found)
            yield found if quoted is None else found._replace(follows=FROM)
            if quoted is not None:
                yield quoted


def raised_in(text: str) -> RaisedException | None:
    """The last exception in `text` (of `clean`) that tells of itself, else the last one; None without any."""
    wrapper = None
    for one in raised(text):
        if not WRAPPERS.search(one.headline) and one.follows != THREAD:
            return one
        wrapper = wrapper or one
    return wrapper


def _lines(text: str) -> tuple[list[str], int]:
    """The lines of `text`, and which of them is put before frames whose beginning is cut off; -1 = none."""
    lines = text.split("\n")
    frame, first = text.find(FIRST_FRAME), text.find(TRACEBACK)
    if frame < 0 or 0 <= first < frame:
        return lines, -1
    begin = text.rfind("\n", 0, frame) + 1
    number = text.count("\n", 0, begin)
    lines.insert(number, f"{text[begin:frame]}{TRACEBACK}:")
    return lines, number


def _raised_at(lines: list[str], first: int) -> RaisedException | None:
    """The exception whose traceback begins with line `first`."""
    prefix = lines[first][: lines[first].index(TRACEBACK)].removesuffix("Original ")
    below = "".join(lines[first + 1 : first + 2]).partition(FIRST_FRAME)
    if below[1] and prefix.endswith(below[0]) and not _LOG_LINE.match(prefix):
        prefix = below[0]  # what stands before that is of another line: a progress bar has no end
    if len(prefix) > _PREFIX_CHARS:
        return None
    boxed = prefix.startswith("╭")
    told = [f"{TRACEBACK}:"]
    same = None if boxed or not prefix else re.compile(_NUMBER.sub(_digits, re.escape(prefix)))
    headline = ""
    more = 0  # lines behind it that are not indented
    for line in lines[first + 1 : first + _FRAME_LINES]:
        found = same.match(line) if same else None
        if same and not found and line.strip() != prefix.strip():
            if headline:
                break  # another program's line
            continue
        line = line[found.end() :] if found else line
        # a checkpoint's exception quotes those of its ranks
        again = (TRACEBACK in line and "(RANK " not in line) or _CHAIN.search(line)
        if (
            again
            or (headline and (_LOG_LINE.match(line) or _is_other(line, told)))
            or more > _DETAIL_LINES
        ):
            break
        if (
            not headline
            and line[:1] not in ("", " ", "\t", "|", "│", "╰")
            and not line.startswith(("[rank", "raise "))
        ):
            headline = line.rstrip()
        elif headline and line[:1] != " ":  # a message may hold another traceback
            more += 1
        told.append(line)
    if not headline:
        return None
    at = next(number for number, line in enumerate(told) if line.rstrip() == headline)
    details = tuple(told[at + 1 :])
    traceback = "\n".join(told).rstrip("\n") + "\n"
    return RaisedException(_full(headline, details), details, traceback, _follows(lines, first))


def _full(headline: str, details: Sequence[str]) -> str:
    """The headline, with the first line of a message that begins with a new line."""
    if not headline.endswith(":"):
        return headline
    said = (line.strip() for line in details)
    return f"{headline} {next(filter(None, said), '')}".rstrip()


def _quoted(outer: RaisedException) -> RaisedException | None:
    """The exception of another process, with its frames, that a message quotes as Ray's do."""
    told = outer.details
    for at in range(len(told) - 1, 0, -1):
        if _OTHER.match(told[at]) and told[at - 1].startswith("  "):
            traceback = "\n".join((f"{TRACEBACK}:", *told[: at + 1], ""))
            return RaisedException(told[at], told[at + 1 :], traceback, outer.follows)
    return None


def _follows(lines: list[str], first: int) -> str:
    """How the exception whose traceback begins with line `first` hangs together with the one before it."""
    if first and "Exception in thread" in lines[first - 1]:
        return THREAD
    words = (_CHAIN.search(line) for line in lines[max(0, first - _CHAIN_LINES) : first])
    found = next(filter(None, words), None)
    return "" if found is None else WHILE if found[1] else FROM


def _is_other(line: str, told: list[str]) -> bool:
    """Whether a line behind a headline is of another exception: it names one, and the line before is a message, too."""
    return _OTHER.match(line) is not None and told[-1][:1].strip() != ""


def _digits(number: re.Match[str]) -> str:
    return number[0] if number[1] else r"\d+"


def failing_line(traceback: str) -> str:
    """`FILE:LINE` of the innermost frame that is not a library's, else of the innermost frame; "" without any frame.

    `traceback`: Python's, of which the last exception counts, or faulthandler's dump, of which the current thread does.
    """
    found = frames(traceback)
    own = [place for place, library in found if not library]
    return (own or [place for place, _ in found] or [""])[0].partition(" in ")[0]


def frames(traceback: str) -> list[tuple[str, bool]]:
    """("FILE:LINE in FUNCTION", whether that is a library's) of the same thread, innermost first."""
    if TRACEBACK in traceback:
        found = _FRAME.findall(traceback[traceback.rfind(TRACEBACK) :])[::-1]
    else:
        found = _FRAME.findall(traceback.partition(_CURRENT)[2].partition("\n\n")[0] or traceback)
    return [
        (f"{file}:{line} in {function}", bool(_LIBRARY.search(file)))
        for file, line, function in found
    ]
