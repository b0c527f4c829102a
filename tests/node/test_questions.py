"""What the coordinator asks for: the checkpoint iteration file, and how long the job has; nothing holds up the loop."""

import asyncio
import threading
import time

import pytest
from waits import WAIT_S

from nvrx_slurm.node.coordination import questions
from nvrx_slurm.node.coordination.questions import AllocationClock, ProgressFile
from nvrx_slurm.slurm.api.cli import Slurm
from nvrx_slurm.slurm.control import Control

pytestmark = pytest.mark.process


async def one(file):
    return await asyncio.wait_for(file.read(), WAIT_S)


def reads(path, count=1, before=str):
    """The results of `count` reads, `before(number)` each, and the ends of the sentences about them."""
    said = []

    async def story():
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


def test_one_integer_is_an_iteration_and_anything_else_is_said_once(tmp_path):
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


def test_a_repaired_file_counts_and_each_new_reason_is_said(tmp_path):
    path, contents = tmp_path / "latest", (None, "x", "5", "y", "6")
    found, said = reads(path, 5, lambda number: contents[number] and path.write_text(contents[number]))
    assert (found, len(said)) == ([None, None, 5, None, 6], 3)  # missing, "x", "y"


def test_a_file_system_that_hangs_costs_one_thread_and_no_time(monkeypatch):
    said, answers, waiting = [], threading.Event(), []

    def read(path):
        waiting.append(path)
        answers.wait(WAIT_S)
        return b"7"

    async def story():
        file = ProgressFile("/dead/latest", said.append)
        assert [await one(file) for _ in range(5)] == [None] * 5 and len(waiting) == 1
        (stuck,) = (thread for thread in threading.enumerate() if thread.name == "its file system")
        assert stuck.daemon  # it must not delay the program's end
        answers.set()
        stuck.join(WAIT_S)
        assert await one(file) == 7

    monkeypatch.setattr(questions, "_read", read)
    monkeypatch.setattr(questions, "READ_TIMEOUT_S", 0.05)
    asyncio.run(story())
    assert len(said) == 1 and "not return within" in said[0]


SAYS = "says() { echo JobId=7 JobState=RUNNING ExitCode=0:0 RunTime=00:00:00 TimeLimit=$1; }"


def fake_scontrol(folder, monkeypatch, text):
    tool = folder / "scontrol"
    tool.write_text(f"#!/bin/sh\necho asked >> {folder}/asked\n{SAYS}\n{text}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


def count(folder):
    return len((folder / "asked").read_text().splitlines()) if (folder / "asked").exists() else 0


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(questions, "_RETRY_S", 0.0)


def answers(job_id, times, control=None):
    async def story():
        clock = AllocationClock(control or Control("cli"), job_id)
        return [await asyncio.wait_for(clock.left_s(), 20.0) for _ in range(times)]

    return asyncio.run(story())


def test_the_environment_is_believed_once(tmp_path, monkeypatch):
    fake_scontrol(tmp_path, monkeypatch, "says 00:01:40")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    first, second, third = answers(7, 3)
    assert first is not None and 900 < first <= 1000
    assert (second, third) == (100.0, 100.0)
    assert count(tmp_path) == 2


@pytest.mark.parametrize(
    "job_id, script, times, found, asked",
    [
        (7, "says UNLIMITED", 2, [None, questions._NO_LIMIT_S], 2),  # no limit, which replaces an old one
        (7, "test -e {0}/again && says 00:02:00; touch {0}/again", 1, [120.0], 2),
        (7, "exec sleep 1000", 1, [None], 1),  # one that does not answer is not asked again at once
        (None, "says 00:02:00", 2, [None, None], 0),
    ],
    ids=["no limit", "asked twice", "hangs", "outside Slurm"],
)
def test_slurm_tells(tmp_path, monkeypatch, job_id, script, times, found, asked):
    fake_scontrol(tmp_path, monkeypatch, script.format(tmp_path))
    control = Control("cli")
    assert isinstance(control.slurm, Slurm)
    control.slurm.tools.timeout_s = 0.5 if "sleep" in script else 10.0
    assert answers(job_id, times, control) == found
    assert count(tmp_path) == asked
