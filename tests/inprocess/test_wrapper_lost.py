"""Ranks that leave at any point, and the loss of monitor processes, the barrier server, and the store."""

import contextlib
import os
import signal

import pytest
from ranks_harness import Job, signal_all
from test_wrapper_faults import QUICK, all_return, log, monitors_of, train
from waits import until

pytestmark = pytest.mark.process


POINTS = 3
SOON_S = 20.0  # by default no heartbeat is missed before (30 s), and no barrier is over (120 s)
TIMES = {**QUICK, "heartbeat_timeout": 1.5}
# of 2 s in all
TIMES_OF_A_BARRIER = {**TIMES, "heartbeat_timeout": 0.8, "soft_timeout": 0.5, "hard_timeout": 0.7, "barrier_timeout": 1}
SLOW = {"name": "finalize", "how": "go", "victims": [2], "iteration": 0}  # rank 2 comes late to the barrier


def monitor(tmp_path, rank):
    return int((tmp_path / f"monitor{rank}.pid").read_text() or 0)  # 0: it is just being written


def all_fail(job, ranks, *said):
    """They raise the same error, in which all of this is said; nothing is left."""
    for rank in ranks:
        first = job.await_event(rank, "raised")["chain"][0]
        assert [text for text in said if text not in first] == [], first
        assert job.await_end(rank) == 1
    job.await_nothing_left()


def test_a_rank_that_leaves_at_any_point_of_a_restart(zygote, tmp_path):
    """By an exception of its signal handler; the others may have the result of the barrier already, that it goes on."""
    victim = 0
    calls = 0
    for point in range(POINTS + 1):  # point 0: it only counts
        nth = calls * point // POINTS
        (tmp_path / str(nth)).mkdir()
        with contextlib.closing(Job(zygote, tmp_path / str(nth))) as job:
            job.start("leaves_at", 3, victim=victim, nth=nth)
            if point == 0:
                calls = job.await_event(victim, "calls", iteration=1)["number"]
                assert list(job.await_all().values()) == [0, 0, 0]
                continue
            where = job.await_event(victim, "fault")["where"]
            for rank in {0, 1, 2} - {victim}:
                job.await_event(rank, "returned", SOON_S)
                last = job.of(rank, "entered")[-1]
                assert last["WORLD_SIZE"] == "2" and last["iteration"] <= 2, (nth, where)
            assert job.await_event(victim, "raised")["kind"] == "SystemExit", (nth, where)
            assert job.await_all() == {0: 0, 1: 0, 2: 0, victim: 5}
            job.await_nothing_left()


@pytest.mark.parametrize("victim, how, late", [(0, "exit", False), (1, "kill", True)])
def test_a_rank_that_leaves_at_entry(job, tmp_path, victim, how, late):
    """The others begin without it. `late`: its monitor process is ready (it opens its log) after the rank's end."""
    path = tmp_path / f"monitor{victim}.log"
    os.mkfifo(path) if late else path.touch()
    job.start("leaves_at_entry", 3, victim=victim, how=how)
    job.await_event(victim, "fault")
    if late:
        assert job.await_end(victim) == {"exit": 5, "kill": -signal.SIGKILL}[how]
    with path.open():
        job.await_events({0, 1, 2} - {victim}, "entered", SOON_S, iteration=0, WORLD_SIZE="2")
        job.all_return({0, 1, 2} - {victim})


@pytest.mark.parametrize("assignment, told", [("tree", False), ("pairs", True)])
def test_a_rank_that_was_discarded_is_not_missed(job, tmp_path, assignment, told):
    """Ranks come in pairs, and 2 dies. Rank 3 sends no heartbeats any more, or the launcher reports its end."""
    launcher = tmp_path / "launcher"
    times = {} if told else {**QUICK, "heartbeat_timeout": 0.7}
    train(job, 4, {2: "sigkill"}, assignment=assignment, last="go", times=times, env={"NVRX_BOARD": str(launcher)})
    job.await_events((0, 1), "entered", iteration=1, WORLD_SIZE="2")
    assert job.await_end(3) == 1 and job.await_event(3, "raised")["kind"] == "RankDiscarded"
    if told:
        launcher.write_text('{"v": 1, "cycle": 0, "ranks": [3], "why": "it has exited"}\n')
    reason = "iteration 1: rank 3 is gone: " + ("launcher: it has exited" if told else "no heartbeat")
    until(lambda: reason in log(tmp_path, 0) + log(tmp_path, 1), "its end is noticed")
    (tmp_path / "go").touch()
    job.all_return((0, 1))
    for rank in (0, 1):
        assert [event["iteration"] for event in job.of(rank, "entered")] == [0, 1]


