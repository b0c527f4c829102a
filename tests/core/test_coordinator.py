"""The coordinator's decisions, one situation per test. Nodes are named by their infra rank; cycles start at 0."""

from __future__ import annotations

from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.types import Doing, Failed, FaultKind, History, Plan, Stopped, Succeeded

from .benches import CoordinatorBench, a_fault, a_plan

# --- gathering the first nodes -----------------------------------------------------------------------------


def test_when_everybody_is_here_the_first_are_active_and_the_rest_spare() -> None:
    job = CoordinatorBench(min_nodes=2, nodes=3)
    job.join(2)
    job.join(0)
    assert job.state == "GATHERING"
    job.join(1)
    assert job.state == "RUNNING"
    assert job.placed() == {0: 0, 1: 1, 2: -1}


def test_a_plan_says_where_everybody_is() -> None:
    job = CoordinatorBench(min_nodes=2, nodes=2)
    job.join(1)
    job.join(0)
    plans = job.sent(Plan)
    assert plans[1] == Plan(1, 0, History(), 3, 2, 4, "10.0.0.0", 1000, group_rank=1, rank_offset=2)
    assert plans[0].rank_offset == 0


def test_after_the_last_call_it_starts_without_the_rest() -> None:
    job = CoordinatorBench(min_nodes=2, nodes=4)
    job.join(1)
    job.join(3)
    job.wait()
    assert (job.now, job.state) == (1.0, "RUNNING")
    assert job.placed() == {1: 0, 3: 1}


def test_a_node_lost_in_the_last_call_ends_it() -> None:
    job = CoordinatorBench(min_nodes=2, nodes=4)
    job.join(0)
    job.join(1)
    job.lose(1)
    job.wait()
    assert (job.state, job.said[-1]) == ("GATHERING", "1 of at least 2 nodes are here; missing: h1, h2, h3")


def test_too_few_nodes_end_the_job_with_one_sentence_for_all() -> None:
    job = CoordinatorBench(min_nodes=2, nodes=2)
    job.join(1)
    job.wait()  # says who is missing
    job.wait()
    assert (job.now, job.state, job.finished()) == (300.0, "FINISHED", {1: 94})
    job.lose(1)
    [done] = job.did(ev.Done)
    assert done.reason == "300 s (join timeout) are over; 1 of at least 2 nodes are here; missing: h0"


def test_nobody_at_all() -> None:
    job = CoordinatorBench(min_nodes=2, nodes=2)
    job.wait()
    job.wait()
    assert (job.state, job.did(ev.Done)[0].code) == ("CLOSED", 94)


def test_enough_nodes_in_the_last_second_of_the_join_timeout_are_enough() -> None:
    job = CoordinatorBench(min_nodes=1, nodes=2)
    job.wait()
    job.now = 299.5
    job.join(0)
    job.wait()
    assert (job.now, job.state) == (300.0, "RUNNING")


def test_words_about_cycles_that_never_were_mean_nothing() -> None:
    job = CoordinatorBench(min_nodes=2, nodes=2)
    job.join(0)
    for word in (Failed(1, 0, (a_fault(0),)), Succeeded(1, 0), Stopped(1, 0, 1)):
        job.hear(0, word)
        assert (job.state, job.commands) == ("GATHERING", [])


def test_a_job_may_be_ended_before_it_begins() -> None:
    job = CoordinatorBench(min_nodes=2, nodes=2)
    job.join(0)
    job.ends(0)
    assert (job.state, job.finished()) == ("FINISHED", {0: 143})


def test_a_job_may_be_ended_by_the_coordinators_own_program_when_nobody_is_here() -> None:
    job = CoordinatorBench(min_nodes=2, nodes=2)
    job.ends(0)
    assert (job.state, job.did(ev.Done)[0].code) == ("CLOSED", 143)


# --- faults and restarts -----------------------------------------------------------------------------------


def test_a_failed_rank_stops_all_and_the_next_cycle_starts_when_all_have_stopped() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=3)
    job.fails(1)
    assert (job.state, job.stopped()) == ("STOPPING", {0, 1})
    job.stops(1)
    assert job.state == "STOPPING"
    job.stops(0)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1, 2: -1})
    plan = job.sent(Plan)[0]
    assert (plan.cycle, plan.history.restarts_used, plan.master_port) == (1, 1, 2000)


