"""Restart or give up, which fault was the first, and the sentences about it."""

import pytest

from nvrx_slurm.core.attribution.said import headline, report
from nvrx_slurm.core.attribution.verdict import first_cause
from nvrx_slurm.core.coordinator.restarts import Budget, Decision
from nvrx_slurm.declared import replace
from nvrx_slurm.types import FaultKind, History, KindCount, RankFault

from .samples import a_fault, a_node, restart_limits

pytestmark = pytest.mark.fast


EXIT = a_fault(1)
ABORT = a_fault(2, FaultKind.SIGNAL, -6)
KILLED = a_fault(3, FaultKind.SIGNAL, -9)
HANG = a_fault(4, FaultKind.HANG, -9)
LOST = RankFault(FaultKind.NODE_LOST, "h5", 5, message="connection reset")
SPAWN = a_fault(6, FaultKind.SPAWN)
STUCK = a_fault(7, FaultKind.UNKILLABLE)
OUT = RankFault(FaultKind.EXCLUDED, "h8", 8, 16, message="too hot")


@pytest.mark.parametrize(
    "faults, cause",
    [
        ([], None),
        ([EXIT, ABORT], EXIT),  # of those that may follow from others, the first to arrive
        ([ABORT, EXIT], ABORT),
        ([EXIT, KILLED], KILLED),  # a peer's connection error was reported sooner than what caused it
        ([EXIT, HANG], HANG),
        ([ABORT, LOST], LOST),
        ([EXIT, SPAWN], SPAWN),
        ([EXIT, STUCK], STUCK),
        ([EXIT, LOST, KILLED], LOST),  # of those that do not follow from others, too
    ],
)
def test_first_cause(faults, cause):
    assert first_cause(faults) == cause


@pytest.mark.parametrize(
    "fault, text",
    [
        (EXIT, "rank 2 (local rank 0, pid 4711) on node 1 (h1) exited with code 1: boom"),
        (KILLED, "rank 6 (local rank 0, pid 4711) on node 3 (h3) was killed by boom"),
        (replace(KILLED, message=""), "rank 6 (local rank 0, pid 4711) on node 3 (h3) was killed by signal 9"),
        (HANG, "rank 8 (local rank 0, pid 4711) on node 4 (h4) hung: boom"),
        (LOST, "node 5 (h5) was lost: connection reset"),
        (replace(LOST, host=""), "connection reset"),
        (SPAWN, "rank 12 (local rank 0, pid 4711) on node 6 (h6) could not be started: boom"),
        (OUT, "node 8 (h8) was excluded on request of its rank 16: too hot"),
        (STUCK, "rank 14 (local rank 0, pid 4711) on node 7 (h7) does not end: boom"),
    ],
)
def test_headline(fault, text):
    assert headline(fault) == text


@pytest.mark.parametrize(
    "used, allowed, code, left",
    [
        (0, 3, None, "restart 1 of 3"),
        (2, 3, None, "restart 3 of 3"),
        (3, 3, 1, "all 3 restarts are used"),
        (0, 0, 1, "no restart was allowed (--max-restarts=0)"),
    ],
)
def test_the_sum_of_all_restarts(used, allowed, code, left):
    budget = a_budget(allowed)
    budget.inherit(History(restarts_used=used))
    why = f"node 5 (h5) was lost: connection reset; {left}"
    assert budget.after(LOST, 100.0) == Decision(code is None, code or 0, why)


def a_budget(max_restarts=9, **limits):
    return Budget(max_restarts, restart_limits(**limits))


def test_a_port_that_another_program_took_uses_no_restart():
    budget = a_budget(max_restarts=1)
    taken = replace(a_fault(0), traceback="DistNetworkError: ... port: 29400 ... EADDRINUSE, address already in use")
    assert [budget.after(taken, 2.0).restart for _ in range(3)] == [True] * 3
    assert budget.history.restarts_used == 0 and budget.after(taken, 2.0).restart  # the fourth time it is a fault
    assert budget.history.restarts_used == 1 and not budget.after(taken, 2.0).restart


@pytest.mark.parametrize("rank, lasted_s, said", [(1, 2.0, "EADDRINUSE"), (0, 500.0, "EADDRINUSE"), (0, 2.0, "")])
def test_other_faults_use_a_restart(rank, lasted_s, said):
    budget = a_budget(max_restarts=1)
    budget.after(replace(a_fault(rank), message=said), lasted_s)
    assert budget.history.restarts_used == 1


