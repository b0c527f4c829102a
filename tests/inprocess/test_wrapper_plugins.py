"""Plug-ins: when they are called, and what happens when one of them fails, dies, lies, or never returns."""

import signal

import pytest
from test_wrapper_faults import KILLED, QUICK, all_return, train

pytestmark = pytest.mark.process


# A bound on how long a rank may take between a fault and the barrier: a busy machine takes a second from a rank.
TIMES = {**QUICK, "soft_timeout": 1.0, "hard_timeout": 2.0, "barrier_timeout": 3.0, "heartbeat_timeout": 2.5}
TIMES["completion_timeout"] = 0.5


def plugin(name, how, victim=1, iteration=0):
    return {"name": name, "how": how, "victims": [victim], "iteration": iteration}


def start(job, size, faults, wanted=None, **more):
    given = {"plugin": wanted} if wanted else {}
    train(job, size, *([faults] if faults else []), plugins=True, **given, **more)
    if wanted:
        job.await_event(wanted["victims"][0], "fault")


def test_each_plugin_is_called_in_its_place(job):
    start(job, 2, {1: "raise"})
    all_return(job, range(2))
    begin = ["rank_assignment", "initialize", "health_check", "entered"]
    for rank in range(2):
        names = [event["event"] for event in job.events[rank]]
        assert names[:4] == begin
        assert sorted(names[4:6]) == ["abort", "finalize"]  # abort comes first; a thread of its own reports it
        assert names[6:] == ["health_check", *begin, "completion", "returned"]


@pytest.mark.parametrize(
    "name, how",
    [("initialize", how) for how in ("raise", "sigkill", "wrong")]
    + [("health_check", "once"), ("health_check", "raise")]
    + [("finalize", "raise"), ("rank_assignment", "sigkill")],
)
def test_a_plugin_that_fails_on_one_rank(job, name, how):
    """`initialize` and the first health check are tried again; else the others go on without the rank."""
    iteration = 1 if (name, how) == ("rank_assignment", "sigkill") else 0
    start(job, 3, {0: "raise"} if name == "finalize" or iteration else {}, plugin(name, how, iteration=iteration))
    again = (name, how) in (("initialize", "raise"), ("health_check", "once"))
    all_return(job, [0, 1, 2] if again else [0, 2], iteration + 1)
    if how == "sigkill":
        assert job.await_end(1) == -signal.SIGKILL
    elif not again:
        raised = job.await_event(1, "raised")
        kinds = {"raise": "ValueError", "abort": "RestartAbort", "wrong": "InternalError"}
        unfit = name == "health_check" and how == "raise"
        assert raised["kind"] == ("HealthCheckError" if unfit else kinds[how])
        assert not unfit or raised["chain"][1].startswith("ValueError")
        assert job.of(1, "terminate")
        assert (name, how) != ("finalize", "raise") or "fault of rank 0" in raised["chain"][-1]


def test_an_abort_that_fails_changes_nothing(job):
    start(job, 2, {0: "raise"}, plugin("abort", "raise"))
    all_return(job, range(2))


@pytest.mark.parametrize(
    "name, how, kind, code",
    [
        ("completion", "raise", "ValueError", 1),
        ("terminate", "raise", "RestartAbort", 1),
        ("terminate", "exit", "SystemExit", 7),
    ],
)
def test_a_completion_or_a_terminate_that_fails(job, name, how, kind, code):
    """An Exception of terminate does not replace the reason to leave; a BaseException does. It is called once."""
    leaves = name == "terminate"
    start(job, 3, {1: "abort"} if leaves else {}, plugin(name, how))
    assert job.await_event(1, "raised")["kind"] == kind
    assert (len(job.of(1, "fault")), job.await_end(1)) == (1, code)
    assert not leaves or how == "exit" or "terminate failed\nTraceback" in job.err(1).read_text()
    assert all(job.await_event(rank, "returned") for rank in (0, 2))
    if leaves:
        all_return(job, [0, 2])
    job.await_nothing_left()


@pytest.mark.repeats("health_check", "initialize", "terminate")
@pytest.mark.parametrize(
    "name, how, victim, faults, survivors, iteration",
    [
        ("abort", "never", 1, {0: "raise"}, [0, 2], 1),
        ("health_check", "never", 1, {}, [0, 2], 1),
        ("rank_assignment", "met_never", 0, {2: "raise"}, [1, 2], 2),  # the others are in the iteration already
        ("initialize", "met_never", 1, {0: "raise"}, [0, 1, 2], 1),  # it is stopped like the function
        ("terminate", "forever", 1, {1: "exit"}, [0, 2], 1),
    ],
)
def test_a_plugin_that_never_returns_costs_its_rank_only(job, name, how, victim, faults, survivors, iteration):
    start(job, 3, faults, plugin(name, how, victim, iteration - 1), times=TIMES)
    all_return(job, survivors, iteration)
    assert victim in survivors or job.await_end(victim) in KILLED


def test_a_terminate_that_makes_progress_takes_as_long_as_it_wants(job):
    """Here longer than the way to the next iteration may take."""
    start(job, 3, {1: "abort"}, plugin("terminate", "slow"), times=TIMES)
    assert job.await_event(1, "raised")["kind"] == "RestartAbort"
    assert (len(job.of(1, "fault")), job.await_end(1)) == (1, 1)
    all_return(job, [0, 2])


@pytest.mark.parametrize("name, iteration, handler", [("abort", 0, True), ("rank_assignment", 1, False)])
def test_sigterm_in_the_middle_of_a_restart(job, name, iteration, handler):
    """Without a handler the rank dies; with one it leaves, after the grace time if `abort` does not return."""
    wanted = plugin(name, "never", 1, iteration)
    start(job, 3, {0: "raise"}, wanted, handler=handler, times={"termination_grace_time": 0.5})
    job.kill(1, signal.SIGTERM)
    all_return(job, [0, 2], iteration + 1)
    assert job.await_end(1) == (5 if handler else -signal.SIGTERM)
    if handler:
        assert job.await_event(1, "raised")["kind"] == "SystemExit"
        assert ("abort did not end" in job.err(1).read_text()) == (name == "abort")


def test_a_rank_that_dies_while_ranks_are_assigned(job):
    """With a filter all ranks need its key: they do not wait for it until the filter's timeout of 60 s."""
    start(job, 6, {0: "raise"}, plugin("rank_assignment", "sigkill", 2, 1), assignment="pairs")
    for rank in (0, 1, 4, 5):
        job.await_event(rank, "returned")
        assert job.of(rank, "entered")[-1]["WORLD_SIZE"] == "4"
    assert job.await_end(2) == -signal.SIGKILL
    assert job.await_event(3, "raised")["kind"] == "RankDiscarded"
    job.await_nothing_left()


def test_the_process_ends_in_the_middle_of_a_restart(job):
    """After the interpreter's own end, with the threads of the helpers waiting in C."""
    start(job, 2, {0: "raise"}, plugin("finalize", "exit"), finalizes=True)
    all_return(job, [0])
    assert job.await_end(1) == 7
