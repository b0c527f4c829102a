"""Workload control, progress, warnings and the end of the allocation, as the coordinator decides them."""

from __future__ import annotations

from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.restarts import RestartLimits
from nvrx_slurm.types import Doing, EndJob, Plan, Succeeded, Warn, WarnJob, WorkloadAction

from .benches import CoordinatorBench, a_fault, a_plan

CONTINUE, EXCLUDE, SHUTDOWN = WorkloadAction

# --- requests of ranks ---------------------------------------------------------------------------------------


def test_to_continue_is_noted() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    job.asks(1, CONTINUE)
    assert (job.state, job.said[-1]) == ("RUNNING", "rank 2 on node h1 asked to continue: too hot")


def test_an_excluded_node_leaves_and_a_spare_takes_over() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=3)
    job.asks(1, EXCLUDE)
    assert (job.state, job.refused(), job.stopped()) == ("STOPPING", {1}, {0})
    assert "node 1 (h1) was excluded on request of its rank 2: too hot; restart 1 of 3" in job.said
    job.stops(0)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 2: 1})


def test_an_excluded_node_is_not_taken_again() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=3)
    job.asks(1, EXCLUDE)
    job.stops(0)
    job.join(1, life=1)
    assert (job.state, job.refused(), job.placed()) == ("RUNNING", {1}, {})


def test_nor_in_a_later_term() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=3)
    job.asks(1, EXCLUDE)
    job.stops(0)
    plan = job.sent(Plan)[2]
    assert plan.history.excluded == ("1@h1",)
    later = CoordinatorBench(min_nodes=2, nodes=3, term=2)
    later.join_with(2, plan, Doing.RUNNING)
    later.join(1, life=1)
    assert (later.state, later.refused()) == ("GATHERING", {1})


def test_a_node_that_came_before_the_word_of_its_exclusion_is_sent_away() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=3)
    job.asks(1, EXCLUDE)
    job.stops(0)
    plan = job.sent(Plan)[2]
    later = CoordinatorBench(min_nodes=2, nodes=3, term=2)
    later.join(1, life=1)
    later.join_with(2, plan, Doing.RUNNING)
    assert (later.state, later.refused(), len(later.core.job.members)) == ("GATHERING", {1}, 1)


def test_when_nobody_can_ever_take_its_place_the_job_ends_at_once() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    job.asks(1, EXCLUDE)
    assert (job.state, job.refused(), job.finished()) == ("FINISHED", {1}, {0: 94})
    job.lose(0)
    [done] = job.did(ev.Done)
    assert done.reason.startswith(
        "1 nodes are left after the exclusion of h1, 2 are needed: node 1 (h1) was excluded on "
    )
    assert done.cause.message == "too hot"


def test_a_lone_node_may_exclude_itself() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=1)
    job.asks(0, EXCLUDE)
    assert (job.state, job.refused()) == ("CLOSED", {0})


def test_an_exclusion_may_exhaust_the_budget() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=3, max_restarts=0)
    job.asks(1, EXCLUDE)
    assert (job.state, job.finished()) == ("FINISHED", {0: 1, 2: 1})


def test_the_only_active_node_excludes_itself_and_a_spare_starts_at_once() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=2)
    job.asks(0, EXCLUDE)
    assert (job.state, job.placed()) == ("RUNNING", {1: 0})


def test_the_only_active_node_excludes_itself_while_the_spare_is_away() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=2)
    job.lose(1)
    job.asks(0, EXCLUDE)
    assert job.state == "GATHERING"


def test_an_exclusion_that_is_asked_for_while_stopping_counts() -> None:
    job = CoordinatorBench.stopping(min_nodes=2, nodes=3)
    job.asks(1, EXCLUDE)
    assert (job.state, job.refused()) == ("STOPPING", {1})
    job.stops(0)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 2: 1})


def test_the_last_node_to_stop_asks_to_be_excluded() -> None:
    job = CoordinatorBench.stopping(min_nodes=1, nodes=2)
    job.asks(0, EXCLUDE)
    assert (job.state, job.placed()) == ("RUNNING", {1: 0})


