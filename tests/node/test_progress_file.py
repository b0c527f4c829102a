"""The checkpoint iteration file: what counts as an iteration, what is said otherwise, a file system that hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from agent_harness import WAIT_S

from nvrx_slurm.node.coordination import progress_file
from nvrx_slurm.node.coordination.progress_file import ProgressFile


async def one(file: ProgressFile) -> int | None:
    return await asyncio.wait_for(file.read(), WAIT_S)


def reads(path: object, count: int = 1, before: Callable[[int], object] = str) -> tuple[list[int | None], list[str]]:
    """The results of `count` reads, `before(number)` each, and the ends of the sentences about them."""
    said: list[str] = []

    async def story() -> list[int | None]:
        file, found = ProgressFile(str(path), said.append), []
        for number in range(count):
            before(number)
            found.append(await one(file))
        return found

    found = asyncio.run(story())
    begin = f"progress is not counted: the checkpoint iteration file {path} cannot be used: "
    assert all(sentence.startswith(begin) for sentence in said)
    return found, [sentence[len(begin) :] for sentence in said]


GOOD = [(b"0", 0), (b" \t0042 \n\n", 42), (b"7" + b" " * 4095, 7)]
BAD = [
    (b" \n", "''"), (b"-1", "'-1'"), (b"1.5", "'1.5'"), (b"\xff\xfe1\x00", r"'\\xff\\xfe1\x00'"),
    ("\u0663".encode(), r"'\\xd9\\xa3'"),  # a digit, but not ASCII
    (b"100200300400500600700", "'100200300400500600700'"),  # a script appends instead of writing anew
    (b"x" * 100, f"'{'x' * 40}'"), (b"7" + b" " * 10_000_000, "at most 4096 bytes, not '7'"),
]  # fmt: skip


def test_one_integer_is_an_iteration_and_anything_else_is_said_once(tmp_path: Path) -> None:
    for content, iteration in GOOD:
        (tmp_path / "latest").write_bytes(content)
        assert reads(tmp_path / "latest") == ([iteration], [])
    for content, why in BAD:
        (tmp_path / "latest").write_bytes(content)
        found, said = reads(tmp_path / "latest", 3)
        assert (found, len(said)) == ([None] * 3, 1) and said[0].endswith(why), said[:40]
    for name, why in (
        ("missing", "No such file"),
        (".", "a directory"),
        ("/dev/zero", "4096 bytes"),
        ("na\0me", "null"),
    ):
        found, said = reads(tmp_path / name, 2)
        assert (found, len(said)) == ([None, None], 1) and why in said[0]


def test_a_repaired_file_counts_and_each_new_reason_is_said(tmp_path: Path) -> None:
    path, contents = tmp_path / "latest", (None, "x", "5", "y", "6")
    found, said = reads(path, 5, lambda number: contents[number] and path.write_text(contents[number]))
    assert (found, len(said)) == ([None, None, 5, None, 6], 3)  # missing, "x", "y"


def test_a_file_system_that_hangs_costs_one_thread_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    said, answers, waiting = list[str](), threading.Event(), list[str]()

    def read(path: str) -> bytes:
        waiting.append(path)
        answers.wait(WAIT_S)
        return b"7"

    async def story() -> None:
        file = ProgressFile("/dead/latest", said.append)
        assert [await one(file) for _ in range(5)] == [None] * 5 and len(waiting) == 1
        (stuck,) = (thread for thread in threading.enumerate() if thread.name == "progress file")
        assert stuck.daemon  # it must not delay the program's end
        answers.set()
        stuck.join(WAIT_S)
        assert await one(file) == 7

    monkeypatch.setattr(progress_file, "_read", read)
    monkeypatch.setattr(progress_file, "READ_TIMEOUT_S", 0.05)
    asyncio.run(story())
    assert len(said) == 1 and "not answer within" in said[0]
