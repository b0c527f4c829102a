"""Fixtures of the tests on a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from minicluster import MiniCluster
from nvrx_job import Jobs


@pytest.fixture
def jobs(minicluster: MiniCluster) -> Iterator[Jobs]:
    """Makes jobs on the cluster of four idle nodes; afterwards nothing of them may be left."""
    made = Jobs(minicluster)
    yield made
    made.check()
