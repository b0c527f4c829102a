"""The recorded node; the daemon of the node health check service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nvhcd_harness import Daemon
from recorded import Node


@pytest.fixture
def dgx(tmp_path: Path) -> Node:
    """A healthy one."""
    return Node(tmp_path / "dgx")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """Not started yet."""
    daemon = Daemon()
    yield daemon
    daemon.close()
