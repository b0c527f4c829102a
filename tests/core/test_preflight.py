"""The preflight before every cycle: a node is offered once it is prepared and fit; a sick one is left out."""

from __future__ import annotations

from nvrx_slurm.core.job import agent_events as ag
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.agent import Agent, State
from nvrx_slurm.types import (
    Asked,
    Doing,
    FaultKind,
    Finish,
    RanksGone,
    Refused,
    Register,
    Stop,
    Stopped,
    Warn,
    WorkloadAction,
)

from .benches import AgentBench, CoordinatorBench, a_fault, a_node, a_plan

EXCLUDE = WorkloadAction.ExcludeThisNode
SICK = "gpu-recovery: GPU 3 needs GPU_RESET"
UNFIT = Asked(0, 0, EXCLUDE, -1, SICK)

# --- the agent -------------------------------------------------------------------------------------------------


def has_preflight(*, connected: bool = True) -> AgentBench:
    agent = AgentBench(has_preflight=True, connected=False)
    if connected:
        agent.tell(ag.Connected())
    return agent


def running() -> AgentBench:
    agent = has_preflight()
    agent.tell(ag.Prepared())
    agent.tell(a_plan())
    assert agent.started() == [0]
    return agent


def spare() -> AgentBench:
    agent = has_preflight()
    agent.tell(ag.Prepared())
    agent.tell(a_plan(group_rank=-1))
    assert agent.state == "IDLE"
    return agent


def test_it_registers_at_once_and_is_offered_when_it_is_prepared() -> None:
    agent = has_preflight()
    assert agent.sent() == [Register(a_node(1), 0, None, Doing.PREPARING)]
    agent.tell(ag.Prepared())
    assert (agent.sent(), agent.state) == ([Stopped(0, 0, 0)], "IDLE")


def test_prepared_before_it_is_connected_it_is_offered_as_ever() -> None:
    agent = has_preflight(connected=False)
    agent.tell(ag.Prepared())
    agent.tell(ag.Connected())
    assert agent.sent() == [Register(a_node(1), 0, None, Doing.IDLE)]


def test_a_plan_that_comes_too_early_waits() -> None:
    agent = has_preflight()
    agent.tell(a_plan())
    assert agent.started() == []
    agent.tell(ag.Prepared())
    assert (agent.started(), agent.state) == ([0], "RUNNING")


def test_an_unfit_node_says_so_instead_and_on_every_stream() -> None:
    agent = has_preflight()
    agent.tell(ag.Prepared(SICK))
    assert (agent.sent(), agent.said) == ([UNFIT], [f"this node is not fit for the job: {SICK}"])
    agent.tell(ag.Connected())
    assert agent.sent() == [Register(a_node(1), 0, None, Doing.PREPARING), UNFIT]
    agent.tell(a_plan())
    assert (agent.started(), agent.state) == ([], "PREPARING")
    agent.tell(Refused(95, "not healthy"))
    assert agent.state == "GONE"


def test_after_a_cycle_it_is_prepared_before_it_is_offered() -> None:
    agent = running()
    agent.exits(0, code=1)
    agent.exits(1, code=1)
    assert (agent.did(ag.Prepare), agent.sent(), agent.state) == ([ag.Prepare(True, 1)], [], "PREPARING")
    agent.tell(Stop(1, 0, "rank 0 failed"))
    assert (agent.did(ag.Prepare), agent.sent()) == ([], [])
    agent.tell(ag.Connected())
    assert agent.sent()[0].doing is Doing.STOPPING
    agent.tell(ag.Prepared())
    assert agent.sent() == [Stopped(1, 0, 0)]
    agent.tell(Stop(1, 0, "rank 0 failed"))
    assert (agent.did(ag.Prepare), agent.sent()) == ([], [Stopped(1, 0, 0)])


def test_the_next_plan_is_taken_when_it_is_prepared() -> None:
    agent = running()
    agent.tell(a_plan(cycle=1))
    agent.exits(0, code=-15)
    agent.exits(1, code=-15)
    assert agent.started() == []
    agent.tell(ag.Prepared())
    assert (agent.sent(), agent.started()) == ([Stopped(1, 0, 0)], [1])


def test_an_unfit_node_does_not_take_it() -> None:
    agent = running()
    agent.tell(a_plan(cycle=1))
    agent.exits(0, code=-15)
    agent.exits(1, code=-15)
    agent.tell(ag.Prepared(SICK))
    assert (agent.sent(), agent.started()) == ([Asked(1, 0, EXCLUDE, -1, SICK)], [])


def test_a_spare_is_looked_at_before_it_may_be_promoted() -> None:
    agent = spare()
    agent.tell(Stop(1, 0, "it may be needed"))
    assert (agent.did(ag.Prepare), agent.sent()) == ([ag.Prepare(False, 1)], [])
    agent.tell(ag.Prepared())
    assert agent.sent() == [Stopped(1, 0, 0)]
    agent.tell(a_plan(cycle=1))
    assert agent.started() == [1]