def test_the_last_node_to_stop_asks_to_be_excluded_while_the_spare_is_away() -> None:
    job = CoordinatorBench.stopping(min_nodes=1, nodes=2)
    job.lose(1)
    job.asks(0, EXCLUDE)
    assert job.state == "GATHERING"


def test_the_last_node_to_stop_excludes_itself_and_nobody_else_can_come() -> None:
    job = CoordinatorBench.stopping(min_nodes=1, nodes=1)
    job.asks(0, EXCLUDE)
    assert job.state == "CLOSED"


def test_an_exclusion_that_is_asked_for_while_gathering_counts() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=3)
    job.lose(2)
    job.lose(1)
    job.stops(0)
    assert job.state == "GATHERING"
    job.asks(0, EXCLUDE)
    assert (job.state, job.refused()) == ("GATHERING", {0})
    job.join(1)
    job.join(2)
    assert job.placed() == {1: 1, 2: 0}


def test_while_gathering_the_last_node_excludes_itself_and_nobody_else_can_come() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=1)
    job.lose(0)
    job.join_with(0, a_plan(), Doing.RUNNING)
    job.asks(0, EXCLUDE)
    assert job.state == "CLOSED"


def test_a_shutdown_ends_everybody_with_one_code() -> None:
    for code in (93, 7):
        job = CoordinatorBench.running(min_nodes=2, nodes=3, limits=RestartLimits(no_restart_code=code))
        job.asks(1, SHUTDOWN)
        assert (job.state, job.finished()) == ("FINISHED", {0: code, 1: code, 2: code})
        for rank in range(3):
            job.lose(rank)
        [done] = job.did(ev.Done)
        assert done.reason == "rank 2 on node h1 asked to shut down the workload: too hot"


def test_a_shutdown_ends_the_job_in_every_phase() -> None:
    job = CoordinatorBench.stopping()
    job.asks(1, SHUTDOWN)
    assert job.state == "FINISHED"
    job.asks(1, SHUTDOWN)
    assert (job.state, job.commands) == ("FINISHED", [])
    job = CoordinatorBench(min_nodes=2, nodes=2)
    job.join(0)
    job.asks(0, SHUTDOWN)
    assert job.state == "FINISHED"
    job.asks(5, SHUTDOWN)
    assert job.commands == []


def test_who_is_not_here_can_ask_for_nothing() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=2)
    job.lose(1)
    job.asks(1, SHUTDOWN)
    assert (job.state, job.commands) == ("RUNNING", [])


# --- pauses and progress -------------------------------------------------------------------------------------


def crash(job: CoordinatorBench, cycle: int) -> None:
    job.fails(0, cycle)
    job.stops(0, cycle)


def test_a_rank_that_dies_at_its_start_twice_is_given_a_pause() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=1)
    crash(job, 0)
    crash(job, 1)
    assert (job.state, job.core.deadline()) == ("GATHERING", 1.0)
    job.wait()
    assert (job.now, job.state, job.placed()) == (1.0, "RUNNING", {0: 0})


def test_a_pause_is_as_good_as_a_wait_for_nodes() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    for cycle in range(2):
        job.fails(0, cycle)
        job.stops(0, cycle)
        job.stops(1, cycle)
    job.lose(1)
    job.wait()
    assert (job.now, job.state) == (1.0, "GATHERING")
    job.join(1)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1})


def progress_job(**more: object) -> CoordinatorBench:
    limits = RestartLimits(max_no_progress_cycles=1)
    job = CoordinatorBench.running(min_nodes=1, nodes=1, tracks_progress=True, limits=limits, **more)
    assert job.did(ev.ReadProgress) == [ev.ReadProgress(-1)]
    job.tell(ev.ProgressRead(-1, 40))
    return job


def test_progress_is_read_when_a_cycle_has_failed_and_the_lack_of_it_ends_the_job() -> None:
    job = progress_job()
    job.fails(0)
    assert job.did(ev.ReadProgress) == [ev.ReadProgress(0)]
    job.tell(ev.ProgressRead(0, 40))
    assert (job.state, job.finished()) == ("FINISHED", {0: 93})
    job.tell(ev.ProgressRead(0, 40))
    assert job.commands == []


