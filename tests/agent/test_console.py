"""The console's thread: fair between our sentences and chatty ranks, and useful where inotify is not to be had."""

from __future__ import annotations

import errno
import fcntl
import os
import select
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from agent_harness import REPO, WAIT_S

F_SETPIPE_SZ = 1031


class Program:
    """A process that has a console `c` and reads its next step from stdin; we read its output, or do not."""

    def __init__(self, code: str, directory: Path) -> None:
        head = f"""
            import errno, os, sys
            sys.path.insert(0, {str(REPO)!r})
            from pathlib import Path
            from nvrx_slurm.agent import console
            from nvrx_slurm.system.inotify import Inotify
            here = Path({str(directory)!r})
            c = console.Console("us")
            def new(name, text=""):
                path = here / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
                return path
        """
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert self.process.stdout is not None
        self.out = self.process.stdout.fileno()
        fcntl.fcntl(self.out, F_SETPIPE_SZ, 4096)
        self.text = ""

    def until(self, wanted: str) -> str:
        """Read until `wanted` was printed; all that was printed."""
        deadline_s = time.monotonic() + WAIT_S
        while wanted not in self.text:
            ready, _, _ = select.select([self.out], [], [], max(0.0, deadline_s - time.monotonic()))
            chunk = os.read(self.out, 4096) if ready else b""
            assert chunk, f"no {wanted!r} in {self.text[-2000:]}"
            self.text += chunk.decode()
        return self.text

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def end(self) -> str:
        rest, _ = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0
        self.text += rest.decode()
        return self.text


FAIL = "def fail(*_): raise OSError(errno.{0}, os.strerror(errno.{0}))\nInotify.{1} = fail\n"


@pytest.mark.parametrize(("number", "method"), [("EMFILE", "__init__"), ("ENOSPC", "watch")])
def test_without_inotify_the_files_are_looked_at(tmp_path: Path, number: str, method: str) -> None:
    code = """
c.start()
path = new("a/rank_0.out")
c.follow(path, "[0] ", 1)
c.say("following")
sys.stdin.readline()
path.write_text("hello\\n")
sys.stdin.readline()
c.finish(5)
"""
    one = Program(FAIL.format(number, method) + code, tmp_path)
    one.until("us: following")
    one.tell()
    one.until("[0] hello")
    one.tell()
    text = one.end()
    assert text.count("us: no inotify here (") == 1 and os.strerror(getattr(errno, number)) in text


def test_sentences_get_out_whatever_breaks(tmp_path: Path) -> None:
    code = """
def broken(**_): raise RuntimeError("a defect")
c._round = broken
c.start()
c.say("first")
sys.stdin.readline()
c.say("last")
c.finish(5)
"""
    one = Program(code, tmp_path)
    one.until("a defect")
    one.tell()
    text = one.end()
    assert text.splitlines()[0] == "us: first" and text.splitlines()[-1] == "us: last"


def test_an_overflow_of_the_kernels_queue_loses_no_line(tmp_path: Path) -> None:
    code = """
real = Inotify.wait
Inotify.wait = lambda self: real(self) and {""}  # what IN_Q_OVERFLOW looks like
c.start()
path = new("a/rank_0.out")
c.follow(path, "[0] ", 1)
c.say("following")
sys.stdin.readline()
path.write_text("hello\\n")
sys.stdin.readline()
c.finish(5)
"""
    one = Program(code, tmp_path)
    one.until("us: following")
    one.tell()
    one.until("[0] hello")
    one.tell()
    one.end()


def test_sentences_do_not_wait_for_a_chatty_rank(tmp_path: Path) -> None:
    """20 MB are waiting; what we say comes after some pieces of them, and before the rest of them at the end."""
    code = """
c.start()
path = new("a/rank_0.out")
c.follow(path, "[0] ", 1)
path.write_text(("x" * 99 + "\\n") * 200_000)
c.say("begun")
sys.stdin.readline()
c.say("the first cause")
sys.stdin.readline()
c.say("the last word")
c.finish(0.8)
"""
    one = Program(code, tmp_path)
    one.until("[0] xxx")
    one.tell()
    before = len(one.text)
    assert len(one.until("us: the first cause")) - before < 1_000_000
    one.tell()
    # from here on nobody reads until the program has ended or given up waiting for its console
    one.process.wait(WAIT_S)
    assert len(one.text) < 10_000_000


def test_a_backlog_that_is_cut_off_is_said(tmp_path: Path) -> None:
    code = """
real = console._write
def slow(fd, data):
    real(fd, data)
    if fd == 1:
        import time
        while time.monotonic() < c._cut_off_s: os.sched_yield()
console._write = slow
path = new("a/rank_0.out")
c.follow(path, "[0] ", 1)
path.write_text(("x" * 99 + "\\n") * 10_000)
c.say("the last word")
c._finishing = True  # as if finish() had been faster than the thread
c._cut_off_s = console.time.monotonic() + 0.2
c.start()
c.finish(2)
"""
    text = Program(code, tmp_path).end()
    lines = text.splitlines()
    assert lines[0] == "us: the last word"
    assert lines[-1].startswith("us: ... ") and lines[-1].endswith(f" bytes more in {tmp_path}/a/rank_0.out")
    printed = sum(len(line) - 3 for line in lines if line.startswith("[0] "))  # less prefix, plus newline
    assert printed + int(lines[-1].split()[2]) == 1_000_000


def test_directories_of_earlier_cycles_are_let_go(tmp_path: Path) -> None:
    code = """
c.start()
for cycle in range(30):
    for rank in (cycle, cycle + 1):
        path = new(f"cycle_{cycle}/rank_{rank}.out")
        c.follow(path, f"[{rank}] ", 1)
        with path.open("a") as file:
            file.write(f"cycle {cycle}\\nno newline")
c.say("following")
sys.stdin.readline()
while len(c._followed) > 2:  # the thread reads the others to their ends
    os.sched_yield()
print(len(c._changes), len(c._followed), flush=True)
c.finish(5)
"""
    one = Program(code, tmp_path)
    one.until("[30] cycle 29\n")
    one.tell()
    lines = one.end().splitlines()
    assert "1 2" in lines
    for rank in range(31):
        got = [line for line in lines if line.startswith(f"[{rank}] ")]
        cycles = [cycle for cycle in (rank - 1, rank) if 0 <= cycle < 30]
        assert got == [f"[{rank}] {what}" for c in cycles for what in (f"cycle {c}", "no newline")]
