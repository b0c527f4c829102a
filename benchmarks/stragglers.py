"""Slow ranks, on synthetic windows of 30 s: alarms in a healthy day, and how soon a slow rank is found.

    python -m benchmarks.stragglers [RANKS [WINDOWS]]        # 10000 2880: a day; 5 minutes of CPU for each line

Two kinds of noise, 5 % each: from step to step, with 1 % that lasts; and from window to window, which is harder. Beside
it NVRx's own rule: a rank is a straggler where the fastest rank's time is less than 75 % of its own.
"""

import random
import sys

from nvrx_slurm.core.straggler.detector import Detector, Reading, Seat

WINDOW_S, STEPS = 30.0, 30
KINDS = {"from step to step": (0.05 / STEPS**0.5, 0.01), "from window to window": (0.05, 0.0)}
_NODE = 8


class Trace:
    """A synchronous job of `ranks` ranks. `noise`, `lasting`: spread of their work. `slow`: factors, by rank."""

    def __init__(self, ranks, noise, lasting, slow=None, seed=0, per_switch=16):
        self._rng, self._noise, self.factor, self._now = random.Random(seed), noise, 1.0, 0.0
        self._base = [self._rng.gauss(1.0, lasting) * (slow or {}).get(rank, 1.0) for rank in range(ranks)]
        firsts = range(0, ranks, _NODE)
        seats = [Seat(f"n{i}", tuple(range(first, first + _NODE)), i // per_switch) for i, first in enumerate(firsts)]
        self._detector = Detector(seats, WINDOW_S, 0.0)
        self._waited, self._until, self._waits = [0.0] * ranks, 0.0, 0
        self.nvrx = 0  # ranks that NVRx's rule has flagged, in all windows
        self._tell()

    def _tell(self):
        readings = {rank: Reading(self._waits, one, self._until) for rank, one in enumerate(self._waited)}
        over = self._detector.told(readings, self._now)
        return self._detector.close(self._now) if over or not self._waits else None

    def windows(self, count):
        """What each of the next windows shows."""
        for _ in range(count):
            works = [self.factor * base * max(0.5, self._rng.gauss(1.0, self._noise)) for base in self._base]
            step_s, fastest = max(works) + 0.05, min(works)
            self.nvrx += sum(fastest / work < 0.75 for work in works)
            self._waits += STEPS
            self._until += STEPS * step_s
            self._now += WINDOW_S
            for rank, work in enumerate(works):
                self._waited[rank] += STEPS * (step_s - work)
            yield self._tell()


def main(ranks, windows):
    """Print the figures."""
    for kind, noise in KINDS.items():
        trace = Trace(ranks, *noise)
        alarms = sum(one is not None for one in trace.windows(windows))
        print(f"{kind}: {ranks} healthy ranks, {windows} windows: {alarms} alarms; NVRx's rule flags {trace.nvrx}")
        right = wrong = 0
        first = []
        for seed in range(20):
            seen = list(Trace(ranks, *noise, {ranks // 3: 1.15}, seed).windows(6))
            right += sum(one is not None and ranks // 3 in one.ranks for one in seen)
            wrong += sum(len({*one.ranks} - {ranks // 3}) for one in seen if one is not None)
            first.append(next((number + 1 for number, one in enumerate(seen) if one is not None), None))
        recall, precision = sum(one is not None for one in first) / len(first), right / max(1, right + wrong)
        print(f"  15 % slow, 20 seeds: found in window {first}; recall {recall:.2f}, precision {precision:.3f}")


if __name__ == "__main__":
    main(*(int(word) for word in [*sys.argv[1:], "10000", "2880"][:2]))
