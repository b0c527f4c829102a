"""Threads of the keeper: what goes wrong in them, or in a decision for them, costs the keeper nothing."""

import select

import pytest

from nvrx_slurm.checkpoint.work import Work

pytestmark = pytest.mark.fast


def test_a_defect_is_told_to_the_one_that_waits():
    work, told = Work(1), []

    def decision():
        raise KeyError("rank 7")

    work.do(lambda: work.decide(decision), told.append)
    while not told:
        assert select.select([work.woken], [], [], 10.0)[0]
        work.finish()
    assert isinstance(told[0], OSError) and "rank 7" in str(told[0])