def test_a_kind_of_fault_may_have_a_budget_of_its_own():
    budget = a_budget(by_kind=(KindCount(FaultKind.HANG, 1), KindCount(FaultKind.SPAWN, 0)))
    assert [budget.after(fault, 100.0).restart for fault in (HANG, EXIT, EXIT, HANG)] == [True, True, True, False]
    assert budget.history == History(3, (KindCount(FaultKind.EXIT, 2), KindCount(FaultKind.HANG, 1)))
    assert budget.after(HANG, 100.0).why.endswith("; no restart for hang faults is left (--ft-max-restarts-by-fault)")
    assert budget.after(SPAWN, 100.0).why.endswith("; no restart for spawn faults is left (--ft-max-restarts-by-fault)")


def test_a_rank_that_dies_at_its_start_again_and_again_is_given_time():
    budget = a_budget(99)
    died = (EXIT, KILLED, ABORT, LOST, EXIT, SPAWN, KILLED, KILLED, EXIT, KILLED)
    pauses = [budget.after(fault, 0.5).pause_s for fault in died]  # any rank; a node's fault is not counted
    assert pauses == [0.0, 1.0, 2.0, 0.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert "restart 11 of 99 in 60 s" in budget.after(KILLED, 0.5).why
    assert [budget.after(fault, 5.0).pause_s for fault in (KILLED, LOST)] == [0.0, 0.0]  # a cycle that went well
    assert budget.after(KILLED, 0.5).pause_s == 0.0
    never = a_budget(crash_loop_pause_s=0.0)
    assert [never.after(KILLED, 0.5).pause_s for _ in range(3)] == [0.0, 0.0, 0.0]


def test_an_error_that_no_restart_mends_ends_the_job_at_once():
    text = "  File \"/home/u/train.py\", line 3\n    def f(\n         ^\nSyntaxError: '(' was never closed"
    broken = replace(EXIT, message=text.splitlines()[-1], traceback=text)
    decision = a_budget().after(broken, 0.5)
    assert (decision.restart, decision.code) == (False, 1) and "SyntaxError" in decision.why
    assert a_budget(stops_on_repeats=True).after(broken, 0.5).code == 93
    for other in ("<string>", "/usr/lib/python3.11/ast.py"):  # data of the run, or an installation that is half there
        assert a_budget().after(replace(broken, traceback=text.replace("/home/u/train.py", other)), 0.5).restart
    assert a_budget().after(replace(broken, message="SyntaxError: source code cannot contain null bytes"), 0.5).restart
    taken = replace(a_fault(0), message="The server socket has failed to listen ... port: 29400 ... EADDRINUSE")
    decision = a_budget().after(taken, 2.0, agent_port=29400)
    assert not decision.restart and "nvrx-run itself listens on port 29400" in decision.why
    assert a_budget().after(taken, 2.0, agent_port=2940).restart


def test_cycles_without_progress_end_the_job():
    budget = a_budget(max_no_progress_cycles=2, min_progress_iterations=10)
    budget.begin_at(100)
    assert [budget.score(i) for i in (110, 115, None, 121)] == [None, None, None, None]
    assert budget.history == History(iteration=121)
    assert budget.score(121) is None
    assert budget.score(130) == Decision(
        False, 93, "no progress in 2 cycles: the last checkpoint is of iteration 130, 131 or more was expected"
    )


def test_a_first_checkpoint_is_progress_and_the_beginning_is_noted_once():
    budget = a_budget(max_no_progress_cycles=1)
    budget.begin_at(None)
    assert budget.score(0) is None
    budget.begin_at(7)
    assert budget.history == History(iteration=0)
    assert budget.score(0) is not None

    unlimited = a_budget(max_no_progress_cycles=0)
    unlimited.begin_at(5)
    assert [unlimited.score(5) for _ in range(50)] == [None] * 50


def test_what_agents_know_of_earlier_terms_is_taken_over():
    budget = a_budget()
    budget.exclude(a_node(1))
    budget.inherit(History(2, (), 1, 40, ("2@h2", "1@h1")))
    budget.inherit(History(1, (), 0, 30, ("3@h3",)))
    budget.exclude(a_node(1))
    assert budget.history == History(2, (), 1, 40, ("1@h1", "2@h2", "3@h3"))


def test_a_report_has_the_log_and_the_traceback():
    fault = replace(EXIT, log="/logs/rank_2.err", traceback="Traceback:\n  File x\n")
    log, to_do, *traceback = report(fault).splitlines()[1:]
    assert (log, traceback) == ("  log: /logs/rank_2.err", ["  | Traceback:", "  |   File x"])
    assert to_do.startswith("  to do: ")
