"""What ranks ask for, warnings, dead peers and min-healthy, as the agent decides: one node with two workers."""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.job import agent_events as ag

from .benches import AgentBench, a_fault, a_node, a_plan

TERM = 15


def register(agent: AgentBench) -> t.Register:
    """What it told the coordinator on its stream, which it has just made."""
    message = agent.sent()[0]
    assert isinstance(message, t.Register)
    return message


# --- requests, warnings, dead peers ----------------------------------------------------------------------------

EXCLUDE = t.WorkloadAction.ExcludeThisNode


def test_a_request_is_passed_on_and_told_again_on_every_stream() -> None:
    agent = AgentBench.running()
    agent.asks(EXCLUDE)
    asked = t.Asked(1, 0, EXCLUDE, 0, "too hot")
    assert (agent.sent(), agent.said[-1]) == ([asked], "rank 0 asks: ExcludeThisNode: too hot")
    agent.tell(ag.Connected())
    assert agent.sent()[1:] == [asked]
    agent = AgentBench.running()
    agent.asks(t.WorkloadAction.Continue)
    agent.tell(ag.Connected())
    assert agent.sent()[1:] == []


def test_a_rank_that_asks_in_a_loop_fills_no_log_and_prints_no_escapes() -> None:
    agent = AgentBench.running()
    agent.tell(ag.RankAsked(0, EXCLUDE, "red \x1b[31m alert\n"))
    assert agent.said[-1] == "rank 0 asks: ExcludeThisNode: red  [31m alert "
    passed = []
    for _ in range(101):
        agent.asks(t.WorkloadAction.Continue)
        passed.append(len(agent.sent()))
    assert passed == [1] * 100 + [0]
    agent.asks(EXCLUDE)
    assert len(agent.sent()) == 1


def test_a_request_counts_also_when_its_rank_is_gone_already() -> None:
    stopped = AgentBench.stopping()
    stopped.exits(1, code=-15)
    assert stopped.state == "IDLE"
    for agent in (stopped, AgentBench.stopping(), AgentBench.succeeded()):
        agent.asks(EXCLUDE)
        assert agent.sent() == [t.Asked(1, 0, EXCLUDE, 0, "too hot")]
    for agent in (AgentBench(), AgentBench.leaving()):
        agent.asks(EXCLUDE)
        assert agent.commands == []


def test_wrappers_are_told_of_dead_peers_of_their_cycle() -> None:
    agent = AgentBench.running()
    agent.tell(t.RanksGone(0, (5, 6), "lost"))
    assert agent.commands == [ag.PostGone(0, (5, 6), "lost")]
    agent.tell(t.RanksGone(1, (5, 6), "lost"))
    assert agent.commands == []
    for agent in (AgentBench(), AgentBench.succeeded(), AgentBench.stopping(), AgentBench.leaving()):
        agent.tell(t.RanksGone(0, (5, 6), "lost"))
        assert agent.commands == []


def test_the_warning_signal_warns_every_rank_of_the_job_once() -> None:
    agent = AgentBench.running()
    agent.tell(ag.Warned(10))
    why = "node 1 (h1) got signal 10"
    assert agent.sent() == [t.WarnJob(10, why)]
    assert agent.commands[2:] == [ag.WarnRanks(), ag.PassOn(10)]
    agent.tell(ag.Warned(10))
    agent.tell(t.Warn(10, why))
    assert (agent.state, agent.commands) == ("RUNNING", [])


def test_what_slurm_sent_to_every_process_is_not_sent_again() -> None:
    agent = AgentBench.running()
    agent.tell(ag.Warned(10, everybody=True))
    assert agent.commands[1:] == [ag.WarnRanks()]


def test_a_warning_from_another_node_reaches_the_ranks() -> None:
    agent = AgentBench.running()
    agent.tell(t.Warn(12, "soon"))
    assert agent.commands[1:] == [ag.WarnRanks(), ag.PassOn(12)]


def test_ranks_that_start_after_a_warning_are_warned() -> None:
    for event in (ag.Warned(10), t.Warn(10, "soon")):
        for agent in (AgentBench(), AgentBench.stopping(), AgentBench.succeeded()):
            state = agent.state
            agent.tell(event)
            assert (agent.state, agent.did(ag.WarnRanks)) == (state, [])
            agent.tell(a_plan(cycle=1))
            if state == "STOPPING":
                agent.exits(1, code=-15)
            assert (agent.started(), agent.did(ag.WarnRanks)) == ([1], [ag.WarnRanks()])


def test_who_warns_a_second_time_wants_an_end() -> None:
    ends = {"RUNNING": "LEAVING", "STOPPING": "LEAVING", "IDLE": "GONE", "SUCCEEDED": "GONE"}
    for agent in (AgentBench.running(), AgentBench.stopping(), AgentBench(), AgentBench.succeeded()):
        before = agent.state
        agent.tell(ag.Warned(10))
        agent.now = 3.0
        agent.tell(ag.Warned(10))
        assert (agent.state, agent.sent()) == (ends[before], [t.EndJob(143, "node 1 (h1) got signal 10 a second time")])
        assert agent.signals() == ([TERM] if before == "RUNNING" else [])  # they do not die of the warning signal


