"""Records of faults: the reasons for the interruption of an iteration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum, auto

MAX_TEXT = 400  # characters of a reason that travel


def clean(text: str) -> str:
    """Escape lone surrogates (from file names that are not UTF-8): stores refuse them."""
    return text.encode(errors="backslashreplace").decode()


def message(error: BaseException) -> str:
    """Text of an exception; a replacement if its `__str__` fails."""
    try:
        return clean(str(error))
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
        """For people."""
        kind = self.interruption.name.lower().replace("_", " ")
        return f"rank {self.rank}: {kind}: {self.text}" if self.text else f"rank {self.rank}: {kind}"
