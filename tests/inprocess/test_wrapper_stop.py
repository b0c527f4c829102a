"""The function is stopped where it is, and only there; an action that it has begun is not left half done."""

import pytest

pytestmark = pytest.mark.process


def test_a_rank_that_is_leaving_when_it_is_stopped_leaves(job):
    job.start("stopped_while_leaving", 2)
    assert job.await_event(1, "raised")["kind"] == "SystemExit"
    assert job.await_end(1) == 5
    assert job.await_event(0, "entered", WORLD_SIZE="1")
    job.all_return([0])


@pytest.mark.parametrize("handled", [False, True])
def test_nothing_is_left_half_done(job, handled):
    """Another thread would wait for a lock for ever. `handled`: the user handles SIGURG."""
    job.start("over_and_over", 2, handled=handled, rounds=8)
    assert job.await_event(1, "returned")["value"] == []
    assert "RankShouldRestart was" not in job.err(1).read_text()
    job.all_return([0, 1])
