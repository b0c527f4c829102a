"""Fixtures of the agent's tests."""

import shutil
import tempfile
from pathlib import Path

import pytest
from agent_harness import Rig


@pytest.fixture
def rig():
    """A private directory for one job; fails the test when it leaves a process or a socket behind."""
    directory = Path(tempfile.mkdtemp(prefix="nvrx-at-"))  # short: Unix sockets are below it
    one = Rig(directory, directory.name)
    try:
        yield one
    finally:
        try:
            one.close()
        finally:
            shutil.rmtree(directory, ignore_errors=True)
