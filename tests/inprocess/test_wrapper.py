"""The wrapper: what ranks live through, with real processes and a real store."""

from __future__ import annotations

import pytest
from ranks_harness import Job


def test_without_a_fault_every_rank_gets_its_own_value(job: Job) -> None:
    job.start("fault_once", 4, victims=[], how="raise", others="return")
    assert job.await_all() == dict.fromkeys(range(4), 0)
    for rank in range(4):
        assert job.await_event(rank, "returned")["value"] == f"{rank} done"
    job.await_nothing_left()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_exception_on_one_rank_restarts_all(job: Job, world_size: int) -> None:
    job.start("fault_once", world_size, victims=[world_size - 1], how="raise")
    assert set(job.await_all().values()) == {0}
    for rank in range(world_size):
        first, second = job.of(rank, "entered")
        assert (first["iteration"], second["iteration"]) == (0, 1)
        assert first["MASTER_PORT"] != second["MASTER_PORT"]
        assert (second["RANK"], second["WORLD_SIZE"]) == (str(rank), str(world_size))
    job.await_nothing_left()
