"""Ranks for the tests of the wrapper."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from ranks_harness import Job, Zygote


@pytest.fixture
def job(zygote: Zygote, tmp_path) -> Iterator[Job]:
    """A job without ranks yet; when the test is over nothing of it is left."""
    with contextlib.closing(Job(zygote, tmp_path)) as made:
        yield made
