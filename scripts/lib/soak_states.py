"""What `scripts/dev/soak` judges of checkpoints: the state after each step, and how many steps faults have cost."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import soak_worker

_MOST_LOST = 2 * soak_worker.MEMORY_EVERY  # the last save may not have been copied yet
_REASONS = ("the disk has to do", "is damaged here", "cannot be fetched")
_TOLD = re.compile(r"rank \d+ (?:step (\d+) pid|begins \d+ (\d+) \w+) .*?(\d+)$", re.M)


@dataclass
class States:
    """Of all jobs. `lost`: steps at each restart; `sources`: from where ranks went on."""

    world: int
    lost: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    right: list[Any] = field(default_factory=lambda: [soak_worker.first()])  # after each step without a fault

    def findings(self, run, console):
        """What a job has done wrong. `console`: what it has said."""
        reached, unsaid = -1, sum(console.count(word) for word in _REASONS)
        for cycle in range(len([*run.glob("cycle_*")])):
            paths = run.glob(f"cycle_{cycle}/node_*/rank_*.out")
            text = "\n".join(path.read_text() for path in paths)
            wrong = {
                int(step or begun) for step, begun, told in _TOLD.findall(text) if told != self._told(step or begun)
            }
            if wrong:
                yield f"cycle {cycle}: after steps {sorted(wrong)[:5]} the state is not that of a run without faults"
            begins = set(re.findall(r"begins \d+ (\d+) (\w+)", text))
            if len(begins) > 1:
                yield f"ranks begin cycle {cycle} from different steps: {sorted(begins)}"
            for step, source in begins if reached >= 0 else ():
                self.lost.append(reached - int(step))
                self.sources.append(source)
                if self.lost[-1] >= _MOST_LOST:
                    unsaid -= 1
                if self.lost[-1] >= _MOST_LOST and unsaid < 0:
                    yield f"cycle {cycle} begins at step {step} from {source}, after {reached}, and no line says why"
            last = {rank: int(step) for rank, step in re.findall(r"rank (\d+) step (\d+) pid", text)}
            if len(last) == self.world:
                reached = min(last.values())

    def _told(self, step):
        while len(self.right) <= int(step):
            self.right.append(soak_worker.stepped(self.right[-1], len(self.right), self.world))
        return str(soak_worker.told(self.right[int(step)]))

    def summary(self):
        """One line."""
        if not self.lost:
            return "no restart"
        lost, memory = sorted(self.lost), self.sources.count("memory")
        return f"{len(lost)} restarts, {memory} from memory; lost steps: median {lost[len(lost) // 2]}, most {lost[-1]}"
