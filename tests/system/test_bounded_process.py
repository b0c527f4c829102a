"""The engine for bounded work in child processes, with commands and functions that misbehave in each way."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from nvrx_slurm.child import bounded_process, processes
from nvrx_slurm.child.bounded_process import Ended

pytestmark = pytest.mark.fast


BOUND_S = 60.0
ENV = {"PATH": "/usr/bin:/bin"}
FOREVER = "while :; do sleep 60; done"


def alive(pid):
    """Whether `pid` runs; zombies do not."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def ends(pid):
    until_s = time.monotonic() + BOUND_S
    while alive(pid) and time.monotonic() < until_s:
        os.sched_yield()
    return not alive(pid)


@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize(
    "script, options, expected",
    [
        ("echo out; echo err >&2; exit 3", {}, Ended(3, b"out\n", b"err\n")),
        ("kill -9 $$", {}, Ended(-9, b"", b"")),
        ("cat", {}, Ended(0, b"", b"")),
        ("printf 0123456789", {"limit": 4}, Ended(0, b"0123", b"", truncated=True)),
        ("printf 0123456789", {"limit": 4, "last": True}, Ended(0, b"6789", b"", truncated=True)),
        ("head -c 300000 /dev/zero; echo end", {"limit": 4, "last": True}, Ended(0, b"end\n", b"", truncated=True)),
        ("sleep 60 & echo done", {}, Ended(0, b"done\n", b"")),
    ],
)
def test_how_a_command_ends(script, dies, options, expected):
    assert bounded_process.run(["/bin/sh", "-c", script], ENV, BOUND_S, dies_with_parent=dies, **options) == expected


def test_a_command_is_killed_with_all_below_it_at_its_deadline():
    started_s = time.monotonic()
    script = f"trap '' TERM; sleep 600 & echo $!; setsid sh -c 'echo $$; exec sleep 600' & {FOREVER}"
    ended = bounded_process.run(["/bin/sh", "-c", script], ENV, 0.5)
    assert time.monotonic() - started_s < BOUND_S / 2
    assert (ended.code, ended.blocked) == (None, 0)
    below = [int(pid) for pid in ended.stdout.split()]
    assert len(below) == 2 and all(ends(pid) for pid in below)


def test_no_descriptor_is_left():
    before = os.listdir("/proc/self/fd")
    bounded_process.run(["/bin/echo"], ENV, BOUND_S)
    bounded_process.run(["/bin/sleep", "60"], ENV, 0.1)
    assert bounded_process.run(["/no/such"], ENV, BOUND_S).code == 127
    with pytest.raises(FileNotFoundError):
        bounded_process.run(["/no/such"], ENV, BOUND_S, dies_with_parent=False)
    assert os.listdir("/proc/self/fd") == before


def forever(pipe):
    os.write(pipe, b"begun")
    threading.Event().wait()


def test_a_forked_function_answers_through_its_pipe(monkeypatch):
    monkeypatch.setattr(bounded_process, "REAP_S", BOUND_S)  # this process is large, and ends slowly on a busy machine
    assert bounded_process.fork(lambda pipe: os.write(pipe, b"42"), BOUND_S).finish() == Ended(0, b"42", b"")
    assert bounded_process.fork(lambda pipe: 1 // 0, BOUND_S).finish().code == 1
    assert bounded_process.fork(lambda pipe: os._exit(7), BOUND_S).finish().code == 7
    child = bounded_process.fork(forever, 1.0)
    assert child.pid in processes.own_pids(), "no orphan, which an agent would kill"
    assert child.finish() == Ended(None, b"begun", b"") and child.pid not in processes.own_pids()


def test_a_forked_function_may_be_ended_by_signals_that_its_parent_ignores():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        child = bounded_process.fork(forever, BOUND_S)
        bounded_process.wait([child.stdout.fd], time.monotonic() + BOUND_S)  # its handlers are reset by then
        os.killpg(child.pid, signal.SIGTERM)
        assert child.finish().code == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_forked_function_ends_itself_when_its_parent_is_gone(monkeypatch):
    monkeypatch.setattr(bounded_process, "_ALARM_S", 0.1)
    child = bounded_process.fork(forever, 0.1)
    child.until_s = time.monotonic() + BOUND_S  # nobody kills it
    assert child.finish().code == -signal.SIGALRM


def test_a_child_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(bounded_process, "REAP_S", 0.3)
    monkeypatch.setattr(bounded_process, "kill_tree", lambda root, parent: None)
    monkeypatch.setattr(os, "killpg", lambda pid, signum: None)
    monkeypatch.setattr(os, "kill", lambda pid, signum: None)
    child = bounded_process.fork(forever, 0.1)
    started_s = time.monotonic()
    ended = child.finish()
    assert (ended.code, ended.blocked) == (None, child.pid)
    assert time.monotonic() - started_s < BOUND_S / 2
    monkeypatch.undo()
    os.kill(child.pid, signal.SIGKILL)
    assert os.waitpid(child.pid, 0)[1] == signal.SIGKILL