def test_a_lost_node_is_replaced_by_the_first_spare_and_survivors_keep_their_rank() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=4)
    job.lose(0)
    job.stops(1)
    assert job.placed() == {2: 0, 1: 1, 3: -1}
    assert job.said[-1].startswith("cycle 1: 1 of 2 active nodes keep their group rank; new: h2 as group rank 0")


def test_the_budget_is_per_job() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=1, max_restarts=1)
    job.fails(0)
    job.stops(0)
    job.fails(0, cycle=1)
    assert (job.state, job.finished()) == ("FINISHED", {0: 1})
    assert job.said[-1].endswith("ends the job: all 1 restarts are used")


def test_a_lost_node_may_exhaust_the_budget_too() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2, max_restarts=0)
    job.lose(0)
    assert (job.state, job.finished()) == ("FINISHED", {1: 1})


def test_the_last_node_is_lost_and_no_restart_is_left() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=1, max_restarts=0)
    job.lose(0)
    assert (job.state, job.core.deadline()) == ("FINISHED", 3.0)
    job.wait()
    assert (job.state, job.did(ev.Done)[0].code) == ("CLOSED", 1)


def test_who_was_cut_off_when_the_end_was_decided_comes_back_and_hears_it() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=1, max_restarts=0)
    job.lose(0)
    job.join_with(0, a_plan(active=1), Doing.RUNNING)
    assert (job.finished(), job.core.deadline()) == ({0: 1}, 60.0)
    job.lose(0)
    assert job.state == "CLOSED"


def test_a_lone_active_node_is_replaced_at_once() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=2)
    job.lose(0)
    assert (job.state, job.placed()) == ("RUNNING", {1: 0})


def test_without_a_spare_the_job_waits_for_one() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=1)
    job.lose(0)
    assert job.state == "GATHERING"
    job.join(0, life=1)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0})


def test_a_spare_that_leaves_disturbs_nobody() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=2)
    job.lose(1)
    assert (job.state, job.said[-1]) == ("RUNNING", "spare node h1 left: connection reset")


def test_a_late_node_is_a_spare() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=1)
    job.join(5)
    assert (job.state, job.placed()) == ("RUNNING", {5: -1})


def test_faults_of_an_older_cycle_or_of_a_spare_are_no_fault() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=2)
    job.fails(1)
    job.fails(0, cycle=7)
    assert (job.state, job.commands) == ("RUNNING", [])


def test_an_active_node_that_stops_unasked_is_a_fault() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    job.stops(0)
    assert (job.state, job.stopped()) == ("STOPPING", {1})


def test_a_lone_node_that_stops_unasked_starts_again() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=1)
    job.stops(0)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0})


def test_a_node_that_stops_unasked_may_exhaust_the_budget() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=1, max_restarts=0)
    job.stops(0)
    assert job.state == "FINISHED"


def test_a_node_that_stops_unasked_when_the_others_are_done_and_gone() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    job.succeeds(0)
    job.lose(0)
    job.stops(1)
    assert (job.state, job.said[-1]) == (
        "GATHERING",
        "1 of at least 2 nodes are here; missing: h0; waiting up to 300 s",
    )


# --- while a cycle is being stopped ------------------------------------------------------------------------


def test_the_first_cause_is_the_one_that_no_other_explains() -> None:
    job = CoordinatorBench.stopping()
    job.hear(1, Failed(1, 0, (a_fault(1, FaultKind.HANG),)))
    job.ends(0)
    for rank in (0, 1, 2):
        job.lose(rank)
    assert job.did(ev.Done)[0].cause == a_fault(1, FaultKind.HANG)


def test_a_success_comes_too_late_when_the_cycle_is_being_stopped() -> None:
    job = CoordinatorBench.stopping()
    job.succeeds(1)
    assert (job.state, job.commands) == ("STOPPING", [])


def test_a_node_lost_while_stopping_is_not_waited_for() -> None:
    job = CoordinatorBench.stopping()
    job.lose(0)
    assert job.state == "STOPPING"
    job.stops(1)
    assert job.placed() == {2: 0, 1: 1}


