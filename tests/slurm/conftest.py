"""Fixtures of the tests on a real Slurm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import slurm_builds
from minicluster import MiniCluster
from nvrx_job import Jobs

LATER = [pytest.param(version, marks=pytest.mark.matrix) for version in slurm_builds.VERSIONS]


@pytest.fixture(scope="module", params=["", *LATER], ids=lambda version: version or "22.05")
def slurm_version(request, needs_slurm: None) -> str:
    """The tests of a module that use it run on each version that is here: for MiniCluster(..., slurm=slurm_version)."""
    version: str = request.param
    if reason := MiniCluster.available(version):
        pytest.skip(reason)
    return version


@pytest.fixture
def jobs(minicluster: MiniCluster) -> Iterator[Jobs]:
    """Makes jobs on the cluster of four idle nodes; afterwards nothing of them may be left."""
    made = Jobs(minicluster)
    yield made
    made.check()