def test_no_cycle_is_planned_before_the_last_one_is_scored() -> None:
    job = progress_job()
    crash(job, 0)
    assert job.state == "GATHERING"
    job.tell(ev.ProgressRead(0, 41))
    assert (job.state, job.sent(Plan)[0].history.iteration) == ("RUNNING", 41)
    job.tell(ev.ProgressRead(0, 41))
    assert (job.state, job.commands) == ("RUNNING", [])


def test_a_file_system_that_does_not_answer_holds_up_nothing_for_long() -> None:
    job = progress_job()
    crash(job, 0)
    job.wait()
    assert (job.now, job.state) == (6.0, "RUNNING")


def test_progress_that_is_read_before_all_have_stopped() -> None:
    job = progress_job()
    job.fails(0)
    job.tell(ev.ProgressRead(0, 41))
    assert job.state == "STOPPING"
    job.stops(0)
    assert job.state == "RUNNING"


def test_the_lack_of_progress_is_told_where_no_restart_is_left_either() -> None:
    for iteration, code in ((40, 93), (41, 1), (None, 1)):
        job = progress_job(max_restarts=0)
        job.fails(0)
        assert (job.state, job.stopped()) == ("STOPPING", {0})
        job.tell(ev.ProgressRead(0, iteration))
        assert (job.state, job.finished()) == ("FINISHED", {0: code})
        job.lose(0)
        assert job.did(ev.Done)[0].cause == a_fault(0)


def test_the_lack_of_progress_shows_when_all_have_stopped() -> None:
    job = progress_job()
    crash(job, 0)
    job.tell(ev.ProgressRead(0, 40))
    assert (job.state, job.finished()) == ("FINISHED", {0: 93})


def test_the_answer_comes_while_a_node_is_waited_for() -> None:
    job = progress_job()
    job.lose(0)
    job.tell(ev.ProgressRead(0, 41))
    assert job.state == "GATHERING"


def test_the_answer_comes_when_nobody_is_left_and_nobody_is_expected_back() -> None:
    job = progress_job()
    job.lose(0)
    job.now = 4.0
    job.tell(ev.ProgressRead(0, 40))
    assert job.state == "CLOSED"


# --- warnings and time -----------------------------------------------------------------------------------------


def test_a_warning_reaches_everybody_once_and_those_who_come_later() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=2)
    job.hear(1, WarnJob(10, "node 1 (h1) got signal 10"))
    assert set(job.sent(Warn)) == {0, 1}
    job.hear(0, WarnJob(10, "again"))
    assert job.commands == []
    job.join(2)
    assert job.sent(Warn) == {2: Warn(10, "node 1 (h1) got signal 10")}


def test_a_warning_may_come_in_every_phase() -> None:
    for job in (CoordinatorBench(min_nodes=2, nodes=2), CoordinatorBench.stopping()):
        job.join(0) if job.state == "GATHERING" else None
        state = job.state
        job.hear(0, WarnJob(10, "soon"))
        assert (job.state, 0 in job.sent(Warn)) == (state, True)
    job.hear(0, EndJob(143, "now"))
    job.hear(0, WarnJob(10, "soon"))
    assert (job.state, job.commands) == ("FINISHED", [])


def test_ranks_that_ended_because_of_a_warning_give_the_job_its_code() -> None:
    job = CoordinatorBench.running(min_nodes=2, nodes=2)
    job.hear(0, WarnJob(12, "soon"))
    job.hear(0, Succeeded(1, 0, early=True))
    job.succeeds(1)
    assert job.finished() == {0: 140, 1: 140}


def test_slurm_may_have_warned_every_process_itself() -> None:
    job = CoordinatorBench.running(min_nodes=1, nodes=1)
    job.hear(0, Succeeded(1, 0, early=True))
    assert job.finished() == {0: 138}


def timed(warn_s: float = 60.0, stop_s: float = 10.0, nodes: int = 1) -> CoordinatorBench:
    return CoordinatorBench(
        1, nodes, time_limited=True, warn_before_end_s=warn_s, stop_before_end_s=stop_s, join_timeout_s=1e6
    )


