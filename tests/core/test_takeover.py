"""Streams that break and are made anew, and coordinators that take over, one situation per test."""

from __future__ import annotations

from nvrx_slurm.types import Doing, Plan

from .benches import CoordinatorBench, a_fault, a_node, a_plan

With = tuple[Plan, Doing]


def runs(group_rank: int, cycle: int = 0, active: int = 2, succeeded: bool = False) -> With:
    return a_plan(cycle, group_rank, active=active), Doing.SUCCEEDED if succeeded else Doing.RUNNING


def being_stopped(group_rank: int, cycle: int = 0) -> With:
    return a_plan(cycle, group_rank), Doing.STOPPING


def stopped(group_rank: int, cycle: int = 0) -> With:
    return a_plan(cycle, group_rank), Doing.IDLE


# --- streams that break and are made anew ------------------------------------------------------------------


def test_an_active_agent_that_made_its_stream_anew_carries_on() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    job.join_with(1, *runs(1))
    assert (job.state, job.placed()) == ("RUNNING", {1: 1})


def test_a_success_that_got_lost_with_the_stream_is_told_again() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    job.succeeds(0)
    job.join_with(1, *runs(1, succeeded=True))
    assert (job.state, job.finished()) == ("FINISHED", {0: 0, 1: 0})


def test_a_node_that_was_done_and_lost_may_come_back_as_what_it_is() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    job.succeeds(0)
    job.lose(0)
    job.join_with(0, *runs(0, succeeded=True))
    assert (job.state, job.placed()) == ("RUNNING", {0: 0})


def test_an_active_agent_that_comes_anew_without_workers_is_a_fault() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    job.join(1, last_cycle=0)
    assert (job.state, job.stopped()) == ("STOPPING", {0})
    job.stops(0)
    assert job.placed() == {0: 0, 1: 1}


def test_an_active_agent_that_comes_anew_while_stopping_is_a_fault_and_waited_for() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    job.join_with(1, *being_stopped(1))
    assert (job.state, job.stopped()) == ("STOPPING", {0, 1})


def test_a_new_life_of_an_active_node_is_a_fault_without_budget() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2, max_restarts=0)
    job.join(1, life=1)
    assert (job.state, job.refused(), job.finished()) == ("FINISHED", {1}, {0: 1, 1: 1})


def test_one_comes_anew_without_workers_when_the_others_are_done_and_gone() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    job.succeeds(0)
    job.lose(0)
    job.join(1, last_cycle=0)
    assert job.state == "GATHERING"


def test_a_lost_node_that_returns_with_old_workers_becomes_a_spare_once_they_are_gone() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=2)
    job.lose(0)
    job.join_with(0, *runs(0, active=1))
    assert (job.state, job.stopped(), job.placed()) == ("RUNNING", {0}, {})
    job.stops(0, cycle=0)
    assert (job.state, job.placed()) == ("RUNNING", {0: -1})


def test_a_message_that_comes_twice_counts_once() -> None:
    job = CoordinatorBench.stopping(nodes=2)
    job.stops(0)
    job.stops(0)
    assert job.state == "STOPPING"
    job.stops(1)
    job.stops(1)
    assert (job.state, job.commands) == ("RUNNING", [])


def test_an_agent_that_made_its_stream_anew_with_workers_is_waited_for() -> None:
    job = CoordinatorBench.stopping(nodes=2)
    job.stops(0)
    job.join_with(1, *being_stopped(1))
    assert (job.state, job.stopped()) == ("STOPPING", {1})
    job.stops(1)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1})


# --- a new term --------------------------------------------------------------------------------------------


def new_term(min_nodes: int = 2, nodes: int = 3, max_restarts: int = 3) -> CoordinatorBench:
    return CoordinatorBench(min_nodes, nodes, max_restarts, term=2)


def test_a_new_coordinator_carries_on_when_all_who_run_are_here() -> None:
    job = new_term()
    job.join(2, last_cycle=4)
    job.join_with(1, *runs(1, cycle=4))
    job.join_with(0, *runs(0, cycle=4))
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1, 2: -1})
    assert {(plan.term, plan.cycle) for plan in job.sent(Plan).values()} == {(2, 4)}


def test_a_new_coordinator_finds_everything_done() -> None:
    job = new_term(nodes=2)
    job.join_with(0, *runs(0, succeeded=True))
    job.join_with(1, *runs(1))
    assert job.state == "RUNNING"
    job.succeeds(1)
    assert (job.state, job.finished()) == ("FINISHED", {0: 0, 1: 0})


def test_a_success_told_while_gathering_counts() -> None:
    job = new_term(nodes=2)
    job.join_with(0, *runs(0))
    job.succeeds(0)
    job.join_with(1, *runs(1, succeeded=True))
    assert (job.state, job.finished()) == ("FINISHED", {0: 0, 1: 0})


def test_a_failure_told_while_gathering_counts() -> None:
    job = new_term(nodes=2)
    job.join_with(0, *runs(0))
    job.fails(0)
    assert (job.state, job.stopped()) == ("STOPPING", {0})


def test_a_failure_told_while_gathering_may_exhaust_the_budget() -> None:
    job = new_term(nodes=2, max_restarts=0)
    job.join_with(0, *runs(0))
    job.fails(0)
    assert (job.state, job.finished()) == ("FINISHED", {0: 1})


