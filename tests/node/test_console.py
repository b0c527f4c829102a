"""The console's thread: fair between sentences and chatty ranks, useful without inotify, readable."""

import errno
import json
import os
import re
import threading

import pytest
from waits import WAIT_S

from nvrx_slurm.node.output import console
from nvrx_slurm.node.output.console import Console
from nvrx_slurm.system.inotify import Inotify

pytestmark = pytest.mark.process


US = re.compile(rb"^\d\d:\d\d:\d\d \+\d+\.\ds us: ", re.MULTILINE)


class Screen:
    """Takes what a console writes instead of descriptors 1 and 2; `before(fd, data)` may hold a write up."""

    def __init__(self):
        self.text = b""
        self.before = lambda fd, data: None
        self._news = threading.Condition()

    def write(self, fd, data):
        self.before(fd, data)
        with self._news:
            self.text += data
            self._news.notify_all()

    def until(self, wanted):
        with self._news:
            assert self._news.wait_for(lambda: wanted.encode() in self.text, WAIT_S), (wanted, self.text[-2000:])

    @property
    def lines(self):
        """Complete lines, the heads of sentences shortened."""
        return US.sub(b"us: ", self.text).decode().splitlines()


@pytest.fixture
def screen(monkeypatch):
    screen = Screen()
    monkeypatch.setattr(console, "_write", screen.write)
    return screen


@pytest.fixture
def us(screen):
    """A console."""
    made = Console("us")
    yield made
    made.finish(WAIT_S)
    assert not made._thread.is_alive()


def new(path, text=""):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def append(path, text):
    with path.open("a") as file:
        file.write(text)


def test_sentences_have_the_time_and_files_begin_where_told(us, screen, tmp_path):
    us.follow(new(tmp_path / "rank_0.out", "old\nnew\n"), "[0] ", 1, start=4)
    us.follow(tmp_path / "gone", "[1] ", 1)
    us.say("two\nlines")
    us.finish(WAIT_S)
    assert "[0] new" in screen.lines and "[0] old" not in screen.lines
    assert f"us: cannot follow {tmp_path}/gone: No such file or directory" in screen.lines
    assert screen.lines.index("us: lines") == screen.lines.index("us: two") + 1


@pytest.mark.parametrize("number, method", [("EMFILE", "__init__"), ("ENOSPC", "watch")])
def test_without_inotify_the_files_are_looked_at(us, screen, tmp_path, monkeypatch, number, method):
    def fail(*_):
        raise OSError(getattr(errno, number), os.strerror(getattr(errno, number)))

    monkeypatch.setattr(Inotify, method, fail)
    path = new(tmp_path / "rank_0.out")
    us.follow(path, "[0] ", 1)
    screen.until("no inotify here (")
    append(path, "hello\n")
    screen.until("[0] hello")
    assert screen.text.count(b"no inotify") == 1


def test_an_overflow_of_the_kernels_queue_loses_no_line(us, screen, tmp_path, monkeypatch):
    real = Inotify.wait
    monkeypatch.setattr(Inotify, "wait", lambda self: real(self) and {""})  # what IN_Q_OVERFLOW looks like
    path = new(tmp_path / "rank_0.out", "first\n")
    us.follow(path, "[0] ", 1)
    screen.until("[0] first")
    append(path, "hello\n")
    screen.until("[0] hello")


def test_sentences_do_not_wait_for_a_chatty_rank(screen, tmp_path):
    """A sentence is printed after at most two pieces of a long file, and before the rest of it at the end."""
    steps, us = threading.Semaphore(1), Console("us")
    screen.before = lambda fd, data: fd == 2 or steps.acquire(timeout=WAIT_S)
    us.follow(new(tmp_path / "rank_0.out", ("x" * 99 + "\n") * 10_000), "[0] ", 1)
    screen.until("[0] xxx")
    us.say("the first cause")
    steps.release(2)
    screen.until("us: the first cause")
    assert len(screen.text) < 100_000
    us.say("the last sentence")
    us._finishing, us._cut_off_s = True, float("inf")
    steps.release(1000)
    us.finish(WAIT_S)
    assert len(screen.text) > 1_000_000 and screen.text.index(b"the last sentence") < 200_000


def test_a_backlog_that_is_cut_off_is_said(screen, tmp_path):
    us = Console("us")

    def slow(fd, data):
        if fd == 1:
            us._cut_off_s = 0.0  # this piece has taken all the time there was

    screen.before = slow
    us._finishing, us._cut_off_s = True, float("inf")
    us.follow(new(tmp_path / "rank_0.out", ("x" * 99 + "\n") * 10_000), "[0] ", 1)
    us._thread.join(WAIT_S)
    *_, last = screen.lines
    assert re.fullmatch(rf"us: \.\.\. \d+ bytes more in {tmp_path}/rank_0.out", last)
    printed = sum(len(line) - 3 for line in screen.lines if line.startswith("[0] "))  # less prefix, plus newline
    assert printed + int(last.split()[2]) == 1_000_000


def test_directories_of_earlier_cycles_are_let_go(us, screen, tmp_path):
    for cycle in range(30):
        for rank in (cycle, cycle + 1):
            path = new(tmp_path / f"cycle_{cycle}" / f"rank_{rank}.out")
            us.follow(path, f"[{rank}] ", 1)
            append(path, f"cycle {cycle}\nno newline")
    screen.until("[30] cycle 29\n")
    us.finish(WAIT_S)
    assert len(us._followed) == 2
    for rank in range(31):
        got = [line for line in screen.lines if line.startswith(f"[{rank}] ")]
        cycles = [cycle for cycle in (rank - 1, rank) if 0 <= cycle < 30]
        assert got == [f"[{rank}] {what}" for c in cycles for what in (f"cycle {c}", "no newline")]


def test_a_terminal_has_colours_and_a_last_line(tmp_path, monkeypatch):
    """The last line tells what the job does, and gives way to each line that is printed."""
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    screen = Screen()
    monkeypatch.setattr(console, "_write", screen.write)
    waits = {"why": "missing: n9\x1b[2J", "until": None}
    found = {"state": "waiting", "since": 0, "written": 2e10, "interval_s": 5, "cycle": -1, "end": None, "waits": waits}
    us = Console("us")
    us.draw(new(tmp_path / "status.json", json.dumps(found)))
    screen.until("missing: n9\\x1b[2J")
    us.follow(new(tmp_path / "rank_0.out", "hello\n"), "[rank 0] ", 1)
    screen.until("hello\n")
    us.say("end")
    us.finish(WAIT_S)
    drawn = screen.text.index(b"missing")
    assert drawn < screen.text.index(b"\r\x1b[K\x1b[32m[rank 0]\x1b[0m hello")
    assert re.search(rb"\x1b\[1m[\d:]+ \+[\d.]+s us:\x1b\[0m end\n", screen.text)


def test_torchs_own_prefix_is_not_repeated(us, screen, tmp_path):
    us.follow(new(tmp_path / "rank_0.err", "[rank0]: Traceback (most recent call last):\n"), "[rank 0] ", 2)
    us.finish(WAIT_S)
    assert screen.lines == ["[rank 0] Traceback (most recent call last):"]
