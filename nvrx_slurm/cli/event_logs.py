"""What the event logs of coordinators tell: the plans, and what was said and found between two of them.

The log of a big job has a gigabyte. It is searched for the few lines that count. What is damaged or torn is left out.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_MOST_BYTES = 1 << 30  # at the end of a log
_HEAD_BYTES, _TAIL_BYTES = 512 << 10, 64 << 10  # behind a plan, and up to the next one, that are searched for the rest
_LABEL_BYTES = 400  # at the beginning of a record
_WALL = re.compile(rb'"wall":(\d{1,12}(?:\.\d+)?)')
_JSON = json.JSONDecoder()
# Where a value is: the text before it, and how it begins.
_PLAN, _TO = (b'{"plan":', b"{"), (b',"to":', b"[")
SAID = b'{"type":"Say","text":', b'"'
_NODE = b'{"type":"Joined","message":{"type":"Register","node":', b"{"
FAULT, HANG = (b"", b'{"type":"RankFault",'), (b"", b'{"type":"HangFound",')
_COUNTED = b"", b'{"type":"Counted",'


class LogValue(NamedTuple):
    """A JSON value in a line. `wall_s`: Unix seconds of its step; `stop`, `end`: where the value and the line end."""

    wall_s: float
    value: Any
    stop: int
    end: int


class CoordinatorLog:
    """One log, mapped into memory. Raises OSError where it cannot be read."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            size = path.stat().st_size if path.is_file() else 0
            self._text = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""
        self.size = self._text.rfind(b"\n") + 1  # without a line that is not whole yet
        self.begin = max(0, self.size - _MOST_BYTES)
        ends = self._text[self.begin : self.begin + _TAIL_BYTES], self._text[-_TAIL_BYTES:]
        head, tail = (_WALL.findall(part) for part in ends)
        self._last: dict[tuple[bytes, bytes], tuple[bytes, Any]] = {}  # of each kind: its text, and the value
        self.walls = [float(head[0]), float(tail[-1])] if head and tail else []  # of the first and the last step

    def find(self, what: tuple[bytes, bytes], begin: int, end: int, label: bytes = b"") -> Iterator[LogValue]:
        """Each such value between two places. `label`: a text that is at the beginning of the value.

        Equal neighbours are one object: they are decoded once.
        """
        before, needle = what[0], b"".join(what)
        while (at := self._text.find(needle, begin, end)) >= 0:
            begin = at + len(needle)
            if label not in self._text[at : at + _LABEL_BYTES]:
                continue
            first, last = self._text.rfind(b"\n", 0, at) + 1, self._text.find(b"\n", at)
            last = last if last >= 0 else self.size
            at += len(before)
            text, value = self._last.get(what, (b"", None))
            if not text or self._text[at : at + len(text)] != text:
                line = self._text[at:last].decode("utf-8", "replace")
                try:
                    value, length = _JSON.raw_decode(line)
                except (ValueError, RecursionError):
                    continue
                text = line[:length].encode()
                self._last[what] = text, value
            if wall := _WALL.search(self._text[first : first + _LABEL_BYTES]):
                yield LogValue(float(wall[1]), value, at + len(text), last)


class Cycle(NamedTuple):
    """A cycle. `plan`: JSON of its Plan, {} before the first; `to`: who got it, by step: "ID GROUP_RANK OFFSET".

    `parts`: of logs, from that plan to the next one: log, begin, end.
    """

    number: int
    wall_s: float
    plan: dict[str, Any]
    to: list[list[str]]
    parts: list[tuple[CoordinatorLog, int, int]]

    def find(self, what: tuple[bytes, bytes], label: bytes = b"") -> Iterator[LogValue]:
        """As CoordinatorLog.find, near the beginning and the end of each part."""
        for log, begin, end in self.parts:
            cut = min(end, begin + _HEAD_BYTES) if begin > log.begin else end
            yield from log.find(what, begin, cut, label)
            yield from log.find(what, max(cut, end - _TAIL_BYTES), end, label)

    def said(self) -> dict[str, float]:
        """What the console said, and when (Unix seconds)."""
        return {str(found.value): found.wall_s for found in self.find(SAID)}

    def nodes(self) -> Iterator[dict[str, Any]]:
        """JSON of each Node that has registered."""
        return (found.value for found in self.find(_NODE))


def logs_of(run: Path) -> list[CoordinatorLog]:
    """Of all coordinators of a run that have taken a step, the first one first."""
    found = []
    for path in (run / "events").glob("coordinator*.jsonl"):
        try:
            found.append(CoordinatorLog(path))
        except (OSError, ValueError):
            continue
    return sorted((log for log in found if log.walls), key=lambda log: log.walls)


def cycles_in(logs: list[CoordinatorLog]) -> list[Cycle]:
    """All cycles; what was before the first one is cycle -1. Raises KeyError, TypeError, ValueError for no plan."""
    seen = [Cycle(-1, logs[0].walls[0], {}, [], [])] if logs else []
    for log in logs:
        begin = log.begin
        for found in log.find(_PLAN, log.begin, log.size):
            to = next(log.find(_TO, found.stop, found.end), None)
            if to is None:
                continue
            if int(found.value["cycle"]) > seen[-1].number:
                seen[-1].parts.append((log, begin, found.end))
                seen.append(Cycle(int(found.value["cycle"]), found.wall_s, found.value, [], []))
                begin = found.end
            seen[-1].to.append(to.value)
        seen[-1].parts.append((log, begin, log.size))
    return seen


def counted_in(logs: list[CoordinatorLog]) -> dict[int, dict[str, Any]]:
    """JSON of the last Counted of each cycle."""
    found = (one.value for log in logs for one in log.find(_COUNTED, log.begin, log.size))
    return {int(one["cycle"]): one for one in found}
