"""Threads of the keeper: what goes wrong in them is told to the one that waits, and costs the keeper nothing."""

import queue
import threading

import pytest

from nvrx_slurm.checkpoint.work import Work

pytestmark = pytest.mark.fast


def test_a_defect_is_told_to_the_one_that_waits():
    lock, told = threading.Lock(), queue.Queue()
    work = Work(1, lock)

    def defect():
        raise KeyError("rank 7")

    def then(result):
        assert lock.locked()
        told.put(result)
        raise KeyError("in a decision")

    for _ in range(2):
        work.do(defect, then)
        found = told.get(timeout=10.0)
        assert isinstance(found, OSError) and "rank 7" in str(found)