def test_who_runs_but_does_not_come_in_time_is_a_fault() -> None:
    job = new_term(max_restarts=8)
    job.join(2, last_cycle=4, used=2)
    job.join_with(1, *runs(1, cycle=4))
    job.wait()
    assert (job.now, job.state, job.stopped()) == (1.0, "STOPPING", {1})
    job.stops(1, cycle=4)
    assert (job.state, job.placed()) == ("RUNNING", {2: 0, 1: 1})
    assert {(plan.cycle, plan.history.restarts_used) for plan in job.sent(Plan).values()} == {(5, 5)}


def test_idle_agents_know_that_a_cycle_has_ended_and_it_costs_a_restart() -> None:
    job = new_term(nodes=2)
    job.join(0, last_cycle=1, used=1)
    job.join(1, last_cycle=1, used=1)
    assert {(plan.cycle, plan.history.restarts_used) for plan in job.sent(Plan).values()} == {(2, 2)}


def test_idle_agents_of_a_job_without_restarts_left_end_it() -> None:
    job = new_term(nodes=2, max_restarts=1)
    job.join(0, last_cycle=1, used=1)
    job.join(1, last_cycle=1, used=1)
    assert (job.state, job.finished()) == ("FINISHED", {0: 1, 1: 1})


def test_after_the_last_call_idle_agents_of_a_job_without_restarts_left_end_it() -> None:
    job = new_term(nodes=3, max_restarts=0)
    job.join(0, last_cycle=0)
    job.join(1, last_cycle=0)
    job.wait()
    assert (job.state, job.finished()) == ("FINISHED", {0: 1, 1: 1})


def test_workers_that_are_being_stopped_are_not_carried_on() -> None:
    job = new_term(nodes=2)
    job.join_with(0, *being_stopped(0))
    job.join_with(1, *runs(1))
    assert job.state == "GATHERING"
    job.stops(0)
    job.wait()
    assert (job.state, job.stopped()) == ("STOPPING", {1})
    job.stops(1)
    assert job.placed() == {0: 0, 1: 1}


def test_who_stopped_without_a_coordinator_keeps_its_place_and_tells_why() -> None:
    job = new_term(min_nodes=2, nodes=4)
    job.join(0)
    for group_rank, rank in ((0, 3), (1, 2)):
        job.join_with(rank, *stopped(group_rank), *([a_fault(rank)] if rank == 2 else []))
    job.wait()
    assert (job.state, job.placed()) == ("RUNNING", {3: 0, 2: 1, 0: -1})
    assert "rank 4 (local rank 0, pid 4711) on node 2 (h2) exited with code 1: boom; restart 1 of 3" in job.said


def test_a_fault_that_was_not_heard_is_told_with_the_next_stream() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    job.join_with(1, *stopped(1), a_fault(1))
    assert (job.state, job.said[-1][:44]) == ("STOPPING", "rank 2 (local rank 0, pid 4711) on node 1 (h")


def test_enough_idle_agents_do_not_wait_for_one_that_is_being_stopped() -> None:
    job = new_term(min_nodes=1, nodes=2)
    job.join_with(2, *being_stopped(0))
    job.join(0, last_cycle=0)
    job.join(1, last_cycle=0)
    assert (job.state, job.stopped()) == ("STOPPING", {2})
    job.stops(2)
    assert job.placed() == {2: 0, 0: -1, 1: -1}


def test_the_second_of_two_to_stop_completes_the_gathering_and_one_still_stops() -> None:
    job = new_term(min_nodes=1, nodes=1)
    job.join_with(1, *being_stopped(1))
    job.join_with(0, *being_stopped(0))
    job.stops(1)
    assert (job.state, job.stopped()) == ("STOPPING", {0})


def test_one_stops_while_a_new_coordinator_gathers_and_no_restart_is_left() -> None:
    job = new_term(min_nodes=1, nodes=1, max_restarts=0)
    job.join_with(0, *being_stopped(0))
    job.stops(0)
    assert (job.state, job.finished()) == ("FINISHED", {0: 1})


def test_a_later_cycle_makes_the_runners_of_an_older_one_stop() -> None:
    job = new_term()
    job.join_with(0, *runs(0, cycle=3))
    job.join(1, last_cycle=4)
    assert (job.state, job.stopped()) == ("GATHERING", {0})
    job.join_with(2, *runs(2, cycle=3))
    assert job.stopped() == {2}


def test_two_claim_one_place() -> None:
    job = new_term()
    job.join_with(0, *runs(0))
    job.join_with(1, *runs(0))
    assert (job.state, job.stopped()) == ("GATHERING", {1})


def test_a_claimant_that_is_lost_claims_nothing() -> None:
    job = new_term(nodes=2)
    job.join_with(0, *runs(0))
    job.lose(0)
    job.join_with(1, *runs(1))
    assert job.state == "GATHERING"


def test_after_a_restart_one_more_stopped_node_makes_them_enough() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    job.lose(0)
    job.stops(1)
    assert job.state == "GATHERING"
    job.join_with(0, *runs(0))
    assert (job.state, job.stopped()) == ("GATHERING", {0})
    job.stops(0)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1})


def test_members_know_who_replaces_whom() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=2)
    job.join(1, life=1)
    assert (job.state, job.refused()) == ("RUNNING", {1})
    assert job.core.job.members.same_place(a_node(1, life=2)) is job.core.job.members.get("h1.1")
