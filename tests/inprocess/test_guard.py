"""Parts of a rank's monitoring, each by itself: heartbeats, deadlines, the watchdog, the thread, the fork."""

import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks_harness import Script
from waits import WAIT_S

from nvrx_slurm.core.inprocess.deadlines import Action, Deadlines, Observation
from nvrx_slurm.inprocess.guard import call_page, store_link
from nvrx_slurm.inprocess.guard.call_page import AUTO, MANUAL, WAITING, WATCHED, CallPage
from nvrx_slurm.inprocess.guard.launcher import LauncherFile
from nvrx_slurm.inprocess.guard.monitor_thread import JobResult, MonitorThread
from nvrx_slurm.inprocess.guard.store_link import Heartbeats
from nvrx_slurm.inprocess.store.stores import StoreView

pytestmark = pytest.mark.process


# Heartbeats: by the reader's own clock, which only the test moves.
ALL = set(range(8))


@pytest.mark.parametrize(
    "story",  # seconds that pass, the dead, the dead that are known, and the silent ranks that are found then
    [
        [(30, {1}, (), set()), (1, {1}, (), {1})],  # for the timeout
        [(31, {1, 2, 3, 4}, (), {1}), (4, {1, 2, 3, 4}, (), {1, 2, 3, 4})],  # the others of a lost host follow soon
        [(29, {1}, (), set()), (1, set(), (), set()), (29, {1}, (), set())],  # slow, and not lost
        [(3600, ALL, (), set()), (29, {1}, (), set()), (2, {1}, (), {1})],  # the observer was suspended
        [(40, {1, 2}, {1}, {2})],  # the known ones are passed over
    ],
)
def test_a_rank_is_silent_for_the_timeout(monkeypatch, story):
    """Of eight ranks that beat once a second rank 0 watches; when ALL are silent, it does not check."""
    now_s, found = 1000.0, {}
    monkeypatch.setattr(store_link.time, "monotonic", lambda: now_s)
    view = StoreView(dist.HashStore(), "p/")
    ranks = [Heartbeats(view, rank, 8, 1.0, 30.0) for rank in ALL]
    for seconds, dead, known, silent in [(5, set(), (), set()), *story]:
        step_s = seconds if dead == ALL else 1
        for _ in range(seconds // step_s):
            now_s += step_s
            for rank, one in enumerate(ranks):
                if rank not in dead:
                    one.beat()
            found = ranks[0].silent(known)
        assert found.keys() == silent


def test_all_heartbeats_are_read_in_one_request(monkeypatch):
    """One request per rank would take longer than an interval in a large job, and no silent rank would be found."""
    now_s, asked = 1000.0, []
    monkeypatch.setattr(store_link.time, "monotonic", lambda: now_s)
    view = StoreView(dist.HashStore(), "p/")
    multi_get = view.multi_get
    monkeypatch.setattr(view, "get", None)
    monkeypatch.setattr(view, "compare_set", None)
    monkeypatch.setattr(view, "multi_get", lambda keys: asked.append(len(keys)) or multi_get(keys))
    ranks = [Heartbeats(view, rank, 64, 1.0, 30.0) for rank in range(64)]
    for one in ranks:
        one.beat()
    for _ in range(40):
        now_s += 1
        silent = ranks[0].silent(())
    assert len(silent) == 63 and max(asked) == 63 and len(asked) < 50


@pytest.mark.parametrize(
    "seen, action, again_s",
    [
        (Observation(95.0, True, None), Action.NONE, 101.0),  # the soft timeout
        (Observation(94.0, True, None), Action.INTERRUPT, 100.0),
        (Observation(94.0, False, None), Action.NONE, 103.0),  # the hard timeout
        (Observation(91.0, True, None), Action.KILL, 100.0),
        (Observation(91.0, True, None, resumed_s=98.0), Action.NONE, 104.0),  # this process was suspended
        (Observation(99.0, False, 89.0), Action.NONE, 101.0),  # the way to the next iteration
        (Observation(99.0, False, 88.0), Action.KILL, 100.0),
        (Observation(None, True, 88.0), Action.KILL, 100.0),
        (Observation(None, False, None), Action.NONE, 106.0),  # a limit may begin to run just after the check
    ],
)
def test_deadlines(seen, action, again_s):
    """Soft timeout 6 s, hard timeout 9 s, restart 12 s; it is 100 s."""
    found, when_s, why = Deadlines(6.0, 9.0, 12.0).judge(seen, 100.0)
    assert (found, when_s) == (action, again_s)
    assert action is Action.NONE or "no progress" in why or "next iteration" in why


def test_a_counter_that_stands_still(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(call_page.time, "monotonic", lambda: now[0])
    stall = call_page.Stall(1.0)
    assert [stall.seconds(7) for now[0] in (1000.0, 1001.0, 1003.5)] == [0.0, 1.0, 3.5]
    assert [stall.seconds(8) for now[0] in (1004.0, 1005.0)] == [0.0, 1.0]
    assert [stall.seconds(8) for now[0] in (2000.0, 2001.0)] == [0.0, 1.0], "this process was suspended"


def test_the_watchdog_survives_a_check_that_fails():
    """Without its signs of life the rank would be killed."""
    shared, twice, checked = CallPage(), threading.Event(), set()

    def check():
        checked.add(shared.words[AUTO])
        if len(checked) > 1:
            twice.set()
        raise OSError("no process can be made")

    watchdog = call_page.ProgressWatchdog(shared, 0.01, (check,))
    shared.words[WAITING] = 1
    watchdog.start()
    try:
        assert twice.wait(WAIT_S)
    finally:
        watchdog.stop()
    assert not watchdog.is_alive()


def test_progress_is_what_was_seen_last_by_every_active_method():
    words = (shared := CallPage()).words
    words[AUTO], words[MANUAL] = 9, 5
    assert shared.progress_ns() == 9, "pings count in the function only"
    words[WATCHED] = 1
    assert shared.progress_ns() == 5
    words[WAITING] = 1
    assert shared.progress_ns() == 9


def test_a_launcher_file_is_read_on_from_where_it_was(monkeypatch, tmp_path):
    path = tmp_path / "launcher"
    launcher = LauncherFile(str(path), 3)
    assert launcher.read() == [] and launcher.fd is not None
    path.write_bytes(b'{"v": 1, "cycle": 3, "ranks": [4, 5], "why": "gone"}\n{"v": 1, "cyc')
    assert [record.rank for record in launcher.read()] == [4, 5]
    with path.open("ab") as file:
        file.write(b'le": 3, "ranks": [6]}\n{"v": 2, "ranks": [1]}\n{"v": 1, "cycle": 9, "ranks": [1]}\n[]\nx\n')
    assert [record.rank for record in launcher.read()] == [6]
    assert launcher.read() == []
    monkeypatch.setattr("nvrx_slurm.inprocess.guard.launcher._MAX_READ_BYTES", 64)  # the file is longer by now
    with path.open("ab") as file:
        file.write(b'{"v": 1, "cycle": 3, "ranks": [7]}\n')
    assert [record.rank for record in launcher.read()] == [7]


def test_an_answer_can_be_taken_again():
    """After the exception of a signal handler that came just after the take; and it is no other job's answer."""
    thread = MonitorThread(CallPage())
    thread.start()
    try:
        asked, failed = thread.ask(lambda: 42), thread.ask(lambda: 1 // 0)
        for _ in range(2):
            assert thread.answer(asked, WAIT_S) == 42
            with pytest.raises(ZeroDivisionError):
                thread.answer(failed, WAIT_S)
        thread.ask(lambda: "first")
        assert thread.call(lambda: "second", WAIT_S) == "second"
    finally:
        thread.stop()


def test_a_signal_that_another_thread_received_ends_the_wait():
    """The signal does not interrupt the system call of the main thread, which must check by itself."""
    main = Path(f"/proc/self/task/{threading.main_thread().native_id}/wchan")
    deadline_s = time.monotonic() + WAIT_S

    def receive():
        while "futex" not in main.read_text():
            assert time.monotonic() < deadline_s, "the main thread never blocked"
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    def handler(*_):
        raise KeyError("handled")

    before = signal.signal(signal.SIGUSR1, handler)
    receiver = threading.Thread(target=receive)
    receiver.start()
    try:
        with pytest.raises(KeyError):
            JobResult().take(WAIT_S)
        assert time.monotonic() < deadline_s
    finally:
        signal.signal(signal.SIGUSR1, before)
        receiver.join()


FORKS = """
import logging, os, sys
from nvrx_slurm.inprocess.guard import monitor_process
events = os.eventfd(0)
for name in ("nvrx_slurm.inprocess", "nvrx_slurm.inprocess.barriers", None):
    logging.getLogger(name).addHandler(logging.FileHandler("of the user"))
if (pid := os.fork()) == 0:
    monitor_process._disconnect_all_but(())
    monitor_process.log_to("ours")
    logging.getLogger("nvrx_slurm.inprocess.barriers").warning("a word")
    logging.getLogger("another").warning("lost")
    os.eventfd_write(events, 1)
    os._exit(os.eventfd_read(events))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_forked_process_writes_to_no_file_of_its_parent_but_has_its_events(zygote, tmp_path):
    """A number may belong to its own log file or a connection by then; gRPC aborts without its eventfd."""
    (tmp_path / "program.py").write_text(FORKS)
    program = Script(zygote, [str(tmp_path / "program.py")], {}, tmp_path / "err")
    said = program.communicate(WAIT_S)
    assert program.returncode == 1, said
    program.close()
    assert (tmp_path / "ours").read_text().count("a word\n") == 1
    assert (tmp_path / "of the user").read_text() == ""
