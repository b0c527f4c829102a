"""The event log: complete in the normal case, and never more than a log where its file system hangs or is full."""

import os
import threading

import pytest
from waits import WAIT_S

from nvrx_slurm.core.agent.agent import Agent
from nvrx_slurm.core.machine import Tick
from nvrx_slurm.node import event_file
from nvrx_slurm.node.event_file import EventLog
from nvrx_slurm.types import Node
from tests.core.samples import agent_settings

pytestmark = pytest.mark.process


def written(path, steps):
    """What is said while `steps` steps are logged to `path`, and the log is closed twice."""
    said = []
    core = Agent(Node("n", 0, "host", "", 1), agent_settings(), 0.0)
    log = EventLog(path, core, said.append)
    for number in range(steps):
        log.step(Tick(), float(number), core, [])
    log.close()
    log.close()
    return said


def test_all_steps_are_in_the_file_after_close(tmp_path):
    assert written(tmp_path / "log", 5000) == []
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 5001 and '"now":4999.0' in lines[-1]


def test_a_directory_that_cannot_be_made_is_said_once(tmp_path):
    (tmp_path / "file").touch()
    (said,) = written(tmp_path / "file" / "log", 100)
    assert "Not a directory" in said


@pytest.mark.parametrize("steps, why", [(3, "the last lines within 0.05 s"), (100, "10 lines")])
def test_a_file_system_that_hangs_delays_nothing(tmp_path, monkeypatch, steps, why):
    """open(2) of a FIFO without a reader hangs like a dead NFS server; then the queue fills up."""
    monkeypatch.setattr(event_file, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(event_file, "QUEUED_LINES", 10)
    monkeypatch.setattr(event_file.owned, "append_to", lambda path, ours: os.open(path, os.O_WRONLY))
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    (said,) = written(fifo, steps)
    assert "ends here" in said and why in said
    with fifo.open() as reader:  # let the writer end
        reader.read()
    for thread in threading.enumerate():
        if thread.name == "event log":
            thread.join(WAIT_S)
            assert not thread.is_alive()
