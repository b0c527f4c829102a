"""The preflight before every cycle: a node is offered once it is prepared and fit; a sick one is left out."""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.job import agent_events as ag
from nvrx_slurm.core.job.agent import Agent, State

from .benches import AgentBench, a_fault, a_node, a_plan

EXCLUDE = t.WorkloadAction.ExcludeThisNode
SICK = "gpu-recovery: GPU 3 needs GPU_RESET"
UNFIT = t.Asked(0, 0, EXCLUDE, -1, SICK)

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
    assert agent.sent() == [t.Register(a_node(1), 0, None, t.Doing.PREPARING)]
    agent.tell(ag.Prepared())
    assert (agent.sent(), agent.state) == ([t.Stopped(0, 0, 0)], "IDLE")


def test_prepared_before_it_is_connected_it_is_offered_as_ever() -> None:
    agent = has_preflight(connected=False)
    agent.tell(ag.Prepared())
    agent.tell(ag.Connected())
    assert agent.sent() == [t.Register(a_node(1), 0, None, t.Doing.IDLE)]


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
    assert agent.sent() == [t.Register(a_node(1), 0, None, t.Doing.PREPARING), UNFIT]
    agent.tell(a_plan())
    assert (agent.started(), agent.state) == ([], "PREPARING")
    agent.tell(t.Refused(95, "not healthy"))
    assert agent.state == "GONE"


def test_after_a_cycle_it_is_prepared_before_it_is_offered() -> None:
    agent = running()
    agent.exits(0, code=1)
    agent.exits(1, code=1)
    assert (agent.did(ag.Prepare), agent.sent(), agent.state) == ([ag.Prepare(True, 1)], [], "PREPARING")
    agent.tell(t.Stop(1, 0, "rank 0 failed"))
    assert (agent.did(ag.Prepare), agent.sent()) == ([], [])
    agent.tell(ag.Connected())
    assert agent.sent()[0].doing is t.Doing.STOPPING
    agent.tell(ag.Prepared())
    assert agent.sent() == [t.Stopped(1, 0, 0)]
    agent.tell(t.Stop(1, 0, "rank 0 failed"))
    assert (agent.did(ag.Prepare), agent.sent()) == ([], [t.Stopped(1, 0, 0)])


def test_the_next_plan_is_taken_when_it_is_prepared() -> None:
    agent = running()
    agent.tell(a_plan(cycle=1))
    agent.exits(0, code=-15)
    agent.exits(1, code=-15)
    assert agent.started() == []
    agent.tell(ag.Prepared())
    assert (agent.sent(), agent.started()) == ([t.Stopped(1, 0, 0)], [1])


def test_an_unfit_node_does_not_take_it() -> None:
    agent = running()
    agent.tell(a_plan(cycle=1))
    agent.exits(0, code=-15)
    agent.exits(1, code=-15)
    agent.tell(ag.Prepared(SICK))
    assert (agent.sent(), agent.started()) == ([t.Asked(1, 0, EXCLUDE, -1, SICK)], [])


def test_a_spare_is_looked_at_before_it_may_be_promoted() -> None:
    agent = spare()
    agent.tell(t.Stop(1, 0, "it may be needed"))
    assert (agent.did(ag.Prepare), agent.sent()) == ([ag.Prepare(False, 1)], [])
    agent.tell(ag.Prepared())
    assert agent.sent() == [t.Stopped(1, 0, 0)]
    agent.tell(a_plan(cycle=1))
    assert agent.started() == [1]


def test_a_node_that_falls_sick_asks_to_be_left_out() -> None:
    asked = [t.Asked(1, 0, EXCLUDE, -1, SICK)]
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
    agent.tell(t.Stop(1, 0, "another rank failed"))
    agent.tell(ag.Prepared())
    assert agent.sent() == [t.Asked(1, 0, EXCLUDE, -1, SICK)]


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
    hang = ag.HangSeen(a_fault(1, t.FaultKind.HANG, -9))
    for event in (hang, t.RanksGone(0, (3,), "gone"), ag.RankAsked(0, t.WorkloadAction.Continue, "x")):
        agent = has_preflight()
        agent.tell(event)
        assert (agent.state, agent.commands) == ("PREPARING", [])
    for event in (ag.Warned(10), t.Warn(10, "why"), ag.Disconnected("reset")):
        agent = has_preflight()
        agent.tell(event)
        assert (agent.state, agent.did(ag.PassOn), len(agent.said)) == ("PREPARING", [], 1)
    agent.wait()
    assert agent.exit() == ag.Exit(96, "no coordinator could be reached within 30 s")


def test_what_ends_a_node_while_the_preflight_runs() -> None:
    for event, code in ((t.Finish(1, "x"), 1), (t.Refused(95, "x"), 95), (ag.Signalled(15), 143)):
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
