"""Every way in which a rank can fail, with real processes: the others go on without it, or with it."""

import signal
import time

import pytest
from ranks_harness import signal_all
from waits import until

pytestmark = pytest.mark.process


MEET = {"heartbeat_interval": 0.1, "progress_watchdog_interval": 0.1}
QUICK = {**MEET, "monitor_process_interval": 0.1, "monitor_thread_interval": 0.1, "termination_grace_time": 0.1}
HANGS = {**QUICK, "soft_timeout": 0.5, "hard_timeout": 1.5}
KILLED = (-signal.SIGTERM, -signal.SIGKILL)


def train(job, world_size, *faults, **arguments):
    return job.start("train", world_size, faults=faults, **arguments)


def all_return(job, ranks, iteration=1):
    """They enter the function in this iteration, numbered anew without a gap, and return; the others have ended."""
    for place, rank in enumerate(ranks):
        entered = job.await_event(rank, "entered", iteration=iteration)
        assert (entered["RANK"], entered["WORLD_SIZE"]) == (str(place), str(len(ranks)))
        job.await_event(rank, "returned", value=f"{rank} done")
    job.all_return(ranks)


def monitors_of(job, world_size):
    """Pids, once all ranks are in the function."""
    return [entered["monitor"] for entered in job.await_events(range(world_size), "entered")]


def log(tmp_path, rank):
    return (tmp_path / f"monitor{rank}.log").read_text()


@pytest.mark.parametrize(
    "world_size, how, told",
    [
        (1, "raise", "ValueError: fault of rank 0 in iteration 0"),
        (2, "restart exception", "RankShouldRestart"),
        (2, "surrogate", r"ValueError: bad \udce4 name"),
        (2, "no text", "_NoText: (its text cannot be had: KeyError"),
        (2, "fork", "ValueError: the child ended with 1"),  # a child that the function forks ends there
    ],
)
def test_odd_exceptions_are_faults_like_any_other(job, world_size, how, told):
    """All ranks learn of them, and none is lost."""
    victim = world_size - 1
    train(job, world_size, {victim: how})
    all_return(job, range(world_size))
    for rank in range(world_size):
        assert f"rank {victim}: exception: {told}" in job.err(rank).read_text()
        first, second = job.of(rank, "entered")
        assert first["MASTER_PORT"] != second["MASTER_PORT"]
    logged = job.err(victim).read_text()
    assert "Traceback" in logged and "scenarios.py" in logged


@pytest.mark.parametrize(
    "how, victim, code, kind",
    [
        ("sigkill", 0, -signal.SIGKILL, None),
        ("os_exit", 1, 9, None),
        ("exit", 0, 7, "SystemExit"),
        ("abort", 0, 1, "RestartAbort"),
    ],
)
def test_the_others_go_on_without_a_rank_that_leaves(job, how, victim, code, kind):
    """Dead, or by a base exception."""
    train(job, 3, {victim: how})
    all_return(job, [rank for rank in range(3) if rank != victim])
    assert kind is None or job.await_event(victim, "raised")["kind"] == kind
    assert job.await_end(victim) == code


def test_a_rank_that_cannot_be_stopped_is_killed_after_the_hard_timeout(job):
    """Three at once: each is killed by its own monitor process."""
    victims = {1: "sigstop", 2: "gil", 3: "c_lock"}
    train(job, 5, victims, times={**HANGS, "last_call_wait": 1.0, "soft_timeout": 1.0})
    entered = [job.await_event(rank, "returned") and job.of(rank, "entered")[-1] for rank in (0, 4)]
    assert [(one["RANK"], one["WORLD_SIZE"]) for one in entered] == [("0", "2"), ("1", "2")]
    for victim in victims:
        assert job.await_end(victim) in KILLED
    job.await_nothing_left()


def test_a_rank_that_goes_on_after_its_sigterm_takes_no_part_any_more(job):
    train(job, 3, {1: "until_sigterm"}, times={**HANGS, "termination_grace_time": 30.0, "barrier_timeout": 60.0})
    assert job.await_event(1, "raised")["kind"] == "RankDiscarded" and len(job.of(1, "entered")) == 1
    all_return(job, [0, 2])


@pytest.mark.parametrize(
    "how, others, times",
    [
        ("raise", "lock", {}),  # blocked in Python: stopped at once
        ("livelock", "block", {**HANGS, "hard_timeout": 20.0}),  # pings no more: restarted after the soft timeout
        ("livelock", "return", {"completion_timeout": 0.3}),  # some have returned: called again
    ],
)
def test_all_ranks_are_called_again(job, how, others, times):
    all_return(train(job, 3, {1: how}, others=others, times=times), range(3))


