"""What rank assignment costs in-process, after 1,024 deaths: the leader for the world, a rank for itself.

One process plays all ranks in turn over a store in memory, so this is the computing and the bytes, not a network.
"""

import gc
import json
import random
import time
from datetime import timedelta

from benchmarks.figures import Figure, repeated
from benchmarks.memory_store import MemoryStore
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.plugins.rank_assignment import Leadership
from nvrx_slurm.inprocess.rank_assignment import (
    ActivateAllRanks,
    FilterCountGroupedByKey,
    Layer,
    LayerFlag,
    RankAssignmentCtx,
    ShiftRanks,
    Tree,
    assign,
    key_of,
)
from nvrx_slurm.inprocess.state import State

_WORLD, _DEATHS = 65_536, 1_024
_TIMEOUT = timedelta(seconds=60)


def _layers():
    both = LayerFlag.RESERVE | LayerFlag.BACKFILL
    host = Layer(1, 8, lambda state: f"node-{state.rank // 8:05}.cluster", both)
    return [Layer(128, _WORLD - 4096, "root", both), host]


def _tree():
    """Seconds of one rank in the first iteration, when all keys are there, and in the second; each rank does this."""
    store = MemoryStore()
    for rank in range(1, _WORLD):
        ctx = RankAssignmentCtx(State(rank, _WORLD), store.iteration(0), set())
        keys = json.dumps([key_of(layer.key_or_fn, ctx.state) for layer in _layers()])
        Leadership(ctx, "Tree", 0, _TIMEOUT).give(lambda keys=keys: keys)
    tree, first = Tree(_layers()), RankAssignmentCtx(State(0, _WORLD), store.iteration(0), set())
    build_s, state = _timed(lambda: assign(tree, first))
    assert isinstance(state, State)
    state.advance()
    reassign_s, _ = _timed(lambda: assign(tree, RankAssignmentCtx(state, None, _deaths(_WORLD) - {0})))
    return build_s, reassign_s


def _deaths(size):
    return set(random.Random(7).sample(range(size), _DEATHS))


def _timed(work):
    """The collector does not look at what the other 65,535 ranks of this process have."""
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    gc.unfreeze()
    return seconds, result


def _filtered():
    """Milliseconds of the leader for the world: what all ranks gave is in the store, but for its own."""
    died, store = _deaths(_WORLD) - {0}, MemoryStore()
    rank_filter = FilterCountGroupedByKey(lambda state: f"node-{state.rank // 8:05}", lambda count: count >= 7)
    whole = Compose(ActivateAllRanks(), ShiftRanks(), rank_filter)
    view = store.iteration(1)
    contexts = [RankAssignmentCtx(State(rank, _WORLD, iteration=1), view, died) for rank in range(_WORLD)]
    for ctx in contexts[1:]:
        if ctx.state.rank not in died:
            Leadership(ctx, "FilterCountGroupedByKey 0", 0, rank_filter.timeout).give(
                lambda ctx=ctx: f"node-{ctx.state.rank // 8:05}"
            )
    seconds, _ = _timed(lambda: assign(whole, contexts[0]))
    return 1e3 * seconds


def _figure(name, what, unit, target, one):
    return Figure(name, what, unit, target, repeated(one))


_TREE = f"Tree of 2 layers, {_WORLD} ranks"
FIGURES = [
    _figure("ranks-tree-build", f"{_TREE}: built, by each rank", "s", 0.6, lambda: _tree()[0]),
    _figure("ranks-tree-reassign", f"{_TREE}: {_DEATHS} deaths, by each rank", "s", 0.1, lambda: _tree()[1]),
    _figure("ranks-filter", f"Filter, {_WORLD} ranks: once for the world", "ms", 50.0, _filtered),
]
