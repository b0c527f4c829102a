"""When a rank that tells nothing has made no step for so long that all ranks are inspected. Pure."""

from __future__ import annotations

from nvrx_slurm.core.account.rank_times import RankTimes
from nvrx_slurm.core.words import in_words

_LEAST_STEPS = 20  # before them nothing is known of its pauses


class Stalls:
    """The ranks of a node. The limit is `factor` times the longest pause so far, at least `least_s`.

    It doubles each time it is over without a step, until there is one. `least_s` 0: there is none.
    """

    def __init__(self, factor: float, least_s: float) -> None:
        self._factor, self._least_s = factor, least_s
        self._told: dict[tuple[int, int], float] = {}  # by rank and steps: the pause that was told

    def judge(self, rank: int, times: RankTimes) -> str:
        """What is doubted; "" = nothing."""
        if not self._least_s or times.beats < _LEAST_STEPS or not times.longest_s:
            return ""
        pause_s = times.until_s - times.last_s
        at = rank, times.beats
        limit_s = max(self._least_s, self._factor * times.longest_s, 2.0 * self._told.get(at, 0.0))
        if pause_s < limit_s:
            return ""
        self._told[at] = pause_s
        return f"rank {rank} has made no step for {in_words(pause_s)} (limit {in_words(limit_s)})"
