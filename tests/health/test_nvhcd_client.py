"""The check `node-service` against real sockets: services that answer, answer nonsense, or do not answer."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nvhcd_harness import BOUND_S
from test_check_server import _PROGRAM, CheckServer

from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import policy, runner
from nvrx_slurm.health.check import NodeView, Verdict
from nvrx_slurm.health.checks.node_service import judge

pytestmark = pytest.mark.xdist_group("nvhcd client")  # most tests share one service

SERVICE = Path(__file__).with_name("nvhcd_service.py")
SHARED = ("well", "sick", "only success is false", "junk", "echo", "another service")


def folder() -> Path:
    """With a short name, because paths of sockets have to be short."""
    path = Path(tempfile.mkdtemp(prefix="nvhcd-"))
    path.chmod(0o755)
    return path


@pytest.fixture
def place() -> Iterator[Path]:
    path = folder()
    yield path
    shutil.rmtree(path)


Serve = Callable[..., "subprocess.Popen[str]"]


def started(where: Path, *behaviours: str) -> subprocess.Popen[str]:
    """Services; returns when they listen."""
    argv = [sys.executable, str(SERVICE), str(where), *behaviours]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.fixture(scope="module")
def services() -> Iterator[Path]:
    """The folder of all services in SHARED."""
    path = folder()
    process = started(path, *SHARED)
    yield path
    process.kill()
    process.communicate(timeout=BOUND_S)
    shutil.rmtree(path)


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a service of the test's own at a path."""
    processes: list[subprocess.Popen[str]] = []

    def start(where: Path, behaviour: str) -> subprocess.Popen[str]:
        processes.append(started(where, behaviour))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate(timeout=BOUND_S)


def ask(path: object, within_s: float = BOUND_S) -> tuple[Verdict, str]:
    """The finding, in this process."""
    plan = policy.select("preflight", only=["node-service"], expect={"node_service": str(path)})
    (check,) = plan.checks
    node = NodeView("/")
    node.deadline_s = time.monotonic() + within_s
    return runner.examine(check, node, plan.expected)


@pytest.mark.parametrize(
    ("behaviour", "verdict", "said"),
    [
        ("well", Verdict.PASS, ""),
        ("sick", Verdict.FAIL, "fail_count is 2 (hw_drv_gpu_count, ib_ber): 2 of 102"),
        ("only success is false", Verdict.FAIL, "success is false"),
        ("junk", Verdict.FAIL, "'all is well'"),
        ("echo", Verdict.FAIL, "fail_count is 1 (--no-slurm)"),
        ("another service", Verdict.UNKNOWN, "unimplemented: "),
    ],
)
def test_an_answer_becomes_a_verdict(services: Path, behaviour: str, verdict: Verdict, said: str) -> None:
    found, text = ask(f"unix://{services}/{behaviour}")
    assert found is verdict and said in text, text


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        ('{"fail_count": 0}', Verdict.PASS),
        ('{"fail_count": -1}', Verdict.FAIL),
        ('{"fail_count": ' + "9" * 1_000_000 + "}", Verdict.FAIL),
        ('{"fail_count": false}', Verdict.FAIL),
        (json.dumps({"fail_count": 9, "failed_checks": ["x" * 100_000] * 30}), Verdict.FAIL),
    ],
)
def test_what_is_a_verdict(output: str, verdict: Verdict) -> None:
    for success in (True, False):
        found, text = judge(success, output, "")
        assert found is (verdict if success else Verdict.FAIL)
        assert 0 < len(text) < 1000, "the runner shortens it, but it should not have to do so by much"


@pytest.mark.parametrize("what", ["nothing", "a file", "a dead socket"])
def test_no_service_is_unknown(place: Path, what: str) -> None:
    path = place / "s"
    said = "there is no"
    if what == "a file":
        path.touch()
        said = "no socket"
    elif what == "a dead socket":
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(path))
        said = "Connection refused"
    verdict, text = ask(path)
    assert verdict is Verdict.UNKNOWN and said in text, text


@pytest.mark.parametrize("how", ["never accepts", "accepts and is silent", "talks nonsense"])
def test_a_peer_that_is_no_service_is_unknown_in_time(place: Path, how: str) -> None:
    path = place / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0 if how == "never accepts" else 8)
        listener.settimeout(BOUND_S)
        found: list[Verdict] = []
        asking = threading.Thread(target=lambda: found.append(ask(path, 1.5)[0]))
        asking.start()
        if how != "never accepts":
            peer = listener.accept()[0]
            if how == "talks nonsense":
                peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n{}" * 100)
        asking.join(BOUND_S)
    assert found == [Verdict.UNKNOWN]


def test_a_service_that_hangs_is_unknown_in_time_and_may_answer_the_next_time(place: Path, serve: Serve) -> None:
    """The late answer to the first question does no harm."""
    os.mkfifo(place / "late.go")
    service = serve(place, "late")
    verdict, text = ask(place / "late", 2.0)
    assert verdict is Verdict.UNKNOWN and "/late: deadline exceeded" in text
    assert service.stdout is not None and service.stdout.readline() == "asked\n"
    with open(place / "late.go", "w"):  # the service was waiting: this does not block
        assert ask(place / "late")[0] is Verdict.PASS


@pytest.mark.skipif(os.geteuid() != 0, reason="only root distrusts what others could have made")
def test_root_believes_no_users_socket(place: Path, serve: Serve) -> None:
    own = place / "own"
    own.mkdir()
    serve(own, "sick")
    path, link = own / "sick", place / "link"
    link.symlink_to(path)
    path.chmod(0o666)
    assert ask(link)[0] is Verdict.FAIL, "a writable socket cannot be changed by those that may connect"
    for changed in (path, own, link):
        os.chown(changed, 65534, -1, follow_symlinks=False)
        verdict, text = ask(link)
        assert verdict is Verdict.UNKNOWN and f"{changed} can be" in text, text
        os.chown(changed, 0, -1, follow_symlinks=False)
    own.chmod(0o777)
    verdict, text = ask(path)
    assert verdict is Verdict.UNKNOWN and f"{own} can be" in text, text


def test_without_grpc_only_this_check_is_unknown(place: Path) -> None:
    only = ("--only=node-service", "--only=cpu-count", f"--expect=node_service={place}/well")
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(f"{place}/well")
        server = CheckServer(*only, program=f"import sys; sys.modules['grpc'] = None; {_PROGRAM}")
        one, other = sorted(server.ask().findings)
    assert (
        one.verdict is not Verdict.UNKNOWN is other.verdict and "pip install 'nvrx_slurm[node-service]'" in other.text
    )
    assert server.end() == (0, "")


# --- without an endpoint ----------------------------------------------------------------------------------------------


def test_without_an_endpoint_the_check_does_not_apply() -> None:
    plan = policy.select("preflight", only=["node-service"])
    assert runner.examine(plan.checks[0], NodeView("/"), plan.expected)[0] is Verdict.NOT_APPLICABLE
    assert "node-service" in [check.name for check in policy.select("preflight").checks]
    for when in ("prolog", "epilog", "periodic"):
        assert "node-service" not in [check.name for check in policy.select(when).checks]


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [("run/nvhcd.sock", "absolute path"), ("unix://run/nvhcd.sock", "absolute path"), ("/" + "x" * 107, "107 bytes")],
)
def test_an_endpoint_that_is_none_is_told(endpoint: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"node_service.*{said}"):
        policy.select("preflight", expect={"node_service": endpoint})
