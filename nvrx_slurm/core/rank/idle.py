"""Whether a rank that was told to end does nothing. Pure.

CPython runs a handler of SIGTERM when the main thread is back in Python. A main thread that waits in C for a rank that
is dead does not come back. A handler that runs, or sleeps, has a frame on the stack of its thread: the stack pointer
of that thread is another one than before the signal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

# Within the time that a rank may do nothing: threads that poll every 50 ms, as NCCL's watchdogs, stay below.
_MOST_TICKS = 2  # of 10 ms
_MOST_WAKES = 40
_MOST_BYTES = 1 << 16


class Signs(NamedTuple):
    """What the processes of a rank do at one moment."""

    places: Mapping[int, bytes]  # thread -> system call, stack and instruction pointer; b"": it does not sleep
    ticks: int  # processor time of all threads
    wakes: int  # how often threads have gone to sleep: an upload by a socket with a timeout does so for each packet
    moved: int  # bytes that system calls have read and written


def is_idle(before: Signs, since: Signs, now: Signs) -> bool:
    """Whether all threads sleep where they slept `before` SIGTERM, and did no work since the signs `since`.

    A new thread or process, a call that sends or writes, and the state D (a slow disk) are work."""
    same = all(place and place == before.places.get(thread) for thread, place in now.places.items())
    worked = now.ticks - since.ticks > _MOST_TICKS or now.wakes - since.wakes > _MOST_WAKES
    return bool(now.places) and same and not worked and abs(now.moved - since.moved) <= _MOST_BYTES