def test_the_first_signal_here_is_no_second_warning_though_the_coordinator_was_faster() -> None:
    agent = AgentBench.running()
    agent.tell(t.Warn(10, "soon"))
    agent.now = 100.0
    agent.tell(ag.Warned(10))
    assert (agent.state, agent.sent(), agent.did(ag.WarnRanks)) == (
        "RUNNING",
        [t.WarnJob(10, "node 1 (h1) got signal 10")],
        [],
    )
    agent.now = 103.0
    agent.tell(ag.Warned(10))
    assert agent.state == "LEAVING"


def test_a_warning_without_a_stream_is_told_with_the_next_one() -> None:
    agent = AgentBench.running()
    agent.tell(ag.Disconnected("reset"))
    agent.tell(ag.Warned(10))
    agent.tell(ag.Connected())
    assert agent.sent()[1:] == [t.WarnJob(10, "node 1 (h1) got signal 10")]


def test_an_exit_code_is_no_signal() -> None:
    agent = AgentBench.running(in_step=True)
    agent.tell(t.Finish(200, "asked to shut down"))
    assert (agent.state, agent.signals(), agent.core.deadline()) == ("LEAVING", [TERM], 15.0)


def test_workers_get_their_signal_before_they_are_killed_however_short_the_time_is() -> None:
    agent = AgentBench.running(in_step=True, term_timeout_s=1.0)
    agent.tell(t.Finish(143, "node 0 (h0) got signal 15", 15))
    agent.wait()
    assert (agent.now, agent.signals()) == (3.0, [TERM])
    agent.wait()
    assert (agent.now, agent.signals()) == (4.0, [9])


def test_other_user_signals_are_only_passed_on() -> None:
    agent = AgentBench.running(warning_signum=0)
    for signum in (10, 10, 12):
        agent.tell(ag.Warned(signum))
        assert agent.commands[1:] == [ag.PassOn(signum)]
    agent.tell(ag.Warned(12, everybody=True))
    assert agent.commands == []
    stopping = AgentBench.stopping()
    stopping.tell(ag.Warned(12))
    assert stopping.commands == []


def test_a_worker_that_saved_its_work_because_of_a_warning_says_so() -> None:
    agent = AgentBench.running()
    agent.tell(ag.WorkerExited(0, None, early=True))
    agent.exits(1)
    assert agent.sent() == [t.Succeeded(1, 0, early=True)]
    agent.tell(ag.Connected())
    assert register(agent).early


def test_nothing_of_that_matters_when_leaving() -> None:
    agent = AgentBench.leaving()
    agent.tell(t.Warn(10, "soon"))
    assert (agent.state, agent.commands) == ("LEAVING", [])


# --- min-healthy -------------------------------------------------------------------------------------------------

MIN_HEALTHY = t.RestartPolicy.MIN_HEALTHY


def test_under_min_healthy_the_other_workers_go_on() -> None:
    agent = AgentBench.running(policy=MIN_HEALTHY)
    agent.exits(0, code=1)
    assert agent.said[-1].endswith(" failed")  # the coordinator says why, and that the others go on
    assert (agent.state, agent.sent(), agent.signals()) == ("RUNNING", [t.Failed(1, 0, (a_fault(1),))], [])
    agent.tell(ag.Connected())
    assert register(agent) == t.Register(a_node(1), 0, a_plan(), t.Doing.RUNNING, (a_fault(1),))
    agent.exits(1)
    assert (agent.state, agent.sent()) == ("IDLE", [t.Stopped(1, 0, 0)])


def test_under_min_healthy_several_may_hang_and_each_is_reported_once() -> None:
    agent = AgentBench.running(policy=MIN_HEALTHY)
    agent.hangs(0)
    agent.now = 1.0
    agent.hangs(1)
    agent.wait()
    assert (agent.now, agent.state, len(agent.sent())) == (10.0, "RUNNING", 1)
    agent.exits(0, code=-9)
    assert (agent.state, agent.sent()) == ("RUNNING", [])
    agent.wait()
    assert (agent.now, len(agent.sent())) == (11.0, 1)
    agent.exits(1, code=-9)
    assert (agent.state, agent.sent()) == ("IDLE", [t.Stopped(1, 0, 0)])


def test_under_min_healthy_a_broken_node_stops_when_it_is_told() -> None:
    agent = AgentBench.running(policy=MIN_HEALTHY)
    agent.exits(0, code=1)
    agent.tell(t.Stop(1, 0, "too few are left"))
    assert (agent.state, agent.signals()) == ("STOPPING", [TERM])