def test_a_node_that_falls_sick_asks_to_be_left_out() -> None:
    asked = [Asked(1, 0, EXCLUDE, -1, SICK)]
    for agent in (spare(), running()):
        agent.tell(ag.Sick(SICK))
        assert agent.sent() == asked
        agent.tell(ag.Sick("and more"))
        assert agent.sent() == []
    agent = running()
    agent.exits(0, code=1)
    agent.tell(ag.Sick(SICK))
    assert (agent.state, agent.sent()) == ("STOPPING", asked)
    agent.exits(1, code=1)
    agent.tell(ag.Prepared())
    assert agent.sent() == asked  # and not that it is ready


def test_a_node_that_is_done_may_fall_sick_but_is_not_used_once_more() -> None:
    agent = running()
    agent.exits(0)
    agent.exits(1)
    agent.tell(ag.Sick(SICK))
    assert (agent.state, agent.sent()) == ("SUCCEEDED", [])
    agent.tell(Stop(1, 0, "another rank failed"))
    agent.tell(ag.Prepared())
    assert agent.sent() == [Asked(1, 0, EXCLUDE, -1, SICK)]


def test_who_leaves_does_not_care() -> None:
    agent = running()
    agent.tell(ag.Signalled(15))
    agent.tell(ag.Sick(SICK))
    assert (agent.state, agent.sent()) == ("LEAVING", [])


def test_no_row_starts_workers_before_the_preflight_has_passed() -> None:
    """RUNNING is entered from IDLE by a plan, and from PREPARING only by the end of the preflight."""
    entries = {key for key, row in Agent.table.items() if State.RUNNING in row.to and key[0] is not State.RUNNING}
    assert entries == {(State.IDLE, type(a_plan())), (State.PREPARING, ag.Prepared)}


def test_without_a_coordinator_nothing_is_sent() -> None:
    """No message may be sent before its receiver exists; the next Register tells the same."""
    for event in (ag.Prepared(), ag.Prepared(SICK), ag.Sick(SICK), ag.Warned(10), ag.Signalled(15)):
        agent = has_preflight(connected=False)
        agent.tell(event)
        assert agent.sent() == []
    agent = running()
    agent.tell(ag.Disconnected("reset"))
    agent.exits(0, code=1)
    assert agent.sent() == []


def test_what_can_happen_while_the_preflight_runs() -> None:
    """The state and the commands for each event that neither starts nor ends anything."""
    hang = ag.HangSeen(a_fault(1, FaultKind.HANG, -9))
    for event in (hang, RanksGone(0, (3,), "gone"), ag.RankAsked(0, WorkloadAction.Continue, "x")):
        agent = has_preflight()
        agent.tell(event)
        assert (agent.state, agent.commands) == ("PREPARING", [])
    for event in (ag.Warned(10), Warn(10, "why"), ag.Disconnected("reset")):
        agent = has_preflight()
        agent.tell(event)
        assert (agent.state, agent.did(ag.PassOn), len(agent.said)) == ("PREPARING", [], 1)
    agent.wait()
    assert agent.exit() == ag.Exit(96, "no coordinator could be reached within 30 s")


def test_what_ends_a_node_while_the_preflight_runs() -> None:
    for event, code in ((Finish(1, "x"), 1), (Refused(95, "x"), 95), (ag.Signalled(15), 143)):
        agent = has_preflight()
        agent.tell(event)
        assert (agent.state, agent.exit().code) == ("GONE", code)
    agent = has_preflight()
    agent.tell(ag.Warned(10))
    agent.now += 10.0
    agent.tell(ag.Warned(10))
    assert (agent.state, agent.exit().code) == ("GONE", 143)


def test_processes_started_ahead_end_where_no_worker_will_run() -> None:
    agent = spare()
    assert agent.did(ag.EndHeld) == [ag.EndHeld()]
    agent = has_preflight()
    agent.tell(ag.Prepared(SICK))
    assert agent.did(ag.EndHeld) == [ag.EndHeld()]
    assert running().did(ag.EndHeld) == []


# --- the coordinator -------------------------------------------------------------------------------------------


def prepares(job: CoordinatorBench, rank: int) -> None:
    """An agent registers that is still looking at its node."""
    job.tell(ev.Joined(Register(a_node(rank), 1000 + rank, None, Doing.PREPARING)))


def offers(job: CoordinatorBench, rank: int) -> None:
    """It is fit."""
    job.hear(rank, Stopped(0, 0, 2000 + rank))


def is_unfit(job: CoordinatorBench, rank: int) -> None:
    """It is not."""
    job.hear(rank, Asked(0, 0, EXCLUDE, -1, SICK))


