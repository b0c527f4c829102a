"""The checkpoint iteration file: what counts as an iteration, what is said of the rest, a file system that hangs."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_harness import WAIT_S

from nvrx_slurm.agent import progress_file
from nvrx_slurm.agent.progress_file import ProgressFile


def reads(path: object, count: int = 1) -> tuple[list[int | None], list[str]]:
    """What `count` reads one after the other give, and what was said."""
    said: list[str] = []

    async def story() -> list[int | None]:
        file = ProgressFile(str(path), said.append)
        return [await one(file) for _ in range(count)]

    return asyncio.run(story()), said


async def one(file: ProgressFile) -> int | None:
    loop = asyncio.get_running_loop()
    answer = loop.create_future()
    file.read(answer.set_result)
    assert not answer.done()  # never from within read()
    return await asyncio.wait_for(answer, WAIT_S)


@pytest.mark.parametrize(
    ("content", "iteration"), [(b"0", 0), (b"1200\n", 1200), (b" \t0042 \n\n", 42), (b"1" + b"0" * 15, 10**15)]
)
def test_one_integer_is_an_iteration(tmp_path: Path, content: bytes, iteration: int) -> None:
    path = tmp_path / "latest"
    path.write_bytes(content)
    (tmp_path / "link").symlink_to(path)
    assert reads(path) == ([iteration], [])
    assert reads(tmp_path / "link") == ([iteration], [])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is empty"),
        (b" \n", "it is empty"),
        (b"-1", "it must hold one integer of 0 or more, not '-1'"),
        (b"+1", "not '+1'"),
        (b"1.5", "not '1.5'"),
        (b"1_000", "not '1_000'"),
        (b"1 2", "not '1 2'"),
        (b"release\n", "not 'release'"),
        (b"\xff\xfe1\x00", r"not '\\xff\\xfe1\x00'"),
        ("\u0663".encode(), r"not '\\xd9\\xa3'"),  # a digit, but not ASCII
        (b"x" * 100, f"not '{'x' * 40}'"),
        (b"1" + b"0" * 16, f"'1{'0' * 16}' is no iteration"),
        (b"9" * 4096, f"'{'9' * 40}' is no iteration"),
        (b"0" * 4097, "it is longer than 4096 bytes"),
        (b"7" + b" " * 10_000_000, "it is longer than 4096 bytes"),
    ],
)
def test_junk_is_no_iteration_and_said_once(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "latest"
    path.write_bytes(content)
    iterations, said = reads(path, 3)
    assert iterations == [None] * 3
    assert len(said) == 1
    assert said[0].startswith(f"progress is not counted: the checkpoint iteration file {path} cannot be used: ")
    assert said[0].endswith(why)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("missing", "No such file or directory"),
        ("fifo", "it is a pipe or device"),
        ("directory", "it is a directory"),
        ("loop", "Too many levels of symbolic links"),
        ("/dev/zero", "it is a pipe or device"),
        ("na\0me", "embedded null byte"),
    ],
)
def test_what_is_no_file_is_said(tmp_path: Path, kind: str, why: str) -> None:
    path = tmp_path / kind
    if kind == "fifo":
        os.mkfifo(path)  # without a writer: who opens it plainly waits for ever
    elif kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    iterations, said = reads(path, 2)
    assert iterations == [None, None] and len(said) == 1 and said[0].endswith(why)


def test_each_reason_is_said_and_a_file_that_got_well_counts(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    said: list[str] = []

    async def story() -> list[int | None]:
        file, found = ProgressFile(str(path), said.append), []
        for content in (None, "x", "5", "y", "6"):
            if content is not None:
                path.write_text(content)
            found.append(await one(file))
        return found

    assert asyncio.run(story()) == [None, None, 5, None, 6]
    assert [line.rpartition(": ")[2] for line in said] == [
        "No such file or directory",
        "it must hold one integer of 0 or more, not 'x'",
    ]


def reader() -> threading.Thread:
    """The one thread that reads."""
    (found,) = (thread for thread in threading.enumerate() if thread.name == "progress file")
    return found


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """A file system that answers after the block only; gives how many reads wait for it."""
    answers, waiting = threading.Event(), []

    def read(path: str) -> bytes:
        waiting.append(path)
        answers.wait(WAIT_S)
        return b"7"

    monkeypatch.setattr(progress_file, "_read", read)
    monkeypatch.setattr(progress_file, "READ_TIMEOUT_S", 0.1)
    try:
        yield lambda: len(waiting)
    finally:
        answers.set()


def test_a_file_system_that_hangs_costs_one_thread_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    async def story() -> None:
        file = ProgressFile("/dead/latest", said.append)
        with hanging(monkeypatch) as waiting:
            assert await one(file) is None
            assert [await one(file) for _ in range(5)] == [None] * 5
            assert waiting() == 1
            stuck = reader()
            assert stuck.daemon  # so that it cannot hold up the program's end either
        stuck.join(WAIT_S)
        await asyncio.sleep(0)  # the loop takes the answer, that nobody waits for any more
        assert await one(file) == 7

    asyncio.run(story())
    assert [line.rpartition(": ")[2] for line in said] == [
        "its file system does not answer within 0.1 s",
        "its file system still has not answered an earlier read",
    ]


def test_an_answer_after_the_program_s_end_hurts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    escaped: list[object] = []
    monkeypatch.setattr(threading, "excepthook", escaped.append)

    async def story() -> threading.Thread:
        file = ProgressFile("/dead/latest", print)
        assert await one(file) is None
        return reader()

    with hanging(monkeypatch):
        stuck = asyncio.run(story())
    stuck.join(WAIT_S)
    assert not stuck.is_alive() and escaped == []


def test_without_a_thread_the_cycle_is_not_scored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        iterations, said = reads(tmp_path / "latest")
    assert iterations == [None] and said[0].endswith("cannot be used: can't start new thread")
