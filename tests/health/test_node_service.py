"""The check `node-service` against real sockets: a service that answers, answers nonsense, or does not answer."""

import json
import os
import socket
import threading
import time

import pytest
from nvhcd_harness import WELL, running
from recorded import F, N, P, U
from test_check_server import _PROGRAM, CheckServer
from waits import WAIT_S

from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import policy, runner
from nvrx_slurm.health.check import NodeView
from nvrx_slurm.health.checks.node_service import judge

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("nvhcd client")]  # most tests share one service


service = pytest.fixture(running, scope="module")


def ask(path, within_s=WAIT_S):
    """The finding, in this process."""
    plan = policy.select("preflight", only=["node-service"], expect={"node_service": str(path)})
    (check,) = plan.checks
    node = NodeView("/")
    node.deadline_s = time.monotonic() + within_s
    return runner.examine(check, node, plan.expected)


def test_an_answer_becomes_a_verdict(service):
    service.script(f"echo '{WELL}'")
    assert ask(f"unix://{service.socket}")[0] is P
    service.script(
        """echo "{\\"fail_count\\": 2, \\"failed_checks\\": [\\"ib_ber\\", \\"$1\\"]}"; echo 2 of 9 >&2; exit 1"""
    )
    assert ask(service.socket) == (F, "fail_count is 2 (ib_ber, --no-slurm): 2 of 9")
    service.script("kill -9 $$")
    verdict, text = ask(service.socket)
    assert verdict is U and "aborted: " in text


@pytest.mark.parametrize(
    "output, verdict",
    [
        ('{"fail_count": 0}', P),
        ('{"fail_count": -1}', F),
        ('{"fail_count": ' + "9" * 1_000_000 + "}", F),
        ('{"fail_count": false}', F),
        ("all is well", F),
        (json.dumps({"fail_count": 9, "failed_checks": ["x" * 100_000] * 30}), F),
    ],
)
def test_what_is_a_verdict(output, verdict):
    for success in (True, False):
        found, text = judge(success, output, "")
        assert found is (verdict if success else F)
        assert 0 < len(text) < 1000, "the runner shortens it, but it should not have to do so by much"


@pytest.mark.parametrize("what", ["nothing", "a file", "a dead socket"])
def test_no_service_is_unknown(daemon, what):
    said = "there is no"
    if what == "a file":
        daemon.socket.touch()
        said = "no socket"
    elif what == "a dead socket":
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(daemon.socket))
        said = "Connection refused"
    verdict, text = ask(daemon.socket)
    assert verdict is U and said in text, text


@pytest.mark.parametrize("how", ["never accepts", "accepts and is silent", "talks nonsense"])
def test_a_peer_that_is_no_service_is_unknown_in_time(daemon, how):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(daemon.socket))
        listener.listen(0 if how == "never accepts" else 8)
        listener.settimeout(WAIT_S)
        found = []
        asking = threading.Thread(target=lambda: found.append(ask(daemon.socket, 1.5)[0]))
        asking.start()
        if how != "never accepts":
            peer = listener.accept()[0]
            if how == "talks nonsense":
                peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n{}" * 100)
        asking.join(WAIT_S)
    assert found == [U]


def test_a_service_that_hangs_is_unknown_in_time_and_may_answer_the_next_time(service):
    """The late answer to the first question does no harm."""
    service.script("read x < go")
    go = service.fifo("go")
    verdict, text = ask(service.socket, 2.0)
    assert verdict is U and "deadline exceeded" in text
    go.write_text("\n")  # the script has opened it, too
    service.script("")
    assert ask(service.socket)[0] is P


@pytest.mark.skipif(os.geteuid() != 0, reason="only root distrusts what others could have made")
def test_root_believes_no_users_socket(service):
    service.script("exit 1")
    link = service.dir / "link"
    link.symlink_to(service.socket)
    assert ask(link)[0] is F, "a writable socket cannot be changed by those that may connect"
    for changed in (service.socket, service.dir, link):
        os.chown(changed, 65534, -1, follow_symlinks=False)
        verdict, text = ask(link)
        assert verdict is U and f"{changed} can be" in text, text
        os.chown(changed, 0, -1, follow_symlinks=False)


def test_without_grpc_only_this_check_is_unknown(daemon):
    only = ("--only=node-service", "--only=cpu-count", f"--expect=node_service={daemon.socket}")
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(daemon.socket))
        server = CheckServer(*only, program=f"import sys; sys.modules['grpc'] = None; {_PROGRAM}")
        other, one = sorted(server.ask().findings)
    assert other.verdict is not U and one.verdict is U
    assert "pip install 'nvrx_slurm[node-service]'" in one.text and server.end() == (0, "")


def test_without_an_endpoint_the_check_does_not_apply():
    plan = policy.select("preflight", only=["node-service"])
    assert runner.examine(plan.checks[0], NodeView("/"), plan.expected)[0] is N
    for when in ("prolog", "epilog", "periodic"):
        assert "node-service" not in [check.name for check in policy.select(when).checks]


@pytest.mark.parametrize("endpoint", ["run/nvhcd.sock", "unix://run/nvhcd.sock", "/" + "x" * 107])
def test_an_endpoint_that_is_none_is_told(endpoint):
    with pytest.raises(UsageError, match="node_service"):
        policy.select("preflight", expect={"node_service": endpoint})
