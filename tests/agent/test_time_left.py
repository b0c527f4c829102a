"""How long the job has: from the environment once, from Slurm later, never holding up the loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agent_harness import until

from nvrx_slurm.agent import time_left
from nvrx_slurm.agent.time_left import TimeLeft


def fake_squeue(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    tool = folder / "squeue"
    tool.write_text(f"#!/bin/sh\necho asked >> {folder}/asked\n{text}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


def count(folder: Path) -> int:
    return len((folder / "asked").read_text().splitlines()) if (folder / "asked").exists() else 0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_left, "_RETRY_S", 0.0)


def answers(job_id: int | None, times: int, timeout_s: float = 10.0) -> list[float | None]:
    async def story() -> list[float | None]:
        got: asyncio.Queue[float | None] = asyncio.Queue()
        clock = TimeLeft(job_id, timeout_s)
        found = []
        for _ in range(times):
            clock.ask(got.put_nowait)
            assert got.empty()  # later, from the loop
            found.append(await asyncio.wait_for(got.get(), 20.0))
        return found

    return asyncio.run(story())


def test_the_environment_is_believed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_squeue(tmp_path, monkeypatch, "echo 1:40")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1000))
    first, second, third = answers(7, 3)
    assert first is not None and 900 < first <= 1000
    assert (second, third) == (100.0, 100.0)
    assert count(tmp_path) == 2


def test_a_job_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start there is nothing to tell; later it must replace the limit that there was."""
    fake_squeue(tmp_path, monkeypatch, "echo UNLIMITED")
    first, second = answers(7, 2)
    assert first is None
    assert second is not None and second > 300 * 86400


def test_a_slurm_that_does_not_answer_is_asked_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_squeue(tmp_path, monkeypatch, f"test -e {tmp_path}/again && echo 2:00; touch {tmp_path}/again")
    assert answers(7, 1) == [120.0]
    assert count(tmp_path) == 2


def test_a_slurm_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_squeue(tmp_path, monkeypatch, "exec sleep 1000")
    assert answers(7, 1, timeout_s=0.2) == [None]
    assert count(tmp_path) == 2


def test_outside_slurm_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_squeue(tmp_path, monkeypatch, "echo 2:00")
    assert answers(None, 2) == [None, None]
    assert count(tmp_path) == 0


def test_a_squeue_that_hangs_ends_with_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_squeue(tmp_path, monkeypatch, "exec sleep 1000")
    program = f"""
import os, threading, time
from nvrx_slurm.slurm import control
threading.Thread(target=control.time_left_s, args=(7, {{}}), daemon=True).start()
while not os.path.exists({str(tmp_path / "asked")!r}):
    time.sleep(0.01)
"""
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    until(lambda: "sleep 1000" not in processes_below(tmp_path), "that squeue has ended")


def processes_below(folder: Path) -> str:
    """Command lines of the processes that have `folder` in their PATH."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            if f"PATH={folder}:".encode() in (one / "environ").read_bytes():
                found.append((one / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return "\n".join(found)
