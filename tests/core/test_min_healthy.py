"""The policy min-healthy: faults are the in-process wrapper's business while enough nodes are good."""

from __future__ import annotations

from typing import Any

from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.types import Doing, RanksGone, RestartPolicy, Stopped, WorkloadAction

from .benches import CoordinatorBench, a_fault, a_plan

POLICY = RestartPolicy.MIN_HEALTHY


def running(min_nodes: int = 2, nodes: int = 3, **more: Any) -> CoordinatorBench:
    return CoordinatorBench.running(min_nodes, nodes, policy=POLICY, **more)


def test_all_who_are_here_are_active() -> None:
    job = CoordinatorBench(min_nodes=2, nodes=3, policy=POLICY)
    for rank in range(3):
        job.join(rank)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1, 2: 2})
    job.join(3)
    assert (job.state, job.placed()) == ("RUNNING", {3: -1})


def test_no_more_than_max_are_active() -> None:
    job = CoordinatorBench(min_nodes=1, nodes=3, policy=POLICY, max_active=2)
    for rank in range(3):
        job.join(rank)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1, 2: -1})


def test_after_the_last_call_it_starts_with_those_who_are_here() -> None:
    job = CoordinatorBench(min_nodes=2, nodes=4, policy=POLICY)
    for rank in range(3):
        job.join(rank)
    job.wait()
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1, 2: 2})


def test_a_dead_rank_is_told_to_the_others_and_nothing_is_restarted() -> None:
    job = running()
    job.fails(1)
    gone = RanksGone(0, (2,), "rank 2 (local rank 0, pid 4711) on node 1 (h1) exited with code 1: boom")
    assert (job.state, job.sent(RanksGone)) == ("RUNNING", {0: gone, 2: gone})
    assert job.said[-1].endswith("boom; going on: 2 of 3 nodes are good, 2 are needed")
    assert job.core.restarts_used == 0


def test_a_lost_node_is_told_to_the_others_with_all_its_ranks() -> None:
    job = running()
    job.lose(1)
    assert (job.state, {rank: gone.ranks for rank, gone in job.sent(RanksGone).items()}) == (
        "RUNNING", {0: (2, 3), 2: (2, 3)}
    )  # fmt: skip


def test_below_the_minimum_everything_is_restarted() -> None:
    job = running()
    job.fails(1)
    job.lose(2)
    assert (job.state, job.stopped(), job.core.restarts_used) == ("STOPPING", {0, 1}, 1)
    assert job.said[-1] == "node 2 (h2) was lost: connection reset; restart 1 of 3"
    job.stops(0)
    job.stops(1)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1})


def test_below_the_minimum_without_a_restart_left() -> None:
    job = running(max_restarts=0)
    job.fails(0)
    job.fails(1)
    assert (job.state, job.finished()) == ("FINISHED", {0: 1, 1: 1, 2: 1})


def test_a_second_fault_of_a_broken_node_changes_nothing() -> None:
    job = running()
    job.fails(1)
    job.fails(1)
    assert job.state == "RUNNING"
    job.stops(1)
    assert (job.state, job.commands) == ("RUNNING", [])
    job.lose(1)
    assert job.state == "RUNNING"


def test_words_of_a_node_that_is_out_do_not_count() -> None:
    job = running()
    job.lose(1)
    job.join_with(1, a_plan(0, 1, active=3), Doing.RUNNING)
    assert (job.state, job.stopped()) == ("RUNNING", {1})
    job.succeeds(1)
    job.fails(1)
    assert (job.state, job.commands) == ("RUNNING", [])
    job.hear(1, Stopped(1, 0, 2001))
    assert (job.state, job.commands) == ("RUNNING", [])
    job.lose(1)
    job.join_with(1, a_plan(0, 1, active=3), Doing.IDLE)
    assert (job.state, job.commands) == ("RUNNING", [])


def test_a_broken_node_that_makes_its_stream_anew_tells_its_faults_again() -> None:
    job = running()
    job.join_with(1, a_plan(0, 1, active=3), Doing.RUNNING, a_fault(1))
    assert (job.state, job.placed(), set(job.sent(RanksGone))) == ("RUNNING", {1: 1}, {0, 2})