def test_the_last_one_to_stop_is_lost() -> None:
    job = CoordinatorBench.stopping()
    job.stops(0)
    job.lose(1)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 2: 1})


def test_the_last_one_to_stop_is_lost_and_there_is_no_spare() -> None:
    job = CoordinatorBench.stopping(nodes=2)
    job.stops(0)
    job.lose(1)
    assert job.state == "GATHERING"


def test_all_stop_but_a_spare_was_needed_and_is_gone() -> None:
    job = CoordinatorBench.stopping(nodes=2)
    job.lose(0)
    job.stops(1)
    assert job.state == "GATHERING"


def test_a_node_that_comes_while_stopping_is_there_for_the_next_cycle() -> None:
    job = CoordinatorBench.stopping(nodes=2)
    job.join(7)
    assert job.state == "STOPPING"
    job.lose(0)
    job.stops(1)
    assert job.placed() == {7: 0, 1: 1}


def test_an_agent_that_made_its_stream_anew_without_workers_has_stopped() -> None:
    job = CoordinatorBench.stopping(nodes=2)
    job.stops(0)
    job.join(1, last_cycle=0)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1})


def test_a_new_life_of_the_last_node_to_stop() -> None:
    job = CoordinatorBench.stopping(nodes=2)
    job.stops(0)
    job.join(1, life=1)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1})


def test_one_comes_back_without_workers_while_another_is_missing() -> None:
    job = CoordinatorBench.stopping(nodes=2)
    job.lose(0)
    job.join(1, last_cycle=0)
    assert job.state == "GATHERING"


def test_nodes_that_do_not_stop_are_given_up() -> None:
    job = CoordinatorBench.stopping()
    job.stops(0)
    job.wait()
    assert (job.now, job.state, job.refused()) == (60.0, "RUNNING", {1})
    assert job.did(ev.Drop) == [ev.Drop("h1.0")]
    assert job.placed() == {0: 0, 2: 1}


def test_nodes_that_do_not_stop_are_given_up_even_without_a_spare() -> None:
    job = CoordinatorBench.stopping(nodes=2)
    job.stops(0)
    job.wait()
    assert (job.state, job.refused()) == ("GATHERING", {1})


def test_the_end_may_come_while_stopping() -> None:
    job = CoordinatorBench.stopping(nodes=2)
    job.ends(1)
    assert (job.state, job.finished()) == ("FINISHED", {0: 143, 1: 143})


# --- the end -----------------------------------------------------------------------------------------------


def finished() -> CoordinatorBench:
    """Two of three nodes were active, and are done."""
    job = CoordinatorBench.running(min_nodes=2, nodes=3)
    job.succeeds(0)
    assert job.state == "RUNNING"
    job.succeeds(1)
    assert (job.state, job.finished()) == ("FINISHED", {0: 0, 1: 0, 2: 0})
    return job


def test_when_all_are_done_the_last_one_to_leave_turns_off_the_light() -> None:
    job = finished()
    job.lose(0)
    job.lose(1)
    assert job.state == "FINISHED"
    job.lose(2)
    assert (job.state, job.did(ev.Done)) == ("CLOSED", [ev.Done(0, "all ranks finished", None)])


def test_after_the_end_nothing_changes_it() -> None:
    job = finished()
    for word in (Failed(1, 0, (a_fault(0),)), Succeeded(1, 0), Stopped(1, 0, 1)):
        job.hear(0, word)
    job.ends(0)
    assert (job.state, job.commands) == ("FINISHED", [])


def test_who_comes_late_learns_the_end() -> None:
    job = finished()
    job.join(9)
    assert job.finished() == {9: 0}


def test_nobody_is_waited_for_for_ever() -> None:
    job = finished()
    job.wait()
    assert (job.now, job.state) == (60.0, "CLOSED")
    assert job.said[-1] == "not waiting any longer for h0, h1, h2 to leave"


def test_a_running_job_may_be_ended() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=2)
    job.ends(1)
    assert (job.state, job.finished()) == ("FINISHED", {0: 143, 1: 143})
