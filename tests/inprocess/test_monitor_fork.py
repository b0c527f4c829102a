"""Forking the monitor process, which a thread may do beside the user's code."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from nvrx_slurm.inprocess import Wrapper
from nvrx_slurm.inprocess.environment import Environment
from nvrx_slurm.inprocess.log import LOGGER_NAME
from nvrx_slurm.inprocess.watch import detach
from nvrx_slurm.inprocess.watch.identity import Identity
from nvrx_slurm.inprocess.watch.monitor_process import MonitorProcess
from nvrx_slurm.inprocess.watch.page import Page


def test_warning_filters_that_change_meanwhile_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of the main thread may, while the watchdog thread replaces a monitor process."""
    children = []

    def fork() -> int:
        warnings.filterwarnings("ignore", "put there meanwhile")
        children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return children[0].pid

    monkeypatch.setattr(os, "fork", fork)
    monitor = MonitorProcess(Wrapper()._arguments, Identity(0, 1, "p", Environment()), Page())
    with warnings.catch_warnings():
        monitor.start()
        assert any(text and text.pattern == "put there meanwhile" for _, text, *_ in warnings.filters)
    monitor.kill()
    monitor.leave(30.0)
    assert children[0].wait(30.0) is not None


SCRIPT = """
import warnings
import nvrx_slurm.inprocess.watch.monitor_process
text = "This process (pid=1) is multi-threaded, use of fork() may lead to deadlocks in the child."
for module in ("nvrx_slurm.inprocess.watch.monitor_process", "of_a_user"):
    warnings.warn_explicit(text, DeprecationWarning, f"{module}.py", 1, module)
"""


@pytest.mark.torch
def test_a_fork_beside_threads_is_warned_of_elsewhere_only() -> None:
    """In the words of Python 3.12."""
    done = subprocess.run([sys.executable, "-W", "always", "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "of_a_user.py:1: DeprecationWarning" in done.stderr and "monitor_process.py:1" not in done.stderr


@pytest.mark.parametrize("name", [LOGGER_NAME, f"{LOGGER_NAME}.coordinator", None])
def test_no_log_file_of_the_parent_is_written_to(tmp_path: Path, name: str | None) -> None:
    """Its number may belong to the monitor process's own log file, or to a connection to the store."""
    logger, handler = logging.getLogger(name), logging.FileHandler(tmp_path / "of the user")
    logger.addHandler(handler)
    try:
        loggers = detach.loggers()
        if (pid := os.fork()) == 0:
            os.close(handler.stream.fileno())
            del handler
            detach.log_to(str(tmp_path / "ours"), loggers)
            logging.getLogger(f"{LOGGER_NAME}.coordinator").warning("a word")
            logging.getLogger("another").warning("lost")
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        logger.removeHandler(handler)
        handler.close()
    assert (tmp_path / "ours").read_text().count("a word\n") == 1
    assert (tmp_path / "of the user").read_text() == ""
