"""Whether a rank that was told to end does nothing. Pure.

CPython runs a handler of SIGTERM when the main thread is back in Python. A main thread that waits in C for a rank that
is dead does not come back. Once a handler has begun, the rank is never idle: it may sleep between two writes.

How often threads wake up tells nothing: each gloo group has a thread that does so 100 times per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# of a core, by all threads: 100 gloo groups, or a profiler that takes a sample every 10 ms
_MOST_CPU = 0.2
_MOST_BYTES = 1 << 16


class Signs(NamedTuple):
    """What a rank and the processes below it do at one moment."""

    pending: bool  # the signal has come, and its handler has not begun
    # where the main thread sleeps: system call, stack and instruction pointer; b"": it does not sleep
    place: bytes
    busy: frozenset[int]  # threads that compute, wait for a disk, or send
    cpu_s: float  # processor time of all threads
    written: int  # bytes, by write(2) and its like


def is_idle(signs: Sequence[Signs], within_s: float) -> bool:
    """Whether the main thread slept at one place in C in all of these `within_s` seconds, and no thread worked.

    A thread that was busy each time has worked."""
    first, last = signs[0], signs[-1]
    blocked = all(one.pending and one.place and one.place == first.place for one in signs)
    busy = frozenset.intersection(*(one.busy for one in signs))
    computes = last.cpu_s - first.cpu_s > _MOST_CPU * within_s
    return blocked and not busy and not computes and last.written - first.written <= _MOST_BYTES
