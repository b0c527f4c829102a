"""Fixtures for the whole suite."""

import os
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
import standin
from minicluster import MiniCluster
from ranks_harness import Zygote

# torch asks the name server for the name of every address that it connects to. One that is silent for a moment would
# cost seconds each time, and a rank that waits for it is taken for hung. No test needs a name server (resolv.conf(5)).
os.environ.setdefault("RES_OPTIONS", "attempts:0")

# A proxy of the user is for what `scripts/test` installs, and not for the addresses of this machine.
for _name in ("no_proxy", "NO_PROXY"):
    os.environ[_name] = ",".join(filter(None, (os.environ.get(_name), "localhost,127.0.0.1")))

# `nohup scripts/test &` makes all children ignore these signals, and tests send them.
for _signum, _usual in {
    signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL,
}.items():  # fmt: skip
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _usual)


# Each test has one tier: the mark of its function, else that of its file (`pytestmark`).
# `@pytest.mark.repeats("a", "b")`: its values whose ids begin so repeat the others and run in the matrices only.
TIERS = ("fast", "process", "slurm", "matrix")


def tier(item):
    """The nearest tier to the test, its function's before its file's."""
    repeats = item.get_closest_marker("repeats")
    _, _, value = item.name.partition("[")
    if repeats and value.startswith(repeats.args):
        return "matrix"
    return next((mark.name for mark in item.iter_markers() if mark.name in TIERS), None)


def pytest_ignore_collect(collection_path, config):
    """`-m fast` does not import what only slower tests need, as torch."""
    if config.option.markexpr != "fast" or not collection_path.match("test_*.py"):
        return None
    return True if "mark.fast" not in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leave one tier per test. With pytest-xdist's --dist loadgroup, real Slurms are on three workers."""
    tier_of = {item: tier(item) for item in items}
    for node in {node for item in items for node in item.listchain()}:
        node.own_markers = [mark for mark in node.own_markers if mark.name not in TIERS]
    for item, name in tier_of.items():
        if name is None:
            raise pytest.UsageError(f"{item.nodeid} has no tier: add pytestmark = pytest.mark.fast, or another")
        item.add_marker(name)
        fixtures = getattr(item, "fixturenames", ())
        if "zygote" in fixtures:
            item.add_marker(pytest.mark.xdist_group("zygote"))
        elif "needs_slurm" in fixtures and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group("slurm-a"))


def pytest_make_parametrize_id(val):
    """The beginning of a long text: pytest-xdist sends the name of a test many times."""
    return ascii(val[:40]) if isinstance(val, (str, bytes)) and len(val) > 400 else None


@pytest.fixture(autouse=True)
def no_signal_stays_blocked():
    """All children that later tests start would inherit it, and survive the signal."""
    yield
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
    assert not blocked, f"the test leaves {blocked} blocked"


@pytest.fixture(scope="session")
def needs_slurm():
    """Skip, with the reason, where Slurm is not installed; fail instead if NVRX_REQUIRE_SLURM=1."""
    if reason := MiniCluster.available():
        if os.environ.get("NVRX_REQUIRE_SLURM") == "1":
            pytest.fail(f"NVRX_REQUIRE_SLURM=1, but {reason}")
        pytest.skip(reason)


@pytest.fixture(scope="session")
def nvml_standin(tmp_path_factory):
    """Directory with a libnvidia-ml.so.1 that does as told (tests/lib); skips without a compiler."""
    try:
        return standin.built(tmp_path_factory.mktemp("nvml"))
    except LookupError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def zygote():
    """Has imported torch, once for all tests, and what every optimizer imports."""
    pytest.importorskip("torch")
    process = Zygote("scenarios_calls", "torch._dynamo")
    yield process
    process.close()


@pytest.fixture
def cluster_root():
    """A short, private directory for one more cluster (pytest's own are too long for Unix sockets)."""
    root = Path(tempfile.mkdtemp(prefix="nvrx-mc-"))
    yield root
    shutil.rmtree(root)


@pytest.fixture(scope="session")
def shared_cluster(needs_slurm):
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
def minicluster(shared_cluster):
    """A real Slurm cluster of 4 idle nodes, n1..n4, with no job."""
    shared_cluster.reset()
    return shared_cluster
