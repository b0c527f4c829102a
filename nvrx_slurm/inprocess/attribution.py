"""Faults: the records of why an iteration was interrupted, and the texts, tracebacks and causes of exceptions."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

MAX_TEXT = 400  # characters of a reason that travel


def message(error: BaseException) -> str:
    """Text of an exception. Lone surrogates (of file names that are not UTF-8) are escaped: stores refuse them."""
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception as another:  # not BaseException: a SystemExit may come from a signal handler
        return f"(its text cannot be had: {type(another).__name__} in __str__)"


def describe(error: BaseException) -> str:
    """Type and text of an exception."""
    return ": ".join(filter(None, [type(error).__name__, message(error)]))


class Interruption(Enum):
    """Kind of fault."""

    EXCEPTION = auto()  # the wrapped function, or `initialize`, raised an Exception
    BASE_EXCEPTION = auto()  # ... or another BaseException: that rank leaves
    SOFT_TIMEOUT = auto()  # no progress for soft_timeout
    HARD_TIMEOUT = auto()  # no progress for hard_timeout: that rank is being killed
    TERMINATED = auto()  # the rank's process has ended, or leaves
    UNRESPONSIVE = auto()  # no heartbeat for heartbeat_timeout
    COMPLETION_TIMEOUT = auto()  # others have returned long ago
    MONITOR_PROCESS_EXCEPTION = auto()  # the rank's monitor process failed


OUTRIGHT = (  # never the consequence of another rank's fault
    Interruption.SOFT_TIMEOUT,
    Interruption.HARD_TIMEOUT,
    Interruption.TERMINATED,
    Interruption.UNRESPONSIVE,
)


@dataclass(frozen=True)
class InterruptionRecord:
    """`rank`: the initial rank. `text`: one sentence, cut at 400 characters."""

    rank: int
    interruption: Interruption
    text: str = ""

    def __str__(self) -> str:
        return json.dumps([self.rank, self.interruption.name, self.text[:MAX_TEXT]])

    @classmethod
    def from_str(cls, text: str) -> InterruptionRecord:
        """The record in a text that `str` made."""
        rank, kind, reason = json.loads(text)
        return cls(rank, Interruption[kind], reason)

    def sentence(self) -> str:
        """The cause as a sentence for people."""
        kind = self.interruption.name.lower().replace("_", " ")
        return (
            f"rank {self.rank}: {kind}: {self.text}" if self.text else f"rank {self.rank}: {kind}"
        )


# --- exceptions of the wrapped function -------------------------------------------------------------------------------


def blame(error: BaseException, cause: BaseException | None) -> None:
    """Let the chain of causes of `error` end with `cause`, which is the same on all ranks."""
    chain = _chain(error)
    if cause is not None and not any(one is cause for one in chain):
        chain[-1].__cause__ = cause


def free_frames(error: BaseException | None) -> None:
    """Free the local variables of the function's frames (tensors!), though a reference to the exception is kept."""
    todo = [error]
    seen = set[int]()
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            todo += [one.__cause__, one.__context__]


def _chain(error: BaseException | None) -> list[BaseException]:
    """The exception and those that it was raised from, each once."""
    chain: list[BaseException] = []
    while error is not None and not any(error is one for one in chain):
        chain.append(error)
        error = error.__context__ if error.__cause__ is None else error.__cause__
    return chain


def ending_forks(function: Callable[[], Any]) -> Any:
    """Call it; a child process that it forks ends where the function does, and never runs the wrapper's code."""
    pid = os.getpid()
    try:
        return function()
    finally:
        if os.getpid() != pid:
            error = sys.exc_info()[1]
            if error is not None:
                sys.excepthook(type(error), error, error.__traceback__)
            os._exit(int(error is not None))
