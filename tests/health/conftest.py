"""The recorded node, with and without GPUs; the daemon of the node health check service."""

import pytest
from gpu_harness import Examiner, GpuNode
from nvhcd_harness import Daemon
from recorded import HungMount, Node


@pytest.fixture
def dgx(tmp_path):
    return Node(tmp_path / "dgx")


@pytest.fixture
def bare(tmp_path):
    """Without any file of the system, for tests of everything but checks."""
    return Node(tmp_path / "dgx", empty=True)


@pytest.fixture(scope="session")
def examiner(nvml_standin):
    """A process that does one check after the other on the stand-in of NVML."""
    found = Examiner(nvml_standin)
    yield found
    found.close()


@pytest.fixture
def gpus(dgx, examiner):
    """A healthy node whose NVML can be broken."""
    return GpuNode(dgx, examiner)


@pytest.fixture(scope="session")
def shared_node(tmp_path_factory):
    return Node(tmp_path_factory.mktemp("shared") / "dgx")


@pytest.fixture
def nvml(shared_node, examiner):
    """As `gpus`, for tests that change no file of the node."""
    return GpuNode(shared_node, examiner)


@pytest.fixture
def hung_home(dgx):
    """A node whose /home, an NFS mount by its mountinfo, never answers."""
    mount = HungMount(dgx / "/home")
    yield dgx
    mount.close()


@pytest.fixture
def daemon():
    """Not started yet."""
    daemon = Daemon()
    yield daemon
    daemon.close()
