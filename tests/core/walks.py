"""Random walks of a coordinator: any well-typed messages, from any node, in any order, in the words of `stories`."""

import random

from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.types import Activity

from .stories import Story

# What may happen, and how often. {n}: a node; {c}: a cycle, as a rule the present one.
EVENTS = {
    "joins {n}": 8,
    "joins {n} preparing": 3,
    "joins {n} {doing} as {g} of {active} in {c} used {used}{excluded}{early}{fault}": 20,
    "joins {n} ended": 0.2,
    "loses {n}": 8,
    "fails {n} {c}": 8,
    "fails {n} {c} hang": 2,
    "fails {n} {c} empty": 0.5,
    "spent {n} {c}": 10,
    "succeeds {n} {c}": 6,
    "stops {n} {c}": 20,
    "offers {n}": 8,
    "asks {n} continue": 0.7,
    "asks {n} exclude": 0.7,
    "asks {n} shutdown": 0.5,
    "unfit {n}": 0.5,
    "warns {n} 10": 1,
    "ends {n}": 0.5,
    "time {left_s}": 2,
    "progress {score} {iteration}": 4,
    "tick": 12,
    "dead {n}": 3,
    "raised {term}": 1,
    "knows {n}": 1,
    "hung {n} {c}": 2,
    "sees {n} {c} {what}": 8,
    "advises {c} stop": 0.5,
    "reached {c} {iteration}": 1,
}


class Walk:
    """One coordinator and what it may be told; equal seeds give equal walks."""

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.story = Story()
        least = rng.choice((1, 1, 2, 3))
        most, segment = max(least, rng.choice((1, 2, 3, 4))), (0, 0, 1, least)[seed % 4]
        policy = "any-failed" if segment else rng.choice(("any-failed", "min-healthy"))
        switches = ("hang_exclude", "tracks_progress", "time_limited", "stops_on_advice")
        settings = [f"{name}={int(rng.random() < 0.4)}" for name in switches]
        settings += [f"max_restarts={rng.choice((1, 9, 99))}", f"policy={policy}", f"segment={segment}", "term=2"]
        settings += ["hang_collect_s=1.5", "warn_before_end_s=5", "stop_before_end_s=2", "domains=abab"]
        elects = most > 1 and rng.random() < 0.4
        settings += [f"quorum_timeout_s={rng.choice((0, 40))}"] if elects else []
        self.story.begin("electing" if elects else "nodes", f"{least} of {most} {' '.join(settings)}")

    @property
    def core(self):
        core = self.story.core
        assert isinstance(core, Coordinator)
        return core

    def step(self):
        self.story.now += self.rng.choice((0.0, 0.0, 0.1, 2.0))
        [line] = self.rng.choices(list(EVENTS), list(EVENTS.values()))
        word, _, rest = line.format_map(self._values()).partition(" ")
        self.story.tell(word, rest)

    def _values(self):
        rng, job = self.rng, self.core.job
        node = f"{rng.randrange(4)}{_rare(rng) * chr(39)}"
        here = job.assignment.group_ranks.get(f"h{node.rstrip(chr(39))}.0")
        keeps = here is not None and rng.random() < 0.8
        return {
            "n": node,
            "c": max(0, job.cycle if rng.random() < 0.9 else rng.choice((job.cycle - 1, job.cycle + 1, 0, 9, 10**7))),
            "doing": rng.choice(list(Activity)).value,
            "g": here if keeps else rng.choice(("-", int(node[0]), rng.randrange(4))),
            "active": rng.choice((1, 2, 3)),
            "used": rng.randrange(2),
            "excluded": rng.choice((" excluded 0@h0", " excluded 2@h2")) if rng.random() < 0.02 else "",
            "early": " early" * _rare(rng),
            "fault": " fault" * (rng.random() < 0.4),
            "left_s": rng.choice(("?", 1, 30, 100000, 100000, 100000)),
            "score": rng.choice((-1, job.cycle)),
            "iteration": rng.choice(("?", 5, 9)),
            "term": job.term + 1,
            "what": rng.choice(("waits", "loads", "waits loads", "")),
        }


def _rare(rng):
    return rng.random() < 0.05


def walk(seed, steps=80):
    """A whole walk; returns the coordinator at its end."""
    one = Walk(seed)
    while steps and one.core.state.name != "CLOSED":
        one.step()
        steps -= 1
    return one.core
