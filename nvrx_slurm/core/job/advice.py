"""Whether the answer of an attribution service still holds when it comes: it may be minutes late."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nvrx_slurm.types import FaultKind, RankFault

_DETAILS = re.compile(r"0x[0-9a-f]+|[0-9]+", re.IGNORECASE)
_MESSAGE_CHARS = 400


@dataclass
class Advice:
    """The row of equal failures that the job has just behind it.

    An answer about one of them holds until a cycle has got past the point of that failure, or has failed otherwise.
    """

    first: int = -1  # cycle with which the row began; -1 = none has failed
    last: int = -1
    lasted_s: float = 0.0  # the longest of them
    alike: tuple[FaultKind, int, str] | None = None

    def failed(self, cycle: int, cause: RankFault, lasted_s: float) -> None:
        """A cycle has failed after `lasted_s` seconds."""
        alike = (cause.kind, cause.exit_code, _DETAILS.sub("#", cause.message[:_MESSAGE_CHARS]))
        if alike != self.alike:
            self.first, self.lasted_s, self.alike = cycle, 0.0, alike
        self.last, self.lasted_s = cycle, max(self.lasted_s, lasted_s)

    def why_void(self, cycle: int, running_s: float | None) -> str:
        """Why an answer about `cycle` does not hold; "" if it does. `running_s`: of the cycle that runs, or None."""
        if not 0 <= self.first <= cycle <= self.last:
            return "the job has failed otherwise since then" if 0 <= cycle < self.first else "that cycle has not failed"
        if running_s is not None and running_s > self.lasted_s:
            return "the job has got further since then"
        return ""