def test_the_time_left_is_asked_for_at_once_and_said() -> None:
    job = timed()
    job.wait()
    assert (job.now, job.did(ev.AskTimeLeft)) == (0.0, [ev.AskTimeLeft()])
    job.tell(ev.TimeLeft(3600.0))
    assert job.said == ["the allocation ends in 1 h"]
    job.join(0)
    assert (job.state, job.core.deadline()) == ("RUNNING", 3525.0)


def test_before_the_end_ranks_are_warned_and_then_stopped() -> None:
    job = timed()
    job.join(0)
    job.wait()
    job.tell(ev.TimeLeft(3600.0))
    job.wait()
    assert (job.now, job.did(ev.AskTimeLeft)) == (3525.0, [ev.AskTimeLeft()])
    job.tell(ev.TimeLeft(75.0))
    job.wait()
    assert (job.now, job.sent(Warn)) == (3540.0, {0: Warn(10, "less than 60 s of the allocation are left")})
    job.wait()
    assert (job.now, job.did(ev.AskTimeLeft)) == (3575.0, [ev.AskTimeLeft()])
    job.tell(ev.TimeLeft(25.0))
    job.wait()
    assert (job.now, job.state, job.finished()) == (3590.0, "FINISHED", {0: 143})
    job.tell(ev.TimeLeft(10.0))
    assert job.commands == []


def test_an_allocation_that_was_extended_gives_more_time() -> None:
    job = timed(stop_s=0.0)
    job.join(0)
    job.wait()
    job.tell(ev.TimeLeft(100.0))
    job.wait()
    job.tell(ev.TimeLeft(1060.0))
    assert (job.state, job.commands, job.core.deadline()) == ("RUNNING", [], 1010.0)


def test_without_an_answer_what_is_known_holds() -> None:
    job = timed(stop_s=0.0)
    job.join(0)
    job.wait()
    job.tell(ev.TimeLeft(100.0))
    job.wait()
    job.wait()
    assert (job.now, set(job.sent(Warn))) == (40.0, {0})
    assert job.core.deadline() is None


def test_nobody_knows_how_much_time_is_left() -> None:
    job = timed()
    job.join(0)
    job.wait()
    job.tell(ev.TimeLeft(None))
    assert (job.state, job.commands, job.core.deadline()) == ("RUNNING", [], None)


def test_the_end_of_the_allocation_comes_in_every_phase() -> None:
    job = timed(nodes=2)
    job.wait()
    job.tell(ev.TimeLeft(5.0))
    assert job.state == "CLOSED"
    job = timed(nodes=2)
    job.join(0)
    job.tell(ev.TimeLeft(5.0))
    assert job.state == "FINISHED"
    job = timed()
    job.join(0)
    job.wait()
    job.tell(ev.TimeLeft(80.0))
    job.fails(0)
    job.wait()
    assert (job.now, job.did(ev.AskTimeLeft)) == (5.0, [ev.AskTimeLeft()])
    job.wait()
    assert (job.now, job.state, set(job.sent(Warn))) == (20.0, "STOPPING", {0})
    job.tell(ev.TimeLeft(60.0))
    assert job.state == "STOPPING"
    job.tell(ev.TimeLeft(10.0))
    assert job.state == "FINISHED"
    job = timed()
    job.join(0)
    job.tell(ev.TimeLeft(5.0))
    assert (job.state, job.finished()) == ("FINISHED", {0: 143})


def test_without_an_answer_while_a_cycle_is_stopped_the_end_comes_all_the_same() -> None:
    job = timed(warn_s=0.0)
    job.join(0)
    job.wait()
    job.tell(ev.TimeLeft(50.0))
    job.wait()
    assert (job.now, job.did(ev.AskTimeLeft)) == (25.0, [ev.AskTimeLeft()])
    job.fails(0)
    assert job.state == "STOPPING"
    job.wait()
    assert (job.now, job.state, job.finished()) == (40.0, "FINISHED", {0: 143})
