"""Ranks for the tests of the examples."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks_harness import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Has imported torch, and what every optimizer imports."""
    pytest.importorskip("torch")
    process = Zygote("torch._dynamo")
    yield process
    process.close()
