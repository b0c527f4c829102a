"""How long the job has: from the environment once, from Slurm later, never holding up the loop."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from nvrx_slurm.node.coordination import time_left
from nvrx_slurm.node.coordination.time_left import AllocationClock
from nvrx_slurm.slurm.api.cli import CommandLine
from nvrx_slurm.slurm.control import Control

SAYS = "says() { echo JobId=7 JobState=RUNNING ExitCode=0:0 RunTime=00:00:00 TimeLimit=$1; }"


def fake_scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    tool = folder / "scontrol"
    tool.write_text(f"#!/bin/sh\necho asked >> {folder}/asked\n{SAYS}\n{text}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


def count(folder: Path) -> int:
    return len((folder / "asked").read_text().splitlines()) if (folder / "asked").exists() else 0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_left, "_RETRY_S", 0.0)


def answers(job_id: int | None, times: int, control: Control | None = None) -> list[float | None]:
    async def story() -> list[float | None]:
        clock = AllocationClock(control or Control("cli"), job_id)
        return [await asyncio.wait_for(clock.left_s(), 20.0) for _ in range(times)]

    return asyncio.run(story())


def test_the_environment_is_believed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_scontrol(tmp_path, monkeypatch, "says 00:01:40")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    first, second, third = answers(7, 3)
    assert first is not None and 900 < first <= 1000
    assert (second, third) == (100.0, 100.0)
    assert count(tmp_path) == 2


@pytest.mark.parametrize(
    ("job_id", "script", "times", "found", "asked"),
    [
        (7, "says UNLIMITED", 2, [None, time_left._NO_LIMIT_S], 2),  # no limit, which replaces an old one
        (7, "test -e {0}/again && says 00:02:00; touch {0}/again", 1, [120.0], 2),
        (7, "exec sleep 1000", 1, [None], 1),  # one that does not answer is not asked again at once
        (None, "says 00:02:00", 2, [None, None], 0),
    ],
    ids=["no limit", "asked twice", "hangs", "outside Slurm"],
)
def test_slurm_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job_id: int | None, script: str, times: int,
    found: list[float | None], asked: int,
) -> None:  # fmt: skip
    fake_scontrol(tmp_path, monkeypatch, script.format(tmp_path))
    control = Control("cli")
    assert isinstance(control.slurm, CommandLine)
    control.slurm.tools.timeout_s = 0.5 if "sleep" in script else 10.0
    assert answers(job_id, times, control) == found
    assert count(tmp_path) == asked
