"""What the event logs of coordinators tell: the plans, and what was said and found between two of them.

The log of a big job has a gigabyte. It is searched for the few lines that count. What is damaged or torn is left out.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from nvrx_slurm.codec import from_plain
from nvrx_slurm.core.bounded_json import first_value
from nvrx_slurm.system.foreign import names_in, opened, size_of
from nvrx_slurm.types import Finding, RankFault

_MOST_BYTES = 1 << 30  # at the end of a log
_BLOCK_BYTES = 8 << 20  # read at once; more than the longest line
_MOST_LOGS = 200  # most logs of a run: each is an open file
# bytes of values of one kind; what each of them takes besides its text
_MOST_FOUND, _LEAST_FOUND = 256 << 20, 1000
# behind a plan, and up to the next one, that are searched for the rest
_HEAD_BYTES, _TAIL_BYTES = 512 << 10, 64 << 10
_LABEL_BYTES = 400  # at the beginning of a record
_WALL = re.compile(rb'"wall":(\d{1,12}(?:\.\d+)?)')
# Where a value is: the text before it, and how it begins.
_PLAN, _TO = (b'{"plan":', b"{"), (b',"to":', b"[")
SAID = b'{"type":"Say","text":', b'"'
_NODE = b'{"type":"Joined","message":{"type":"Register","node":', b"{"
FAULT = (b"", b'{"type":"RankFault",')
HANG = (b"", b'{"type":"HangFound",')
_COUNTED = b"", b'{"type":"Counted",'


class LogValue(NamedTuple):
    """A JSON value in a line. `wall_s`: Unix seconds of its step; `stop`, `end`: where the value and the line end."""

    wall_s: float
    value: Any
    stop: int
    end: int


class CoordinatorLog:
    """One log of a run, of which each line that counts is read anew. Raises OSError where it cannot be read."""

    def __init__(self, run: Path, name: str) -> None:
        self._file = opened(run, "events", name)
        self._block: tuple[int, bytes] = 0, b""  # what was read last
        self.size = self._line_at(size_of(self._file))  # without a line that is not whole yet
        self.begin = max(0, self.size - _MOST_BYTES)
        ends = (
            self._read(self.begin, _TAIL_BYTES),
            self._read(max(0, self.size - _TAIL_BYTES), _TAIL_BYTES),
        )
        head, tail = (_WALL.findall(part) for part in ends)
        # of each kind: its text, and the value
        self._last: dict[tuple[bytes, bytes], tuple[bytes, Any]] = {}
        # of the first and the last step
        self.walls = [float(head[0]), float(tail[-1])] if head and tail else []

    def _read(self, begin: int, most: int) -> bytes:
        return os.pread(self._file.fileno(), most, begin)

    def _line_at(self, place: int) -> int:
        """Where the line begins that has this place."""
        for size in (_TAIL_BYTES, _BLOCK_BYTES):
            begin = max(0, place - size)
            if newline := self._read(begin, place - begin).rfind(b"\n") + 1:
                return begin + newline
        return begin

    def _blocks(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Blocks of whole lines that hold those from `begin` to `end`, and where they are."""
        while begin < end:
            start, lines = self._block
            if not start <= begin < start + len(lines):
                start = self._line_at(begin)
                text = self._read(start, min(_BLOCK_BYTES, self.size - start))
                lines = text[: text.rfind(b"\n") + 1]
                self._block = start, lines
            if begin >= start + len(lines):
                return  # no program of ours writes such a line
            yield start, lines
            begin = start + len(lines)

    def find(
        self, what: tuple[bytes, bytes], begin: int, end: int, label: bytes = b""
    ) -> Iterator[LogValue]:
        """Each such value between two places. `label`: a text that is at the beginning of the value.

        Equal neighbours are one object: they are decoded once.
        """
        before = what[0]
        needle = b"".join(what)
        left = _MOST_FOUND
        for start, lines in self._blocks(begin, end):
            at = max(0, begin - start)
            while (at := lines.find(needle, at, end - start)) >= 0 and left > 0:
                value = at + len(before)
                begins = lines.rfind(b"\n", 0, at) + 1
                at += len(needle)
                if label not in lines[value : value + _LABEL_BYTES]:
                    continue
                ends = lines.find(b"\n", at)
                try:
                    text, found = self._decoded(what, lines, value, ends)
                except ValueError:
                    continue
                left -= len(text) + _LEAST_FOUND
                if wall := _WALL.search(lines[begins : begins + _LABEL_BYTES]):
                    yield LogValue(float(wall[1]), found, start + value + len(text), start + ends)

    def _decoded(
        self, what: tuple[bytes, bytes], lines: bytes, begin: int, end: int
    ) -> tuple[bytes, Any]:
        """The text of a value, and the value. Raises ValueError."""
        text, value = self._last.get(what, (b"", None))
        if not text or not lines.startswith(text, begin):
            line = lines[begin:end].decode("utf-8", "replace")
            value, length = first_value(line)
            text = line[:length].encode()
            self._last[what] = text, value
        return text, value


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
        """Find as CoordinatorLog.find, near the beginning and the end of each part."""
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


def coordinators_of(run: Path) -> list[str]:
    """The names of the event logs of a run's coordinators."""
    return fnmatch.filter(names_in(run / "events"), "coordinator*.jsonl")[:_MOST_LOGS]


def logs_of(run: Path) -> list[CoordinatorLog]:
    """The logs of all coordinators of a run that have taken a step, the first one first."""
    found = []
    for name in coordinators_of(run):
        with suppress(OSError):
            found.append(CoordinatorLog(run, name))
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


def first_fault(cycle: Cycle, restart: Mapping[str, Any]) -> dict[str, Any]:
    """JSON of the RankFault that a restart followed; its kind is "" where nobody has told it."""
    rank = int(restart.get("rank", -1))
    hung = any(True for _ in cycle.find(HANG))
    label = f'"infra_rank":{restart.get("infra_rank")},"rank":{rank},'.encode()
    found = restart.get("first") or next((one.value for one in cycle.find(FAULT, label)), None)
    if found is not None and (not hung or found["kind"] == "hang"):
        return dict(found)  # what else ranks report as one hangs is a consequence
    kind = "hang" if hung else "node-lost" if rank < 0 else ""
    return {"kind": kind, "host": "", "infra_rank": -1}


def fault_of(told: Mapping[str, Any]) -> RankFault:
    """The fault of an event, or of the first cause in a result.json, which has no types."""
    made = {name: told[name] for name in RankFault.__struct_fields__ if name in told}
    if finding := told.get("finding"):
        made["finding"] = {
            name: finding[name] for name in Finding.__struct_fields__ if name in finding
        }  # others had more
    return from_plain(made, RankFault)


def counted_in(logs: list[CoordinatorLog]) -> dict[int, dict[str, Any]]:
    """JSON of the last Counted of each cycle."""
    found = (one.value for log in logs for one in log.find(_COUNTED, log.begin, log.size))
    return {int(one["cycle"]): one for one in found}
