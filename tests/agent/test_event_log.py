"""The event log: complete in the normal case, and never more than a log where its file system hangs or is full."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from nvrx_slurm.agent import event_log
from nvrx_slurm.agent.event_log import EventLog
from nvrx_slurm.core.job.agent import Agent
from nvrx_slurm.core.job.agent_events import AgentSettings
from nvrx_slurm.core.machine import Tick
from nvrx_slurm.types import Node


def make(path: Path, said: list[str]) -> tuple[EventLog, Agent]:
    core = Agent(Node("n", 0, "host", "", 1), AgentSettings(), 0.0)
    return EventLog(path, core, said.append), core


def fill(log: EventLog, core: Agent, steps: int) -> None:
    for number in range(steps):
        log.step(Tick(), float(number), core, [])


def test_all_steps_are_in_the_file_after_close(tmp_path: Path) -> None:
    said: list[str] = []
    log, core = make(tmp_path / "log", said)
    fill(log, core, 5000)
    log.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 5001 and '"now":4999.0' in lines[-1] and said == []
    log.close()  # a second one does nothing


def test_a_file_system_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """open(2) of a FIFO without a reader hangs like a dead NFS server."""
    said: list[str] = []
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    log, core = make(fifo, said)
    started_s = time.monotonic()
    fill(log, core, 3)
    log.close()
    assert time.monotonic() - started_s < event_log.CLOSE_TIMEOUT_S + 1.0
    assert len(said) == 1 and "ends here" in said[0] and "has not taken the last lines" in said[0]
    release(fifo)


def test_a_full_queue_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "QUEUED_LINES", 10)
    said: list[str] = []
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    log, core = make(fifo, said)
    fill(log, core, 100)
    log.close()
    assert len(said) == 1 and "does not take 10 lines" in said[0]
    release(fifo)


def test_a_missing_directory_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    log, core = make(tmp_path / "gone" / "log", said)
    fill(log, core, 100)
    log.close()
    assert len(said) == 1 and "No such file" in said[0]


def release(fifo: Path) -> None:
    """Let the writer that hangs in `fifo` end."""
    with fifo.open() as reader:
        reader.read()
    for thread in threading.enumerate():
        if thread.name == "event log":
            thread.join(10)
            assert not thread.is_alive()
