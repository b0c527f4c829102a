"""One rank computes for all: what wakes those who wait for it, and what it leaves in the store."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from benchmarks.memory_store import MemoryStore
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
from nvrx_slurm.inprocess.exception import RankDiscarded
from nvrx_slurm.inprocess.plugins import rank_assignment as ra
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.state import State
from nvrx_slurm.inprocess.store.barriers import Iteration
from nvrx_slurm.inprocess.store.leader import Leadership, text_of
from nvrx_slurm.inprocess.store.stores import StoreView

dist = pytest.importorskip("torch.distributed")

BOUND_S = 30.0
FOREVER = timedelta(seconds=600)
LOST = InterruptionRecord(2, Interruption.TERMINATED, "its process has ended")


def leadership(view: Any, rank: int, size: int = 3) -> Leadership:
    return Leadership(view, "test", 1, 5, rank, size, frozenset(), FOREVER)


def test_what_has_begun_is_not_disturbed() -> None:
    """Ranks have their places, the iteration has begun: a fault then is no reason to write to `assign`."""
    this = Iteration(StoreView(dist.HashStore()), 5)
    this.publish_start("host", 1)
    this.interrupt(LOST)
    assert this.await_start(BOUND_S) == ("host", 1)
    assert not any(this.keys.check([f"assign/1/5/{what}"]) for what in ("all", "decided"))


class SilentStore(MemoryStore):
    """As torch before 2.9: nobody who waits is told of a `compare_set`."""

    def compare_set(self, key: str, expected: str, desired: bytes | str) -> bytes:
        with self._shared.changed:
            return self._values.setdefault(key, bytes(desired))  # type: ignore[arg-type]


def test_a_verdict_wakes_where_compare_set_does_not() -> None:
    store = SilentStore()

    def decided(rank: int) -> str:
        one = leadership(store, rank)
        one.give(lambda: "key")
        return one.decide(lambda: ",".join(map(text_of, one.given()[1])))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(decided, (2, 1, 0), timeout=BOUND_S)) == ["key,key,key"] * 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: ra.with_defaults(ra.FilterCountGroupedByKey("all", bool)),
        lambda: Compose(ra.ShiftRanks(), *(ra.FilterCountGroupedByKey("all", bool) for _ in range(3))),
        lambda: ra.Tree([ra.Layer()]),
    ],
)
def test_nothing_of_an_iteration_is_left(make: Callable[[], ra.RankAssignment]) -> None:
    """As many keys after each of a hundred restarts (a Tree keeps the last eight assignments)."""
    store = dist.HashStore()
    call, assignment, state = StoreView(store), ra.with_defaults(make()), State(rank=0, world_size=1)
    counted = []
    for number in range(100):
        this = Iteration(call, number)
        view = this.keys.under("assign", call.under("stable"))
        state = ra.assign(assignment, ra.RankAssignmentCtx(state, view, set()))
        this.interrupt(LOST)
        this.delete_keys([0])
        counted.append(store.num_keys())
        state.advance()
    assert len(set(counted[8:])) == 1
    assert isinstance(assignment, ra.Tree) or len(set(counted)) == 1


def test_an_error_whose_text_no_store_takes_is_told_all_the_same() -> None:
    def compute() -> str:
        raise RankDiscarded("no place for \udce4")

    with pytest.raises(RankDiscarded, match=r"no place for \\udce4"):
        leadership(MemoryStore(), 0).decide(compute)
