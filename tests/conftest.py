"""Fixtures for the whole suite."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import standin
from minicluster import MiniCluster

# torch asks the name server for the name of every address that it connects to. One that is silent for a moment would
# cost seconds each time, and a rank that waits for it is taken for hung. No test needs a name server (resolv.conf(5)).
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# `nohup scripts/test &` makes all children ignore these signals, and tests send them.
for _signum, _usual in {
    signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL,
}.items():  # fmt: skip
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _usual)


# Files on a real Slurm that take as long as all others together.
SLURM_B = {
    "test_nvrx_run_warning.py", "test_nvrx_run_survives.py", "test_nvrx_run_fronts.py", "test_nvrx_run_inprocess.py",
    "test_nvrx_run_codes.py",
}  # fmt: skip
SLURM_C = {"test_every_version.py", "test_ordinary_user.py"}  # bring clusters of their own up


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With pytest-xdist's --dist loadgroup the tests on a real Slurm run on three workers, each with own clusters."""
    for item in items:
        if item.get_closest_marker("slurm"):
            group = "slurm-c" if item.path.name in SLURM_C else "slurm-b" if item.path.name in SLURM_B else "slurm-a"
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def no_signal_stays_blocked() -> Iterator[None]:
    """All children that later tests start would inherit it, and survive the signal."""
    yield
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    assert not blocked, f"the test leaves {blocked} blocked"


@pytest.fixture(scope="session")
def needs_slurm() -> None:
    """Skip, with the reason, where Slurm is not installed; fail instead if NVRX_REQUIRE_SLURM=1."""
    if reason := MiniCluster.available():
        if os.environ.get("NVRX_REQUIRE_SLURM") == "1":
            pytest.fail(f"NVRX_REQUIRE_SLURM=1, but {reason}")
        pytest.skip(reason)


@pytest.fixture(scope="session")
def nvml_standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with a libnvidia-ml.so.1 that does as told (tests/nvml); skips without a compiler."""
    try:
        return standin.built(tmp_path_factory.mktemp("nvml"))
    except LookupError as error:
        pytest.skip(str(error))


@pytest.fixture
def cluster_root() -> Iterator[Path]:
    """A short, private directory for one more cluster (pytest's own are too long for Unix sockets)."""
    root = Path(tempfile.mkdtemp(prefix="nvrx-mc-"))
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def shared_cluster(needs_slurm: None) -> Iterator[MiniCluster]:
    """The cluster of this worker; tests use `minicluster`, which resets it first."""
    root = Path(tempfile.mkdtemp(prefix="nvrx-mc-"))
    cluster = MiniCluster(root, nodes=4, kill_wait_s=8, die_with_owner=True).up()  # ranks get 3 s to end
    try:
        yield cluster
    finally:
        stray = cluster.down()
    assert stray == [], f"processes that were not below any node of the minicluster: {stray}"
    assert cluster.scan() == [], "the minicluster left processes"
    shutil.rmtree(root)


@pytest.fixture
def minicluster(shared_cluster: MiniCluster) -> MiniCluster:
    """A real Slurm cluster of 4 idle nodes, n1..n4, with no job."""
    shared_cluster.reset()
    return shared_cluster