def a_has_preflight_job(min_nodes: int = 2, nodes: int = 3) -> CoordinatorBench:
    job = CoordinatorBench(min_nodes, nodes, has_preflight=True)
    for rank in range(nodes):
        prepares(job, rank)
    assert job.state == "GATHERING"
    for rank in range(nodes):
        offers(job, rank)
    assert job.placed() == {rank: rank if rank < min_nodes else -1 for rank in range(nodes)}
    return job


def test_nobody_is_planned_with_before_it_is_prepared() -> None:
    job = a_has_preflight_job()
    assert job.sent(type(a_plan()))[0].master_port == 2000


def test_a_repeated_offer_changes_nothing() -> None:
    job = a_has_preflight_job()
    offers(job, 0)
    assert (job.state, job.commands) == ("RUNNING", [])


def test_an_unfit_node_is_sent_away_and_the_job_begins_without_it() -> None:
    job = CoordinatorBench(2, 3, has_preflight=True)
    for rank in range(3):
        prepares(job, rank)
    offers(job, 0)
    offers(job, 2)
    is_unfit(job, 1)
    assert (job.state, job.refused(), job.placed()) == ("RUNNING", {1}, {0: 0, 2: 1})
    assert f"node 1 (h1) is not healthy: {SICK}" in job.said
    job.join(1, life=1)
    assert job.refused() == {1}


def test_too_many_unfit_nodes_end_the_job_with_the_reason() -> None:
    job = CoordinatorBench(2, 2, has_preflight=True)
    for rank in range(2):
        prepares(job, rank)
    offers(job, 0)
    is_unfit(job, 1)
    assert (job.state, job.finished()) == ("FINISHED", {0: 94})
    job.lose(0)
    (done,) = job.did(ev.Done)
    assert (done.cause.kind, done.cause.message) == (FaultKind.UNHEALTHY, SICK)


def test_the_last_one_to_be_unfit_turns_off_the_light() -> None:
    job = CoordinatorBench(1, 1, has_preflight=True)
    prepares(job, 0)
    is_unfit(job, 0)
    assert (job.state, job.refused(), job.did(ev.Done)[0].code) == ("CLOSED", {0}, 94)


def test_spares_are_asked_and_the_first_fit_one_is_promoted() -> None:
    job = a_has_preflight_job(2, 4)
    job.lose(1)
    assert (job.state, job.stopped()) == ("STOPPING", {0, 2, 3})
    job.hear(2, Asked(1, 0, EXCLUDE, -1, SICK))
    assert (job.state, job.refused()) == ("STOPPING", {2})
    job.stops(0)
    assert (job.state, job.said[-1]) == ("GATHERING", f"node 2 (h2) is not healthy: {SICK}")
    job.stops(3)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 3: 1})


def test_a_spare_that_is_not_needed_is_not_waited_for() -> None:
    job = a_has_preflight_job(2, 3)
    job.fails(1)
    job.stops(0)
    job.stops(1)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1})
    job.stops(2)
    assert job.placed() == {2: -1}


def test_a_spare_that_never_answers_is_missed_after_a_while() -> None:
    job = a_has_preflight_job(2, 3)
    job.lose(1)
    job.stops(0)
    assert "waiting up to" not in job.said[-1]
    job.wait()
    assert (job.state, "2 of at least 2 nodes are here" in job.said[-1]) == ("GATHERING", True)
    job.wait()
    assert job.finished() == {0: 94, 2: 94}


def test_a_node_that_falls_sick_costs_a_restart() -> None:
    job = a_has_preflight_job(2, 3)
    job.hear(1, Asked(1, 0, EXCLUDE, -1, SICK))
    assert (job.state, job.refused(), job.stopped()) == ("STOPPING", {1}, {0, 2})
    assert f"node 1 (h1) is not healthy: {SICK}; restart 1 of 3" in job.said


def test_an_unfit_stranger_lets_a_new_term_give_up_the_old_cycle() -> None:
    job = CoordinatorBench(1, 2, term=2, has_preflight=True)
    job.join_with(0, a_plan(3, 0, used=0), Doing.STOPPING)
    prepares(job, 2)
    job.join(1, last_cycle=3)
    is_unfit(job, 2)
    assert (job.state, job.refused()) == ("STOPPING", {2})


def test_a_late_node_is_prepared_before_it_is_a_spare() -> None:
    job = a_has_preflight_job(2, 3)
    job.lose(2)
    prepares(job, 3)
    assert job.placed() == {3: -1}
    job.hear(0, Stopped(1, 0, 1))  # stopped unasked: a restart, for which the newcomer is not ready
    job.stops(1)
    assert (job.state, job.placed()) == ("RUNNING", {0: 0, 1: 1})
    assert not job.sent(Finish)
    offers(job, 3)
    assert job.placed() == {3: -1}
