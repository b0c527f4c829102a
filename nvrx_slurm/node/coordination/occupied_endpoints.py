"""Programs without the job's token at the endpoints where an agent looks for its coordinator."""

from __future__ import annotations

from collections.abc import Callable

_FOREIGN_S = 2.0  # a coordinator of the last job may still be ending


class OccupiedEndpoints:
    """What an agent met at the endpoints of the job's `candidates` (their number) before it registered.

    Where others hold all endpoints, the job's coordinator can be at none.
    """

    def __init__(self, candidates: int, say: Callable[[str], None]) -> None:
        self._candidates = candidates
        self._say = say
        self._said: set[str] = set()
        self._since_s: dict[str, float] = {}  # by candidate

    def say(self, sentence: str) -> None:
        """The search goes on, so each sentence is said once."""
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)

    def hold_all(self, key: str, foreign: bool, now: float) -> bool:
        """Candidate `key` was not reached; `foreign`: others hold its endpoints. Whether they have held all for 2 s."""
        if not foreign:
            self._since_s.clear()
            return False
        self._since_s.setdefault(key, now)
        return len(self._since_s) == self._candidates and now - max(self._since_s.values()) >= _FOREIGN_S
