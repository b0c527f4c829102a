"""JSON that anybody may have written: bounded in size, depth, numbers and time. Pure, and quick to import."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MOST_DEPTH = 32  # no file of ours nests half as deeply
# of structure: what is decoded takes up to a hundred times the memory of its text
_MOST_MARKS = 700_000
# no time, count or size of ours is as large, and all work with smaller ones is quick
_MOST_DIGITS, _HUGE = 18, 1e18


def parsed(text: bytes | str) -> Any:
    """The value of a text. Raises ValueError for what is none, and for what no program of ours writes."""
    return _bounded(_DECODER.decode, text.decode() if isinstance(text, bytes) else text)


def first_value(text: str) -> tuple[Any, int]:
    """The value that a text begins with, and where it ends. Raises ValueError as `parsed`."""
    value, end = _bounded(_DECODER.raw_decode, text)
    return value, end


def _bounded(decode: Callable[[str], Any], text: str) -> Any:
    if len(text) > _MOST_MARKS and sum(map(text.count, "[{,:")) > _MOST_MARKS:
        raise ValueError("it has too many values")
    try:
        found = decode(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
    level: list[Any] = [[found]]
    for _ in range(MOST_DEPTH + 1):
        level = [
            child
            for one in level
            for child in (one.values() if type(one) is dict else one)
            if type(child) in _NESTED
        ]
    if level:
        raise ValueError("it nests too deeply")
    return found


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"it holds the number {text:.20}")
    return int(text)


def _real(text: str) -> float:
    """The number in `text`. NaN and Infinity, which JSON does not have, are refused, too."""
    value = float(text)
    if not -_HUGE < value < _HUGE:
        raise ValueError(f"it holds the number {text:.20}")
    return value


_NESTED = frozenset({dict, list, tuple})
_DECODER = json.JSONDecoder(parse_float=_real, parse_int=_whole, parse_constant=_real)
