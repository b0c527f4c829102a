"""Fixtures for jobs that keep copies of their checkpoints."""

import tempfile
from pathlib import Path

import pytest
from jobs_harness import Job


@pytest.fixture
def make():
    """Makes a job, which is at its fault where that comes from the test."""
    with tempfile.TemporaryDirectory(prefix="nvrx-kc-") as name:
        jobs = []

        def job(fault="once", **more):
            directory = Path(name) / str(len(jobs))
            directory.mkdir()
            jobs.append(Job(directory, fault, **more))
            if fault in ("once", "told"):
                jobs[-1].reach_the_fault()
            return jobs[-1]

        yield job
        for one in jobs:
            one.close()


_undisturbed = set()


@pytest.fixture
def undisturbed(make):
    """The weights of a job of two nodes without a fault."""
    if not _undisturbed:
        _undisturbed.update(make("none", spares=0).end())
        assert len(_undisturbed) == 1
    return _undisturbed
