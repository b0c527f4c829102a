"""Nodes that fail their ranks, and a shard that fails its rank anywhere, at random times, through real cores."""

from __future__ import annotations

import pytest

from nvrx_slurm.core.attribution.evidence import examine
from nvrx_slurm.core.attribution.recurrence import suspects
from nvrx_slurm.core.attribution.signatures import SIGNATURES
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode

from .training import Training
from .world import World, WorldSettings

pytestmark = pytest.mark.fast


class BadTraining(Training):
    """Each rank on a bad node ends by itself, sooner or later; so does that of the bad shard, before it has saved."""

    world: BadWorld

    def up(self, worker):
        super().up(worker)
        world, rng = self.world, self._rng
        if worker.agent.host.infra_rank in world.bad:
            self._clock.after(rng.uniform(0.0, 6.0), self._end, worker, rng.choice((1, 3, -7, -11)))
        if worker.rank == world.shard:
            self._clock.after(world.after_s, self._end, worker, 77)

    def _end(self, worker, code):
        if worker.alive:
            self.world.happens("bad", f"{worker.name} ends")
            self.die_with(worker)
            worker.die(code, "SIGBUS" if code < 0 else str(code))


class _World(World):
    """`struck`: the nodes that got a strike; `first`: those that were active at first."""

    struck = first = frozenset[int]()

    def stepped(self, process, event, commands):
        super().stepped(process, event, commands)
        self.struck |= {int(one.host[1:]) for one in commands if isinstance(one, ev.Strike)}
        self.first = self.first or frozenset(places(self) if self.coordinator is not None else ())


class BadWorld(_World):
    """A job with two spares. Node or shard is bad, or both; with `shard` there is at most one bad node."""

    def __init__(self, seed, shard):
        self._has_shard = shard
        active = (2, 3, 8)[seed % 3]
        super().__init__(WorldSettings(active + 2, active, 8, seed, work_s=8.0, faults=0, twice=0.0))

    def make_training(self):
        s, rng = self.settings, self.rng
        bad = rng.choice((0, 1) if self._has_shard else (1, 2))
        self.bad, self.after_s = set(rng.sample(range(s.nodes), bad)), rng.uniform(0.0, 3.9)
        self.shard = rng.randrange(s.min_nodes * s.nproc) if self._has_shard else -1
        training = BadTraining(self.clock, rng, s.work_s, s.checkpoint_s)
        training.world = self
        return training


class PairWorld(_World):
    """Two nodes fail alike within a moment of each other, or two ranks do wherever they are. One or two spares."""

    def __init__(self, seed, ranks):
        self._of_ranks = ranks
        active, spares = (4, 5, 8)[seed % 3], 1 + seed // 3 % 2
        super().__init__(WorldSettings(active + spares, active, 8, seed, work_s=8.0, faults=0, twice=0.0))

    def make_training(self):
        s, rng = self.settings, self.rng
        self.bad = () if self._of_ranks else tuple(rng.sample(range(s.min_nodes), 2))
        hit = rng.sample(range(s.min_nodes), 2)
        self.ranks = tuple(node * s.nproc for node in hit) if self._of_ranks else ()
        self.after_s = rng.uniform(0.0, 3.0)
        training = PairTraining(self.clock, rng, s.work_s, s.checkpoint_s)
        training.world = self
        return training


class PairTraining(Training):
    """The ranks of the two end within a moment of each other by SIGBUS."""

    world: PairWorld
    prints = False

    def up(self, worker):
        super().up(worker)
        world = self.world
        if worker.agent.host.infra_rank in world.bad or worker.rank in world.ranks:
            self._clock.after(world.after_s + self._rng.uniform(0.0, 0.5), self._end, worker)

    def examined(self, fault):
        return replace(fault, finding=examine(fault, b"", signatures=SIGNATURES))

    def _end(self, worker):
        if worker.alive:
            self.world.happens("bad", f"{worker.name} ends")
            worker.die(-7, "SIGBUS")


def places(world):
    """The nodes that are active in the last plan."""
    held = world.coordinators[-1].core.job.assignment.places.values()
    return {int(node_id[1:].partition(".")[0]) for node_id in held}


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 300), marks=pytest.mark.matrix)])
@pytest.mark.parametrize("ranks", [False, True])
def test_two_nodes_that_fail_alike_lose_their_places_and_two_ranks_cost_no_node(seeds, ranks):
    for seed in seeds:
        world = PairWorld(seed, ranks)
        code, core = world.run().code, world.coordinators[-1].core
        dropped = {rank for rank, _ in suspects(core.ledger.failures)}
        assert not world.struck - {*world.bad} and (ranks or dropped <= {*world.bad}), seed  # spares may try the ranks
        spares, used = world.settings.nodes - world.settings.min_nodes, core.budget.history.restarts_used
        if ranks or spares < 2:
            assert (code, used) == (ExitCode.FAILED, 8), seed
        elif world.first >= {*world.bad}:  # a spare that is bad makes it look like the script
            assert code == ExitCode.OK and used <= 4, seed


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 200), marks=pytest.mark.matrix)])
@pytest.mark.parametrize("shard", [False, True])
def test_bad_nodes_lose_their_places_and_no_others(seeds, shard):
    for seed in seeds:
        world = BadWorld(seed, shard)
        code, core = world.run().code, world.coordinators[-1].core
        dropped = {rank for rank, _ in suspects(core.ledger.failures)} - world.bad
        assert not world.struck - world.bad and not (dropped and world.bad & places(world)), seed
        used = core.budget.history.restarts_used
        if shard:
            assert (code, used) == (ExitCode.FAILED, 8), seed
        elif len(world.bad) == 1:
            assert code == ExitCode.OK and used <= 3, seed  # two, but a spare may be slow to be ready
