"""Slurm's host lists in pure Python: ``n[01-03,7]-ib[0-1]``, and counts such as ``2(x3),1``.

`scontrol show hostnames` dies without a slurm.conf, which containers seldom have; hence this. The language is that
of scontrol(1) "show hostlist/hostnames": names separated by commas, with any number of brackets that hold numbers
and ranges; leading zeros pad; several brackets are a product whose last bracket runs fastest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from nvrx_slurm.errors import UsageError

MAX_HOSTS = 65536  # Slurm's own bound (MAX_SLURM_NODES) on nodes of one cluster
_MAX_TEXT = 1 << 20  # characters
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_NAME = re.compile(r"[^\s,\[\]]*")
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def expand(hostlist: str) -> list[str]:
    """Names in a host list, in its order, duplicates kept; [] for "" (and Slurm's "(null)").

    Raises UsageError that names the place when the text is malformed or gives more than 65536 names.
    """
    text = hostlist.strip()
    if text in ("", "(null)"):
        return []
    if len(text) > _MAX_TEXT:
        raise UsageError(f"host list of {len(text)} characters is too long; at most {_MAX_TEXT} are read.")
    hosts: list[str] = []
    for start, part in _split(text):
        hosts.extend(_expand_one(text, start, part, MAX_HOSTS - len(hosts)))
    return hosts


def expand_counts(text: str) -> list[int]:
    """Numbers of ``SLURM_TASKS_PER_NODE`` and its like: "2(x3),1" -> [2, 2, 2, 1]; [] for "".

    Raises UsageError that names the part when the text is malformed or gives more than 65536 numbers.
    """
    counts: list[int] = []
    for part in text.strip().split(",") if text.strip() else []:
        found = _COUNT.fullmatch(part)
        if found is None:
            raise UsageError(f"count list {text!r}: {part!r} is neither a number nor like 2(x3); correct it.")
        repeat = int(found[2] or 1)
        if len(counts) + repeat > MAX_HOSTS:
            raise UsageError(f"count list {text!r}: more than {MAX_HOSTS} nodes; correct it.")
        counts.extend([int(found[1])] * repeat)
    return counts


def _bad(text: str, at: int, why: str) -> UsageError:
    shown = text if len(text) <= 80 else f"{text[max(0, at - 30) : at + 30]} (a part of it)"
    return UsageError(f"host list {shown!r}: {why} at character {at + 1}; write it like n[01-03,7]-ib[0-1].")


def _split(text: str) -> Iterator[tuple[int, str]]:
    """(offset, part) between the commas that are outside brackets."""
    start, opened = 0, -1
    for at, char in enumerate(text):
        if char == "[":
            if opened >= 0:
                raise _bad(text, at, "a bracket within a bracket")
            opened = at
        elif char == "]":
            if opened < 0:
                raise _bad(text, at, "a bracket that was never opened")
            opened = -1
        elif char == "," and opened < 0:
            yield start, text[start:at]
            start = at + 1
    if opened >= 0:
        raise _bad(text, opened, "a bracket that is never closed")
    yield start, text[start:]


def _expand_one(text: str, start: int, part: str, room: int) -> list[str]:
    """Names of one comma-free-outside-brackets part; `start` is its offset in `text`, for messages."""
    if not part:
        raise _bad(text, start, "an empty name")
    pieces: list[list[str]] = []
    total, at = 1, 0
    for literal in re.split(r"(\[[^]]*\])", part):
        if literal.startswith("["):
            numbers = _bracket(text, start + at + 1, literal[1:-1], room)
            pieces.append(numbers)
            total *= len(numbers)
        elif not _NAME.fullmatch(literal):
            raise _bad(text, start + at, "a blank")
        else:
            pieces.append([literal])
        at += len(literal)
        if total > room:
            raise _bad(text, start, f"more than {MAX_HOSTS} names")
    return ["".join(words) for words in product(*pieces)]


def _bracket(text: str, start: int, inside: str, room: int) -> list[str]:
    """Numbers of one bracket as text, padded as the first number of each range is."""
    numbers: list[str] = []
    for item in inside.split(","):
        found = _RANGE.fullmatch(item)
        if found is None:
            raise _bad(text, start, f"{item!r}, which is neither a number nor a range,")
        low, high = found[1], found[2] or found[1]
        if int(high) < int(low):
            raise _bad(text, start, f"a range that runs backwards ({item})")
        if len(numbers) + int(high) - int(low) >= room:
            raise _bad(text, start, f"more than {MAX_HOSTS} names")
        numbers.extend(str(n).zfill(len(low)) for n in range(int(low), int(high) + 1))
        start += len(item) + 1
    return numbers
