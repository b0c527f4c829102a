"""Nodes that fail their ranks, and a shard that fails its rank anywhere, at random times, through real cores."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from nvrx_slurm.core.attribution.recurrence import suspects
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.errors import ExitCode

from .process import Process
from .training import Training, Worker
from .world import World, WorldSettings


class BadTraining(Training):
    """Each rank on a bad node ends by itself sooner or later; so does the rank of the bad shard, anywhere."""

    nodes: frozenset[int] = frozenset()
    rank, after_s = -1, 0.0

    def up(self, worker: Worker) -> None:
        super().up(worker)
        bad = worker.agent.host.infra_rank in self.nodes
        if bad:
            self._clock.after(self._rng.uniform(0.0, 6.0), self._end, worker, self._rng.choice((1, 3, -7, -11)))
        if worker.rank == self.rank:
            self._clock.after(self.after_s, self._end, worker, 77)

    def _end(self, worker: Worker, code: int) -> None:
        if worker.alive:
            worker.agent.world.happens("bad", f"{worker.name} ends")
            self.die_with(worker)
            worker.die(code, "SIGBUS" if code < 0 else "bad shard" if code == 77 else "")


class BadWorld(World):
    """Two spares; `struck`: hosts that have got a strike."""

    def __init__(self, seed: int, shard: bool) -> None:
        rng = random.Random(seed)
        active, self._bad, self._shard = rng.choice((2, 3, 8)), rng.randint(*((0, 1) if shard else (1, 2))), shard
        self.struck: set[int] = set()
        super().__init__(WorldSettings(active + 2, active, 8, seed, work_s=8.0, faults=0, twice=0.0))

    def make_training(self) -> Training:
        s, rng = self.settings, self.rng
        self.bad = BadTraining(self.clock, rng, s.work_s, s.checkpoint_s)
        self.bad.nodes = frozenset(rng.sample(range(s.nodes), self._bad))
        self.bad.rank = rng.randrange(s.min_nodes * s.nproc) if self._shard else -1
        self.bad.after_s = rng.uniform(0.0, 3.9)  # nothing is saved until then
        return self.bad

    def stepped(self, process: Process, event: Any, commands: Sequence[Any]) -> None:
        super().stepped(process, event, commands)
        self.struck |= {int(one.host[1:]) for one in commands if isinstance(one, ev.Strike)}

    def check(self) -> None:
        """No healthy node has a strike, or has lost its place for good while a bad one stays."""
        core, bad = self.coordinators[-1].core, self.bad.nodes
        dropped = {rank for rank, _ in suspects(core.ledger.failures)} - bad
        active = {core.roster.members[node_id].node.infra_rank for node_id in core.job.assignment.places.values()}
        assert not self.struck - bad and not (dropped and bad & active), (self.settings.seed, self.struck, dropped)


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 500), marks=pytest.mark.matrix)])
@pytest.mark.parametrize("shard", [False, True])
def test_bad_nodes_lose_their_places_and_no_others(seeds: range, shard: bool) -> None:
    seen = Counter[int]()
    for seed in seeds:
        world = BadWorld(seed, shard)
        code, used = world.run().code, world.coordinators[-1].core.budget.history.restarts_used
        world.check()
        seen[used] += 1
        if shard:
            assert (code, used) == (ExitCode.FAILED, 8), seed
        elif len(world.bad.nodes) == 1:
            assert code == ExitCode.OK and used <= 3, seed  # a spare may be slow to be ready
    assert seen[8 if shard else 2]