def test_the_job_is_done_when_the_good_ones_are() -> None:
    job = running()
    job.fails(1)
    job.stops(1)
    job.succeeds(0)
    assert job.state == "RUNNING"
    job.succeeds(2)
    assert (job.state, job.finished()) == ("FINISHED", {0: 0, 1: 0, 2: 0})


def test_the_last_ranks_of_a_broken_node_may_end_in_peace() -> None:
    job = running()
    job.fails(1)
    job.succeeds(0)
    job.succeeds(2)
    assert (job.state, job.core.deadline()) == ("RUNNING", 60.0)
    job.stops(1)
    assert (job.state, job.finished()) == ("FINISHED", {0: 0, 1: 0, 2: 0})


def test_but_not_for_ever() -> None:
    job = running()
    job.fails(1)
    job.succeeds(0)
    job.succeeds(2)
    job.wait()
    assert (job.now, job.state, job.finished()) == (60.0, "FINISHED", {0: 0, 1: 0, 2: 0})


def test_the_last_good_one_is_lost_when_the_others_are_done() -> None:
    job = running(min_nodes=1)
    job.succeeds(0)
    job.lose(1)
    assert job.state == "RUNNING"
    job.lose(2)
    assert (job.state, job.finished()) == ("FINISHED", {0: 0})


def test_an_excluded_node_is_a_dead_one() -> None:
    job = running()
    job.asks(1, WorkloadAction.ExcludeThisNode)
    assert (job.state, job.refused(), set(job.sent(RanksGone))) == ("RUNNING", {1}, {0, 2})


# --- a new term ------------------------------------------------------------------------------------------------


def new_term(min_nodes: int = 2, nodes: int = 3) -> CoordinatorBench:
    return CoordinatorBench(min_nodes, nodes, term=2, policy=POLICY)


def test_a_new_coordinator_carries_on_with_broken_nodes() -> None:
    job = new_term()
    job.join_with(0, a_plan(3, 0, active=3, used=1), Doing.RUNNING)
    job.join_with(1, a_plan(3, 1, active=3, used=1), Doing.RUNNING, a_fault(1))
    job.join_with(2, a_plan(3, 2, active=3, used=1), Doing.RUNNING)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1, 2: 2})
    job.fails(2, cycle=3)
    assert (job.state, job.stopped()) == ("STOPPING", {0, 1, 2})


def test_a_new_coordinator_carries_on_without_the_missing_if_enough_are_good() -> None:
    job = new_term()
    job.join_with(0, a_plan(3, 0, active=3, used=1), Doing.RUNNING)
    job.join_with(2, a_plan(3, 2, active=3, used=1), Doing.SUCCEEDED)
    job.wait()
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 2: 2})
    job.succeeds(0, cycle=3)
    assert (job.state, job.finished()) == ("FINISHED", {0: 0, 2: 0})


def test_a_failure_told_while_gathering_makes_its_node_broken() -> None:
    job = new_term()
    job.join_with(0, a_plan(3, 0, active=3, used=1), Doing.RUNNING)
    job.join_with(1, a_plan(3, 1, active=3, used=1), Doing.RUNNING)
    job.fails(0, cycle=3)
    assert job.state == "GATHERING"
    job.wait()
    assert (job.state, job.stopped()) == ("STOPPING", {0, 1})


def test_who_has_lost_all_its_workers_keeps_its_place_for_the_next_cycle() -> None:
    job = new_term(min_nodes=1)
    job.join_with(1, a_plan(3, 1, active=3, used=1), Doing.IDLE, a_fault(1))
    job.join_with(0, a_plan(3, 0, active=3, used=1), Doing.RUNNING)
    job.wait()
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: -1})
    job.fails(0, cycle=3)
    job.stops(0, cycle=3)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1})


def test_a_missing_node_that_comes_late_is_not_let_back_in() -> None:
    job = new_term()
    job.join_with(0, a_plan(3, 0, active=3, used=1), Doing.RUNNING)
    job.join_with(2, a_plan(3, 2, active=3, used=1), Doing.RUNNING)
    job.wait()
    job.join_with(1, a_plan(3, 1, active=3, used=1), Doing.RUNNING)
    assert (job.state, job.stopped()) == ("RUNNING", {1})
    assert not job.did(ev.Done)
