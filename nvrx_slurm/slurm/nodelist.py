"""Slurm's host lists in pure Python: ``n[01-03,7]-ib[0-1]``, and counts such as ``2(x3),1``.

`scontrol show hostnames` dies without a slurm.conf, which containers seldom have; hence this. The language is that
of scontrol(1) "show hostlist/hostnames": names separated by commas, with any number of brackets that hold numbers
and ranges; leading zeros pad; several brackets are a product whose last bracket runs fastest.
"""

from __future__ import annotations

import re
from itertools import product

from nvrx_slurm.errors import UsageError

MAX_HOSTS = 65536  # Slurm's own bound (MAX_SLURM_NODES) on nodes of one cluster
_NAME = re.compile(r"(?:[^\s,\[\]]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"(\[[^\[\]]*\])")
_MAX_NAME_CHARS = 255  # of a domain name, see RFC 1035
_COMMA = "\0"  # stands for a comma inside brackets
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def expand(hostlist: str) -> list[str]:
    """Names in a host list, in its order, duplicates kept; [] for "" (and Slurm's "(null)").

    Raises UsageError that names the part when the text is malformed or gives more than 65536 names.
    """
    text = hostlist.strip()
    if text in ("", "(null)"):
        return []
    hosts: list[str] = []
    for part in _BRACKET.sub(lambda found: found[0].replace(",", _COMMA), text).split(","):
        if not _NAME.fullmatch(part):
            raise _bad(part, "is no name with closed brackets")
        hosts.extend("".join(words) for words in product(*_pieces(part, MAX_HOSTS - len(hosts))))
    return hosts


def _pieces(part: str, most: int) -> list[list[str]]:
    """What each piece of a name may be; `most` names, of which none is made before they are counted."""
    pieces = []
    count = 1
    length = 0
    for piece in _BRACKET.split(part):
        words = _numbers(piece) if piece.startswith("[") else [piece]
        count *= len(words)
        if count > most:
            raise _bad(part, f"makes it more than {MAX_HOSTS} names")
        length += max(map(len, words))
        if length > _MAX_NAME_CHARS:
            raise _bad(part, f"is longer than {_MAX_NAME_CHARS} characters")
        pieces.append(words)
    return pieces


def different_counts(text: str) -> set[int]:
    """The numbers in ``SLURM_TASKS_PER_NODE`` and its like: "2(x3),1" -> {2, 1}. Raises UsageError."""
    return {count for count, nodes in counts(text)}


def counts(text: str) -> list[tuple[int, int]]:
    """Each of them with its number of nodes: "2(x3),1" -> [(2, 3), (1, 1)]. Raises UsageError."""
    found = []
    for part in text.strip().split(","):
        one = _COUNT.fullmatch(part)
        if one is None:
            raise UsageError(
                f"count list {text!r} is not like 2(x3),1; Slurm sets it, so do not change it."
            )
        found.append((int(one[1]), int(one[2] or 1)))
    return found


def _bad(part: str, why: str) -> UsageError:
    return UsageError(f"host list {part[:80]!r} {why}; write it like n[01-03,7]-ib[0-1].")


def _numbers(bracket: str) -> list[str]:
    """Numbers of one bracket as text, padded as the first number of each range is."""
    numbers: list[str] = []
    for item in bracket[1:-1].split(_COMMA):
        found = _RANGE.fullmatch(item)
        if not found or int(found[1]) > int(found[2] or found[1]):
            raise _bad(item, "is neither a number nor a range")
        first, last = int(found[1]), int(found[2] or found[1])
        if len(numbers) + last - first >= MAX_HOSTS:
            raise _bad(item, f"makes it more than {MAX_HOSTS} names")
        numbers.extend(str(n).zfill(len(found[1])) for n in range(first, last + 1))
    return numbers
