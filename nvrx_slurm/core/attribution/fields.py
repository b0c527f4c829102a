"""The fields that drivers, libraries, the kernel and Slurm print, parsed: from the table `fields.txt`. Pure.

A rule about a number or a reason asks for the field, and not for words near it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache

_LINE_CHARS = 2048


with open(f"{__file__.removesuffix('.py')}.txt", encoding="utf-8") as file:
    rows = (row.partition(": ") for row in file.read().splitlines() if row[0] != "#")
    PARSERS = tuple(re.compile(pattern, re.IGNORECASE) for _, _, pattern in rows)


@lru_cache(64)  # several rules ask for those of one line
def fields_of(line: str) -> Mapping[str, str]:
    """The fields of a line by name; of equal names the first parser's counts."""
    found: dict[str, str] = {}
    for parser in PARSERS:
        match = parser.search(line, 0, _LINE_CHARS)
        for name, value in match.groupdict().items() if match else ():
            if value:
                found.setdefault(name, value)
    return found


@cache
def _conditions(text: str) -> Mapping[str, re.Pattern[str]]:
    pairs = (part.partition("=") for part in text.split())
    return {name: re.compile(value, re.IGNORECASE) for name, _, value in pairs}


def have(line: str, conditions: str) -> bool:
    """Whether each field of a line has a value as in "code=48|64 severity=fatal"."""
    found = fields_of(line)
    return all(
        pattern.fullmatch(found.get(name, "")) for name, pattern in _conditions(conditions).items()
    )
