"""The recorded node."""

from __future__ import annotations

from pathlib import Path

import pytest
from recorded import Node


@pytest.fixture
def dgx(tmp_path: Path) -> Node:
    """A healthy one."""
    return Node(tmp_path / "dgx")
