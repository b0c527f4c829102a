"""How much error counters rose lately, from what is kept on the node between two looks.

Counters may begin again at 0 (their width is used up): of what happened then only the part after it is certain, and
only that is counted. One that goes back otherwise was reset, or its driver corrected it: what it shows now is where
the next look begins. The file is `cache`'s: of this user and of this boot.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from nvrx_slurm.health import cache
from nvrx_slurm.health.check import NodeView, listed
from nvrx_slurm.system import files
from nvrx_slurm.system.hardware import Absent

_WIDTHS = (16, 32, 64)  # bits
_ALL_ONES = (2**32 - 1, 2**64 - 1)
_NEAR = 8  # the part of a width (1/8) that is near to its end or its beginning
_WAIT_S = 3600.0  # for the lock; the deadline of the check ends the wait before
MAX_RISES = 150  # kept; of each counter the latest are put together beyond that


class Rise(NamedTuple):
    """A counter was seen to have risen by `by`; `at_s`: seconds since boot."""

    at_s: float
    name: str
    by: int


class Kept(NamedTuple):
    """Counters as they were at the last look, and how they rose within the window before it."""

    counters: Mapping[str, int]
    rises: tuple[Rise, ...]


NOTHING = Kept({}, ())


class Look(NamedTuple):
    """By how much each counter rose within the window (only those that did); those that were reset since the look
    before this one; those that read all ones, and were not counted."""

    risen: Mapping[str, int]
    anew: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """ "; a, b began anew", or ""."""
        return f"; {listed(self.anew)} began anew" if self.anew else ""


def all_ones(count: int) -> bool:
    """Whether this is what a device that is gone from its bus reads as (32 or 64 bits), and no count."""
    return count in _ALL_ONES


def increase(before: int, now: int) -> int | None:
    """By how much a counter rose at least; None if it began anew."""
    if now >= before:
        return now - before
    return now if any(_wrapped(before, now, 1 << bits) for bits in _WIDTHS) else None


def _wrapped(before: int, now: int, end: int) -> bool:
    near = end // _NEAR
    return end - near <= before < end and now < near


def advance(kept: Kept, now: Mapping[str, int], at_s: float, window_s: float) -> Kept:
    """After another look at `at_s`; what was never seen before has not risen."""
    new = [
        Rise(at_s, name, increase(kept.counters[name], count) or 0)
        for name, count in now.items()
        if name in kept.counters
    ]
    young = [rise for rise in (*kept.rises, *new) if rise.by and at_s - rise.at_s <= window_s]
    return Kept({**kept.counters, **now}, tuple(_few(young)))


def _few(rises: list[Rise]) -> list[Rise]:
    if len(rises) <= MAX_RISES:
        return rises
    sums: dict[str, Rise] = {}
    for rise in rises:
        sums[rise.name] = rise._replace(by=rise.by + sums[rise.name].by) if rise.name in sums else rise
    return list(sums.values())


def risen(kept: Kept) -> dict[str, int]:
    """By how much each counter rose within the window; only those that did."""
    sums: dict[str, int] = {}
    for rise in kept.rises:
        sums[rise.name] = sums.get(rise.name, 0) + rise.by
    return sums


def look(node: NodeView, check: str, now: Mapping[str, int], window_s: float) -> Look:
    """What rose up to this look, which is kept for the next one.

    Raises Absent where nothing can be kept, OSError, and ValueError where what was kept cannot be trusted: this once,
    as it is replaced.
    """
    silent = tuple(name for name, count in now.items() if all_ones(count))
    now = {name: count for name, count in now.items() if name not in silent}
    with alone(node, check):
        why, before = None, NOTHING
        try:
            before = parsed(recall(node, check).get("counters", {}))
        except ValueError as error:
            why = error
        kept = advance(before, now, cache.now_s(), window_s)
        remember(node, check, {"counters": plain(kept)})
    if why is not None:
        raise why
    anew = [name for name, count in now.items() if increase(before.counters.get(name, 0), count) is None]
    return Look(risen(kept), tuple(anew), silent)


def plain(kept: Kept) -> dict[str, list[int]]:
    """By name: the counter, then when it rose and by how much, again and again. Short: the file has a limit."""
    found = {name: [count] for name, count in kept.counters.items()}
    for rise in kept.rises:
        found[rise.name] += [int(rise.at_s), rise.by]
    return found


@contextmanager
def alone(node: NodeView, name: str) -> Iterator[None]:
    """Around `recall` and `remember`, since many may look at once (the caller's own time bounds the wait)."""
    node.doing("waiting for another look to end")
    with files.file_lock(f"{_path(node, name)}.lock", _WAIT_S):
        yield


def recall(node: NodeView, name: str) -> dict[str, Any]:
    """What `remember` kept under this name since the node was booted; {} if nothing. Raises as `look`."""
    try:
        found = cache.read_private(_path(node, name))
    except cache.Unusable as error:
        raise ValueError(str(error)) from None
    ours = isinstance(found, dict) and found.get("boot") == cache.boot_id(node)
    return found if ours else {}


def remember(node: NodeView, name: str, facts: Mapping[str, object]) -> None:
    """Keep JSON under this name (see `cache.MAX_FILE_BYTES`). Raises as `look`."""
    cache.write_private(_path(node, name), {"boot": cache.boot_id(node), **facts})


def _path(node: NodeView, name: str) -> str:
    parent = "/run" if os.geteuid() == 0 else f"/run/user/{os.geteuid()}"
    if not os.path.isdir(node.path(parent)):
        raise Absent(f"there is nothing to compare with: no {parent} to keep it in")
    try:
        return f"{cache.private_directory(node)}/{name}.kept"
    except cache.Unusable as error:
        raise ValueError(str(error)) from None


def parsed(found: Mapping[str, Any]) -> Kept:
    """Of `plain`. Raises ValueError for what is damaged."""
    try:
        rows = {str(name): [int(number) for number in row] for name, row in found.items()}
        counters = {name: row[0] for name, row in rows.items()}
        rises = [
            Rise(at_s, name, by) for name, row in rows.items() for at_s, by in zip(row[1::2], row[2::2], strict=True)
        ]
    except (IndexError, TypeError, ValueError, AttributeError, OverflowError):
        raise ValueError("what earlier looks found is ignored: it is damaged") from None
    return Kept(counters, tuple(sorted(rises)))
