"""Fixtures of the attribution service's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from fakes import Fake


@pytest.fixture
def fake() -> Iterator[Callable[..., Fake]]:
    """Makes services, and ends them after the test."""
    with ExitStack() as stack:
        yield lambda *script: stack.enter_context(Fake(*script))