@pytest.mark.parametrize("first, file_store", [("rank", False), ("monitor", True)])
def test_a_host_that_comes_back_when_the_others_have_gone_on(job, tmp_path, first, file_store):
    """The keys that it waits for have been deleted; a server has told it before, a file cannot."""
    times = {**QUICK, "heartbeat_timeout": 1.0}
    train(job, 3, {}, *[{0: "raise"}] * 3, gone=1, last="go", times=times, file_store=file_store)
    job.await_events(range(3), "entered")
    host = [job.pids[2], monitor(tmp_path, 2)]
    signal_all(host, signal.SIGSTOP)
    job.await_events(range(2), "entered", iteration=4, WORLD_SIZE="2")
    signal_all(host if first == "rank" else reversed(host), signal.SIGCONT)
    if file_store:
        assert job.await_end(2) in (1, -signal.SIGKILL)
    else:
        assert job.await_event(2, "raised")["kind"] in ("RankDiscarded", "StoreLost")
    (tmp_path / "go").touch()
    all_return(job, range(2), 4)


@pytest.mark.parametrize(
    "where, active, signum",
    [
        ("in the function", 2, signal.SIGSTOP),  # and on a reserve
        ("when a rank asks the store something", 3, signal.SIGSTOP),
        ("at the barrier", 3, signal.SIGKILL),
    ],
)
def test_the_store_is_lost(job, tmp_path, where, active, signum):
    """Its host is silent, and no connection breaks; or its process ends, and rank 0 learns of that, too."""
    meets, silent = where == "at the barrier", signum == signal.SIGSTOP
    slow = {"plugin": SLOW} if meets else {}
    train(job, 3, {1: "on file"}, plugins=True, active=active, meet=False, times=TIMES, **slow)
    job.await_events(range(active), "entered")
    job.await_events(range(3), "initialize")  # a reserve has entered, too: at entry longer bounds apply
    if meets:
        (tmp_path / "fault").touch()
        job.await_events(range(3), "finalize")
    host = [monitor(tmp_path, 0), *[job.pids[0]] * silent]
    signal_all(host, signum)
    (tmp_path / "go").touch()
    if where == "when a rank asks the store something":
        (tmp_path / "fault").touch()
        job.await_event(1, "fault")
    lost = (1, 2) if silent else (0, 1, 2)
    job.await_events(lost, "raised")
    if silent:
        assert all("is lost" in job.err(rank).read_text() for rank in lost)
        signal_all(host, signal.SIGKILL)
    all_fail(job, lost, "StoreLost: ", f"127.0.0.1:{job.port}")


@pytest.mark.parametrize("signum", [signal.SIGSTOP, signal.SIGKILL])
def test_a_rank_without_its_monitor_process_leaves(job, signum):
    """The others go on without it. It may learn that from them when its monitor process is stopped, not dead."""
    train(job, 3, {}, times=TIMES)
    os.kill(monitors_of(job, 3)[2], signum)
    late = ["RankDiscarded"] if signum == signal.SIGSTOP else []
    assert job.await_event(2, "raised")["kind"] in ["StoreLost", *late]
    all_return(job, range(2))


def test_the_barrier_server_dies(job, tmp_path):
    """With rank 0, as a host does, while rank 1 is at the barrier and rank 2 is not: one of them takes over."""
    train(job, 3, {1: "raise"}, plugins=True, plugin=SLOW, times=TIMES_OF_A_BARRIER, file_store=True)
    job.await_events(range(3), "finalize")
    signal_all([monitor(tmp_path, 0), job.pids[0]], signal.SIGKILL)
    (tmp_path / "go").touch()
    all_return(job, range(1, 3))
    assert any("this rank serves the barrier" in job.err(rank).read_text() for rank in (1, 2))


def test_ranks_that_never_come_are_named(job):
    job.start("train", 5, ranks=[0, 1, 3], times={**TIMES_OF_A_BARRIER, "barrier_timeout": 4.0})
    all_fail(job, (0, 1, 3), "BarrierTimeout: ", "ranks 2 4 did not")


def test_a_rank_0_that_never_comes_is_named(job):
    job.start("train", 2, ranks=[1], store_timeout=0.5)
    all_fail(job, [1], f"127.0.0.1:{job.port} (MASTER_ADDR")


def test_a_server_outside_is_silent_while_ranks_enter(job):
    """The kernel accepts connections."""
    job.start_rank("serve", 9, 0)
    job.await_event(9, "serving")
    job.kill(9, signal.SIGSTOP)
    train(job, 2, {}, times=TIMES, store_timeout=1.0)
    job.await_events(range(2), "raised")
    job.kill(9)
    all_fail(job, range(2), "StoreLost: the store cannot be reached", f"127.0.0.1:{job.port}")


def test_two_processes_with_one_rank(job):
    """The second is refused, and does not harm the first."""
    train(job, 2, {})
    job.await_events([0, 1], "entered")
    job.start_rank("train", 1, 2)
    assert "RANK=1" in job.await_event(1, "raised")["chain"][0]
    assert job.await_end(1) == 1
    assert [event["iteration"] for event in job.of(0, "entered")] == [0]


def test_what_keeps_a_call_from_beginning_is_told(job):
    job.start("refused", 1)
    assert job.await_all() == {0: 0}
    chains = [event["chain"][0] for event in job.of(0, "raised")]
    assert "FileNotFoundError" in chains[0] and r"ValueError: bad \udce4 name" in chains[1]
    assert "MASTER_ADDR is not set" in chains[2]
    job.await_nothing_left()