def test_two_faults_at_once_are_one_restart(job):
    train(job, 4, {1: "sigkill", 2: "sigkill"}, times={"last_call_wait": 0.3})
    all_return(job, [0, 3])


def test_a_suppressed_exception_is_raised_again_and_a_warning_shows_the_place(job):
    train(job, 2, {0: "on file"}, others="swallow", times={**HANGS, "hard_timeout": 20.0})
    job.await_event(1, "swallowed")
    all_return(job, range(2))
    assert "scenarios.py" in job.err(1).read_text().split("RankShouldRestart was suppressed")[1]


def test_the_run_ends_for_all_with_the_same_reason(job):
    """A RestartAbort on all ranks is raised from the last fault."""
    train(job, 3, *[{1: "raise"}] * 3, tries=2)
    for rank in range(3):
        chain = job.await_event(rank, "raised")["chain"]
        assert chain[0].startswith("RestartAbort") and "max_iterations=2" in chain[0]
        assert "ValueError: fault of rank 1 in iteration 1" in chain[-1]
    job.await_nothing_left()


def test_a_reserve_takes_over_and_returns_none_before(job):
    """With ranks 0 and 1 active, rank 0 dies; rank 3 is never needed."""
    train(job, 4, {0: "sigkill"}, active=2, meet=False)
    for rank, number, value in ((1, "0", "1 done"), (2, "1", "2 done"), (3, None, None)):
        assert job.await_event(rank, "returned")["value"] == value
        assert [event["RANK"] for event in job.of(rank, "entered", iteration=1)] == [number] * (number is not None)
    assert not job.of(2, "entered", iteration=0)
    job.await_nothing_left()


def test_without_a_server_rank_0_may_die_too(job):
    train(job, 3, {1: "raise"}, {0: "sigkill"}, file_store=True)
    all_return(job, [1, 2], 2)


def test_a_signal_is_handled_at_once_at_a_barrier(job, tmp_path):
    """Rank 0 waits at the iteration barrier for rank 1, which is slow to finalize."""
    plugin = {"name": "finalize", "how": "go", "victims": [1], "iteration": 0}
    train(job, 2, {0: "raise", 1: "raise"}, plugins=True, plugin=plugin, handler=True)
    job.await_event(1, "fault")
    job.await_event(0, "health_check", iteration=0)
    job.kill(0, signal.SIGTERM)
    assert job.await_end(0) == 5
    (tmp_path / "go").touch()
    all_return(job, [1])


@pytest.mark.parametrize("by", ["heartbeats", "launcher"])
def test_a_lost_host_is_missed(job, tmp_path, by):
    """Ranks and monitor processes are gone at once, so no process of the host can report it; 30 s is the default."""
    launcher = tmp_path / "launcher.jsonl"
    times = {**QUICK, "heartbeat_timeout": 1.5} if by == "heartbeats" else {}
    train(job, 4, {}, times=times, env={"NVRX_BOARD": str(launcher), "NVRX_CYCLE": "3"})
    monitors = monitors_of(job, 4)[1:3]
    signal_all(monitors, signal.SIGSTOP)
    signal_all([job.pids[1], job.pids[2]], signal.SIGKILL)
    if by == "launcher":
        launcher.write_text('not json\n{"v": 1, "cycle": 2, "ranks": [0, 3], "why": "another cycle"}\n')
        with launcher.open("a") as file:
            file.write('{"v": 1, "cycle": 3, "ranks": [1, 2], "why": "its pidfd"}\n')
    for rank in (0, 3):
        job.await_event(rank, "returned", 20.0)
        assert job.of(rank, "entered")[-1]["WORLD_SIZE"] == "2"
    signal_all(monitors, signal.SIGKILL)
    job.await_nothing_left()


def test_a_job_that_was_suspended_goes_on(job, tmp_path):
    """scontrol suspend and resume: longer than any limit; no rank is killed or restarted."""
    times = {**HANGS, "soft_timeout": 0.7, "hard_timeout": 1.0, "heartbeat_timeout": 1.2}
    train(job, 2, {1: "on file"}, times=times)
    monitors = monitors_of(job, 2)
    ranks = list(job.pids.values())
    signal_all(monitors + ranks, signal.SIGSTOP)
    until_s = time.monotonic() + 2.5
    until(lambda: time.monotonic() >= until_s, "the time has passed")
    signal_all(monitors, signal.SIGCONT)
    until(lambda: all("was suspended" in log(tmp_path, rank) for rank in range(2)), "the monitors have checked")
    signal_all(ranks, signal.SIGCONT)
    (tmp_path / "fault").touch()
    all_return(job, range(2))
    for rank in range(2):
        assert "TIMEOUT" not in log(tmp_path, rank) and "killed" not in log(tmp_path, rank)
        assert "and is killed" not in job.err(rank).read_text()
