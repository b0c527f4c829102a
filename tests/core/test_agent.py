"""The agent's decisions, one situation per test: one node with two workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.job import agent_events as ag
from nvrx_slurm.core.machine import Tick

from .benches import AgentBench, a_fault, a_node, a_plan

TERM, KILL, CONT = 15, 9, 18


def register(agent: AgentBench) -> t.Register:
    [message] = agent.sent()
    assert isinstance(message, t.Register)
    return message


def told(agent: AgentBench) -> tuple[t.Plan | None, t.Doing]:
    message = register(agent)
    return message.plan, message.doing


# --- one event --------------------------------------------------------------------------------------------------

HANG = ag.HangSeen(a_fault(1, t.FaultKind.HANG))
SIGNAL = "node 1 (h1) got signal 15"
ONE_EVENT: list[tuple[Callable[[], AgentBench], Any, str, str, Any]] = [
    (AgentBench, ag.Connected(), "IDLE", "sent", [t.Register(a_node(1), 0)]),
    (AgentBench, a_plan(), "RUNNING", "started", [0]),
    (AgentBench, a_plan(), "RUNNING", "said", ["cycle 0: group rank 0, ranks 0..1"]),
    (AgentBench, t.Stop(1, 4, "why not"), "IDLE", "sent", [t.Stopped(1, 4, 0)]),
    (AgentBench, HANG, "IDLE", "commands", []),
    (AgentBench, t.Finish(1, "all is lost"), "GONE", "exit", ag.Exit(1, "all is lost")),
    (AgentBench, t.Refused(95, "excluded"), "GONE", "exit", ag.Exit(95, "excluded")),
    (AgentBench, ag.Signalled(15), "GONE", "sent", [t.EndJob(143, SIGNAL, 15)]),
    (AgentBench.running, ag.WorkerExited(0, a_fault(1)), "STOPPING", "sent", [t.Failed(1, 0, (a_fault(1),))]),
    (AgentBench.running, ag.WorkerExited(0, a_fault(1)), "STOPPING", "signals", [TERM]),
    (AgentBench.running, t.Stop(1, 0, "rank 5 failed"), "STOPPING", "signals", [TERM]),
    (AgentBench.running, t.Stop(1, -1, "an older cycle"), "RUNNING", "commands", []),
    (AgentBench.running, t.Stop(0, 0, "an older term"), "RUNNING", "commands", []),
    (AgentBench.succeeded, t.Finish(0, "all ranks finished"), "GONE", "exit", ag.Exit(0, "all ranks finished")),
    (AgentBench.succeeded, a_plan(term=2), "SUCCEEDED", "started", []),
    (AgentBench.succeeded, a_plan(cycle=1), "RUNNING", "started", [1]),
    (AgentBench.succeeded, a_plan(1, -1), "IDLE", "started", []),
    (AgentBench.succeeded, HANG, "SUCCEEDED", "commands", []),
    (AgentBench.succeeded, ag.Signalled(15), "GONE", "exit", ag.Exit(143, SIGNAL)),
    (AgentBench.succeeded, t.Refused(95, "replaced"), "GONE", "exit", ag.Exit(95, "replaced")),
    (AgentBench.stopping, ag.WorkerExited(1, a_fault(1, code=-15, local_rank=1)), "IDLE", "sent", [t.Stopped(1, 0, 0)]),
    (AgentBench.stopping, t.Stop(1, 0, "again"), "STOPPING", "commands", []),
    (AgentBench.stopping, HANG, "STOPPING", "commands", []),
]


def test_one_event() -> None:
    """The state and the result of one query after it."""
    for bench, event, state, query, wanted in ONE_EVENT:
        agent = bench()
        agent.tell(event)
        got = getattr(agent, query)
        assert (agent.state, got() if callable(got) else got) == (state, wanted), event


# --- from the start to a cycle -----------------------------------------------------------------------------


def test_a_spare_waits_and_is_promoted() -> None:
    agent = AgentBench()
    agent.tell(ag.Connected())
    agent.tell(a_plan(group_rank=-1))
    assert (agent.state, agent.said) == ("IDLE", ["cycle 0: this node is a hot spare"])
    agent.tell(a_plan(cycle=1))
    assert (agent.state, agent.started()) == ("RUNNING", [1])


def test_a_plan_that_comes_twice_or_from_an_older_term_starts_nothing() -> None:
    agent = AgentBench()
    agent.tell(ag.Connected())
    agent.tell(a_plan(group_rank=-1, term=2))
    for plan in (a_plan(term=2), a_plan(cycle=5, term=1)):
        agent.tell(plan)
        assert (agent.state, agent.started()) == ("IDLE", [])


def test_no_coordinator_in_time() -> None:
    agent = AgentBench(connected=False)
    agent.wait()
    assert (agent.now, agent.state) == (300.0, "GONE")
    assert agent.exit() == ag.Exit(96, "no coordinator could be reached within 300 s (join timeout)")


def test_an_idle_agent_that_lost_its_coordinator_looks_for_it_for_a_while() -> None:
    agent = AgentBench()
    agent.tell(ag.Connected())
    agent.tell(ag.Disconnected("reset"))
    assert (agent.state, agent.said) == ("IDLE", ["no coordinator: reset"])
    agent.wait()
    assert (agent.now, agent.exit()) == (30.0, ag.Exit(96, "no coordinator could be reached within 30 s"))


# --- workers that run --------------------------------------------------------------------------------------


def test_all_workers_end_well() -> None:
    agent = AgentBench.running()
    agent.exits(0)
    assert (agent.state, agent.commands) == ("RUNNING", [])
    agent.exits(1)
    assert (agent.state, agent.sent()) == ("SUCCEEDED", [t.Succeeded(1, 0)])


def test_when_the_last_worker_fails_there_is_nothing_to_stop() -> None:
    agent = AgentBench.running()
    agent.exits(0)
    agent.exits(1, code=7)
    assert (agent.state, agent.sent()[-1], agent.signals()) == ("IDLE", t.Stopped(1, 0, 0), [])


def test_a_hung_worker_should_die_in_a_moment() -> None:
    agent = AgentBench.running()
    agent.hangs(0)
    assert (agent.state, agent.core.deadline()) == ("RUNNING", 10.0)
    agent.exits(0, code=-9)
    assert (agent.state, agent.signals()) == ("STOPPING", [TERM])


def test_a_hung_worker_that_cannot_be_killed_is_not_waited_for() -> None:
    agent = AgentBench.running()
    agent.hangs(0)
    agent.wait()
    assert (agent.now, agent.state) == (10.0, "STOPPING")
    assert agent.sent() == [t.Failed(1, 0, (a_fault(1, t.FaultKind.HANG, -9),))]


def test_a_hung_worker_that_finishes_after_all_has_finished() -> None:
    agent = AgentBench.running()
    agent.hangs(0)
    agent.exits(0)
    assert (agent.state, agent.core.deadline()) == ("RUNNING", None)


def test_late_word_of_a_hang_comes_after_the_exit() -> None:
    agent = AgentBench.running()
    agent.exits(0)
    agent.hangs(0)
    assert (agent.state, agent.core.deadline(), agent.commands) == ("RUNNING", None, [])


def test_a_timer_that_is_a_hair_early_is_set_again() -> None:
    agent = AgentBench.running()
    agent.hangs(0)
    agent.now = 10.0 - 1e-9
    agent.tell(Tick())
    assert (agent.state, agent.core.deadline()) == ("RUNNING", 10.0)


def test_a_new_coordinator_carries_on_with_the_cycle() -> None:
    agent = AgentBench.running()
    agent.tell(a_plan(term=2))
    assert (agent.state, agent.commands, agent.core.term) == ("RUNNING", [], 2)


def test_a_later_cycle_has_to_wait_for_the_workers_of_this_one() -> None:
    agent = AgentBench.running()
    agent.tell(a_plan(cycle=1))
    assert (agent.state, agent.signals(), agent.started()) == ("STOPPING", [TERM], [])
    agent.exits(0, code=-15)
    agent.exits(1, code=-15)
    assert (agent.state, agent.sent(), agent.started()) == ("RUNNING", [t.Stopped(1, 0, 0)], [1])


# --- without a coordinator ---------------------------------------------------------------------------------


def test_workers_go_on_for_a_while_and_then_are_stopped() -> None:
    agent = AgentBench.running()
    agent.tell(ag.Disconnected("reset"))
    assert agent.state == "RUNNING"
    agent.wait()
    assert (agent.now, agent.state, agent.signals()) == (2.0, "STOPPING", [TERM])


def test_a_new_stream_within_that_while_changes_nothing() -> None:
    agent = AgentBench.running()
    agent.tell(ag.Disconnected("reset"))
    agent.tell(ag.Connected())
    assert told(agent) == (a_plan(), t.Doing.RUNNING)
    assert (agent.state, agent.core.deadline()) == ("RUNNING", None)


def test_an_agent_that_is_stopping_says_that_it_cannot_carry_on() -> None:
    agent = AgentBench.stopping()
    agent.tell(ag.Disconnected("reset"))
    agent.tell(ag.Connected())
    assert told(agent) == (a_plan(), t.Doing.STOPPING)
    assert [fault.local_rank for fault in register(agent).faults] == [0]
    assert agent.state == "STOPPING"


def test_an_agent_that_is_done_says_so_again() -> None:
    agent = AgentBench.succeeded()
    agent.tell(ag.Disconnected("reset"))
    agent.tell(ag.Connected())
    assert told(agent) == (a_plan(), t.Doing.SUCCEEDED)


def test_an_agent_that_is_done_does_not_look_for_a_coordinator_for_ever() -> None:
    agent = AgentBench.succeeded()
    agent.tell(ag.Disconnected("reset"))
    agent.wait()
    assert (agent.now, agent.state) == (30.0, "GONE")


# --- done, but the others are not --------------------------------------------------------------------------


def test_others_failed_after_our_success() -> None:
    agent = AgentBench.succeeded()
    agent.tell(t.Stop(1, -1, "long ago"))
    assert agent.state == "SUCCEEDED"
    agent.tell(t.Stop(1, 0, "rank 5 failed"))
    assert (agent.state, agent.sent()) == ("IDLE", [t.Stopped(1, 0, 0)])


# --- stopping for the next cycle ---------------------------------------------------------------------------


def test_with_more_workers_each_exit_is_one_fewer() -> None:
    agent = AgentBench.running()
    agent.tell(t.Stop(1, 0, "rank 5 failed"))
    agent.exits(0, code=-15)
    assert (agent.state, agent.commands) == ("STOPPING", [])


def test_the_ladder_ends_with_giving_up() -> None:
    agent = AgentBench.stopping()
    agent.wait()
    assert (agent.now, agent.state, agent.signals()) == (15.0, "STOPPING", [KILL])
    agent.wait()
    assert (agent.now, agent.state) == (25.0, "GONE")
    assert agent.exit() == ag.Exit(95, "local ranks 1 do not end after SIGKILL (uninterruptible sleep?)")


def test_the_newest_plan_waits_until_they_are_gone() -> None:
    agent = AgentBench.stopping()
    agent.tell(a_plan(cycle=1))
    agent.tell(a_plan(cycle=2))
    agent.tell(a_plan(cycle=1))
    agent.exits(1, code=-15)
    assert (agent.state, agent.started()) == ("RUNNING", [2])


def test_the_end_while_stopping_sends_no_second_sigterm() -> None:
    for event in (t.Finish(1, "no restart left"), t.Refused(95, "replaced"), ag.Signalled(15)):
        agent = AgentBench.stopping()
        agent.tell(event)
        assert (agent.state, agent.signals()) == ("LEAVING", [])
        agent.exits(1, code=-15)
        assert agent.state == "GONE"


# --- leaving -----------------------------------------------------------------------------------------------


def test_a_signal_is_passed_on_once_and_ends_with_128_plus_n() -> None:
    agent = AgentBench.running()
    agent.tell(ag.Signalled(15))
    assert (agent.sent(), agent.signals()) == ([t.EndJob(143, "node 1 (h1) got signal 15", 15)], [TERM])
    agent.exits(0, code=-15)
    assert agent.state == "LEAVING"
    agent.exits(1, code=-15)
    assert (agent.state, agent.exit()) == ("GONE", ag.Exit(143, "node 1 (h1) got signal 15"))


def test_a_signal_that_slurm_sends_to_all_processes_is_not_passed_on() -> None:
    agent = AgentBench.running()
    agent.tell(ag.Signalled(15, everybody=True))
    assert (agent.state, agent.signals(), agent.did(ag.PassOn)) == ("LEAVING", [], [ag.PassOn(CONT)])
    agent.wait()
    assert (agent.now, agent.signals()) == (25.0, [KILL])


def test_in_a_step_the_end_by_signal_waits_for_slurms_own() -> None:
    agent = AgentBench.running(in_step=True)
    agent.tell(t.Finish(143, "node 0 (h0) got signal 15", 15))
    assert (agent.state, agent.signals()) == ("LEAVING", [])
    agent.wait()
    assert (agent.now, agent.signals()) == (3.0, [TERM])


def test_in_a_step_slurms_own_signal_comes_and_ours_does_not() -> None:
    agent = AgentBench.running(in_step=True)
    agent.tell(t.Finish(143, "node 0 (h0) got signal 15", 15))
    agent.now = 1.0
    agent.tell(ag.Signalled(15, everybody=True))
    agent.wait()
    assert (agent.now, agent.signals()) == (25.0, [KILL])


def test_a_second_signal_much_later_means_now() -> None:
    agent = AgentBench.leaving()
    agent.now = 1.0
    agent.tell(ag.Signalled(15))
    assert agent.core.deadline() == 25.0
    agent.now = 5.0
    agent.tell(ag.Signalled(15))
    agent.wait()
    assert (agent.now, agent.state, agent.signals()) == (5.0, "LEAVING", [KILL])


def test_workers_that_survive_everything_do_not_keep_the_agent() -> None:
    agent = AgentBench.leaving()
    agent.wait()
    agent.wait()
    assert (agent.now, agent.state) == (35.0, "GONE")
    end = agent.exit()
    assert end is not None
    assert end.code == 143


def test_the_job_ends_with_one_code_on_all_nodes() -> None:
    agent = AgentBench.leaving()
    agent.tell(t.Finish(130, "node 0 (h0) got signal 2", 2))
    agent.exits(0, code=-15)
    agent.exits(1, code=-15)
    assert agent.exit() == ag.Exit(130, "node 0 (h0) got signal 2")


def test_the_end_and_a_refusal_stop_what_runs() -> None:
    for event in (t.Finish(1, "no restart left"), t.Refused(95, "replaced")):
        agent = AgentBench.running()
        agent.tell(event)
        assert (agent.state, agent.signals(), agent.core.deadline()) == ("LEAVING", [TERM], 15.0)


def test_what_does_not_matter_any_more() -> None:
    agent = AgentBench.leaving()
    for event in (ag.Connected(), a_plan(cycle=1), t.Stop(1, 0, "why"), t.Refused(95, "replaced"), ag.Warned(10)):
        agent.tell(event)
        assert (agent.state, agent.commands) == ("LEAVING", [])
    agent.hangs(0)
    agent.tell(ag.Disconnected("reset"))
    assert (agent.state, agent.commands) == ("LEAVING", [])


def test_a_spare_is_told_of_its_cycle_twice_and_says_it_once() -> None:
    agent = AgentBench()
    agent.tell(ag.Connected())
    agent.tell(a_plan(group_rank=-1))
    agent.tell(replace(a_plan(group_rank=-1), term=2))
    assert (agent.said, agent.core.term) == (["cycle 0: this node is a hot spare"], 2)
