"""What rank assignment costs in-process, after 1,024 deaths: the leader for the world, a rank for itself, the store.

One process plays all ranks in turn over a store in memory, so this is the computing and the bytes, not a network.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.figures import Figure, Launchers, Samples
from benchmarks.memory_store import MemoryStore
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.rank_assignment import (
    ActivateAllRanks,
    FillGaps,
    FilterCountGroupedByKey,
    Layer,
    LayerFlag,
    RankAssignment,
    RankAssignmentCtx,
    ShiftRanks,
    Tree,
    assign,
    with_defaults,
)
from nvrx_slurm.inprocess.state import State
from nvrx_slurm.inprocess.store.leader import Leadership

_WORLD, _COUNTED_WORLD, _DEATHS = 65_536, 16_384, 1_024
_ASKED = 200  # ranks whose own share is measured


@dataclass
class _Measured:
    """Seconds of the leader in the first iteration, of the leader and of other ranks in the second; bytes of that."""

    build_s: float
    reassign_s: float
    share_s: float
    moved_bytes: int


def _layers() -> list[Layer]:
    both = LayerFlag.RESERVE | LayerFlag.BACKFILL
    host = Layer(1, 8, lambda state: f"node-{state.rank // 8:05}.cluster", both)
    return [Layer(128, _WORLD - 4096, "root", both), host]


def _tree(size: int, everybody: bool, leader_dies: bool = False) -> _Measured:
    """A Tree of two layers. `everybody`: all ranks read what is theirs, else a sample."""
    store, died = MemoryStore(), _deaths(size)
    died = {0, *sorted(died)[1:]} if leader_dies else died - {0}
    trees = [Tree(_layers()) for _ in range(size)]
    first = [RankAssignmentCtx(State(rank, size), store.iteration(0), set()) for rank in range(size)]
    for tree, ctx in zip(trees, first, strict=True):
        tree.give_keys(ctx)
    build_s, state = _timed(lambda: assign(trees[0], first[0]))
    states = [state, *(assign(tree, ctx) for tree, ctx in list(zip(trees, first, strict=True))[1:])]
    for state in states:
        state.advance()
    before = store.moved_bytes
    ranks = [rank for rank in range(size) if rank not in died]
    contexts = {rank: RankAssignmentCtx(states[rank], store.iteration(1), died) for rank in ranks}
    leader, *others = ranks
    reassign_s, _ = _timed(lambda: assign(trees[leader], contexts[leader]))
    others = others if everybody else random.Random(3).sample(others, _ASKED)
    share_s, _ = _timed(lambda: [assign(trees[rank], contexts[rank]) for rank in others])
    return _Measured(build_s, reassign_s, share_s / len(others), store.moved_bytes - before)


def _deaths(size: int) -> set[int]:
    return set(random.Random(7).sample(range(size), _DEATHS))


def _timed(work: Callable[[], object]) -> tuple[float, object]:
    """The collector does not look at what the other 65,535 ranks of this process have."""
    gc.collect()
    gc.freeze()
    start = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - start
    gc.unfreeze()
    return seconds, result


def _alone(assignment: RankAssignment) -> float:
    """Milliseconds of one rank that needs nobody."""
    died, whole = _deaths(_WORLD), with_defaults(assignment)
    ranks = random.Random(5).sample(sorted(set(range(_WORLD)) - died), _ASKED)
    contexts = [RankAssignmentCtx(State(rank, _WORLD, iteration=1), None, died) for rank in ranks]
    seconds, _ = _timed(lambda: [assign(whole, ctx) for ctx in contexts])
    return 1e3 * seconds / len(ranks)


def _filtered() -> float:
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


def _figure(name: str, what: str, unit: str, target: float, one: Callable[[], float]) -> Figure:
    def measure(launchers: Launchers, repeats: int) -> Samples:
        return {launchers.ours.name: [one() for _ in range(repeats)]}

    return Figure(name, what, unit, target, False, measure)


_TREE = f"Tree of 2 layers, {_WORLD} ranks"
FIGURES = [
    _figure("ranks-tree-build", f"{_TREE}: built, by one rank", "s", 0.3, lambda: _tree(_WORLD, False).build_s),
    _figure(
        "ranks-tree-reassign",
        f"{_TREE}: {_DEATHS} deaths, by one rank",
        "s",
        0.1,
        lambda: _tree(_WORLD, False).reassign_s,
    ),
    _figure(
        "ranks-tree-share", f"{_TREE}: any other rank's share", "ms", 5.0, lambda: 1e3 * _tree(_WORLD, False).share_s
    ),
    _figure(
        "ranks-tree-bytes",
        f"Tree, {_COUNTED_WORLD} ranks: through the store per restart",
        "MB",
        10.0,
        lambda: _tree(_COUNTED_WORLD, True).moved_bytes / 1e6,
    ),
    _figure(
        "ranks-tree-bytes-new-leader",
        f"Tree, {_COUNTED_WORLD} ranks: the same when the leader died",
        "MB",
        10.0,
        lambda: _tree(_COUNTED_WORLD, True, leader_dies=True).moved_bytes / 1e6,
    ),
    _figure("ranks-shift", f"ShiftRanks, {_WORLD} ranks: per rank", "ms", 0.2, lambda: _alone(ShiftRanks())),
    _figure("ranks-fill", f"FillGaps, {_WORLD} ranks: per rank", "ms", 0.2, lambda: _alone(FillGaps())),
    _figure("ranks-filter", f"Filter, {_WORLD} ranks: once for the world", "ms", 50.0, _filtered),
]
