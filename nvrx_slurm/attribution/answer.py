"""What a service says about a cycle, in the words of the HTTP interface. Pure; its text is not trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ACTIONS = ("STOP", "RESTART", "CONTINUE", "UNKNOWN", "TIMEOUT")
RUNNING = ("pending", "in_flight")
_REASON_CHARS = 400


def one_line(text: object) -> str:
    """Printable text on one line."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(text).split()))


@dataclass(frozen=True)
class Answer:
    """The recommendation about one cycle, and all that was found out about it."""

    action: str = "UNKNOWN"  # one of ACTIONS
    reason: str = ""
    source: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """One line for people; "" where nothing is known."""
        said = one_line(self.reason)[:_REASON_CHARS]
        if self.action == "UNKNOWN" and not said:
            return ""
        return self.action + (f": {said}" if said else "") + (f" ({one_line(self.source)[:60]})" if self.source else "")


Tell = Callable[[int, Answer], None]  # hands the answer about a cycle to the agent


def answer_in(reply: Mapping[str, Any]) -> Answer | None:
    """The answer in a reply to GET /logs; None while the service is still at it."""
    status = str(reply.get("status", "completed")).lower()
    if status in RUNNING:
        return None
    said = reply.get("recommendation")
    if status != "completed" or not isinstance(said, Mapping):
        return Answer(reason="the analysis failed" if status == "failed" else "")
    action = str(said.get("action", "")).strip().upper().replace(" ", "_")
    action = action if action in ACTIONS else "UNKNOWN"
    return Answer(action, str(said.get("reason") or ""), str(said.get("source") or ""))
