"""Ranks for the tests of the wrapper."""

import contextlib

import pytest
from ranks_harness import Job


@pytest.fixture
def job(zygote, tmp_path):
    """A job without ranks yet; when the test is over nothing of it is left."""
    with contextlib.closing(Job(zygote, tmp_path)) as made:
        yield made
