"""Fixtures of the tests on a real Slurm."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import slurm_builds
from minicluster import MiniCluster
from nvrx_job import Jobs

LATER = [pytest.param(version, marks=pytest.mark.matrix) for version in slurm_builds.VERSIONS]


@pytest.fixture(scope="module", params=["", *LATER], ids=lambda version: version or "22.05")
def slurm_version(request, needs_slurm):
    """The tests of a module that use it run on each version that is here: for MiniCluster(..., slurm=slurm_version)."""
    version = request.param
    if reason := MiniCluster.available(version):
        pytest.skip(reason)
    return version


@pytest.fixture(
    scope="session",
    params=["", pytest.param("26.05", marks=pytest.mark.matrix)],
    ids=lambda version: version or "22.05",
)
def varied_cluster(request, needs_slurm):
    """One that is as unlike the plain one as can be. Of four nodes with GPUs; CPUs are as many as this machine has, at
    most 2, since tasks are bound to them."""
    if reason := MiniCluster.available(request.param):
        pytest.skip(reason)
    variants = ("affinity", "memory", "gpus", "backfill", "interactive", "preemption", "dots")
    if os.geteuid() == 0:
        variants = (*variants, "names")
    root = Path(tempfile.mkdtemp(prefix="nvrx-mc-"))
    cpus = min(2, len(os.sched_getaffinity(0)))
    with MiniCluster(root, 4, cpus, die_with_owner=True, slurm=request.param, variants=variants) as cluster:
        yield cluster
    assert cluster.scan() == []
    shutil.rmtree(root)


@pytest.fixture
def varied(varied_cluster):
    """As `jobs`, on the varied cluster."""
    varied_cluster.reset()
    made = Jobs(varied_cluster)
    yield made
    made.check()


@pytest.fixture
def jobs(minicluster):
    """Makes jobs on the cluster of four idle nodes; afterwards nothing of them may be left."""
    made = Jobs(minicluster)
    yield made
    made.check()
