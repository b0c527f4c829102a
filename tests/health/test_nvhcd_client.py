"""The check `node-service` against real sockets: services that answer, answer nonsense, or do not answer."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nvrx_slurm.health import policy
from nvrx_slurm.health.check import Verdict
from nvrx_slurm.health.checks.node_service import Reply
from nvrx_slurm.health.checks.node_service import node_service as check
from nvrx_slurm.health.report import from_json

BOUND_S = 60.0
SHORT_S = 5.0  # what a service that does not answer gets: more than it takes to ask it on a busy machine
SERVICE = Path(__file__).with_name("nvhcd_service.py")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory with a short name, as paths of sockets have to be short."""
    path = Path(tempfile.mkdtemp(prefix="nvhcd-"))
    yield path
    shutil.rmtree(path)


Serve = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a service; returns when it listens."""
    started: list[subprocess.Popen[str]] = []

    def start(behaviour: str, path: Path) -> subprocess.Popen[str]:
        argv = [sys.executable, str(SERVICE), behaviour, str(path)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=BOUND_S)


def ask(endpoint: object, deadline_s: float = 60.0) -> tuple[Verdict, str]:
    """What the check finds, run as the agent runs it."""
    argv = [sys.executable, "-I", "-m", "nvrx_slurm.health", "--when", "preflight", "--only", "node-service"]
    argv += ["--deadline", str(deadline_s), "--expect", f"node_service={endpoint}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=deadline_s + BOUND_S, check=False)
    (finding,) = from_json(done.stdout).findings
    assert finding.check == "node-service" and done.stderr == ""
    assert done.returncode == {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.UNKNOWN: 3}[finding.verdict]
    return finding.verdict, finding.text


NO_COUNT = "its output is no JSON with a number fail_count, but "


@pytest.mark.parametrize(
    ("behaviour", "verdict", "said"),
    [
        ("well", Verdict.PASS, "the service found nothing wrong"),
        ("sick", Verdict.FAIL, "fail_count is 2 (hw_drv_gpu_count, ib_ber): 2 of 102 checks failed"),
        ("only success is false", Verdict.FAIL, "success is false"),
        ("junk", Verdict.FAIL, f"{NO_COUNT}'all is well'"),
        ("no fail_count", Verdict.FAIL, NO_COUNT),
        ("empty", Verdict.FAIL, f"{NO_COUNT}''"),
        ("echo", Verdict.FAIL, "fail_count is 1 (--no-slurm)"),
        ("raises", Verdict.UNKNOWN, "no answer from {path}: unknown: "),
        ("another service", Verdict.UNKNOWN, "no answer from {path}: unimplemented: "),
        ("huge", Verdict.UNKNOWN, "no answer from {path}: resource exhausted: "),
        ("not UTF-8", Verdict.UNKNOWN, "no answer from {path}: internal: "),
        ("no message", Verdict.UNKNOWN, "no answer from {path}: internal: "),
    ],
)
def test_what_the_service_answers(place: Path, serve: Serve, behaviour: str, verdict: Verdict, said: str) -> None:
    path = place / "s"
    serve(behaviour, path)
    found = ask(path)
    assert found[0] is verdict and found[1].startswith(said.format(path=path)), found


@pytest.mark.parametrize(
    ("output", "verdict"),
    [
        ('{"fail_count": 0}', Verdict.PASS),
        (' {"fail_count": 0.0, "failed_checks": null, "more": [1]}\n', Verdict.PASS),
        ('{"fail_count": -0, "failed_checks": ["a"]}', Verdict.PASS),
        ('{"fail_count": 1}', Verdict.FAIL),
        ('{"fail_count": -1}', Verdict.FAIL),
        ('{"fail_count": 0.5}', Verdict.FAIL),
        ('{"fail_count": 1e400}', Verdict.FAIL),
        ('{"fail_count": NaN}', Verdict.FAIL),
        ('{"fail_count": ' + "9" * 1_000_000 + "}", Verdict.FAIL),
        ('{"fail_count": "0"}', Verdict.FAIL),
        ('{"fail_count": false}', Verdict.FAIL),
        ('{"fail_count": null}', Verdict.FAIL),
        ('{"fail_count": [0]}', Verdict.FAIL),
        ('{"fail_count": {"fail_count": 0}}', Verdict.FAIL),
        ('[{"fail_count": 0}]', Verdict.FAIL),
        ("0", Verdict.FAIL),
        ('{"fail_count": 0', Verdict.FAIL),
        ("{'fail_count': 0}", Verdict.FAIL),
        ("[" * 1_000_000, Verdict.FAIL),
        ('{"a":' * 100_000, Verdict.FAIL),
        ('{"fail_count": 3, "failed_checks": 7}', Verdict.FAIL),
        ('{"fail_count": 3, "failed_checks": {"a": [1]}}', Verdict.FAIL),
        (json.dumps({"fail_count": 9, "failed_checks": ["x" * 100_000] * 30}), Verdict.FAIL),
        ("\x00\x1b[31m", Verdict.FAIL),
    ],
)
def test_what_is_a_verdict(output: str, verdict: Verdict) -> None:
    for success in (True, False):
        found, text = check.judge(Reply(success, output, ""), {})
        assert found is (verdict if success else Verdict.FAIL)
        assert 0 < len(text) < 1000, "the runner shortens it, but it should not have to do so by much"


@pytest.mark.parametrize("what", ["nothing", "a file", "a directory", "a dangling link", "a socket left behind"])
def test_no_service_is_unknown(place: Path, what: str) -> None:
    path = place / "s"
    said = "is no socket"
    if what == "a file":
        path.write_text("")
    elif what == "a directory":
        path.mkdir()
    elif what == "a socket left behind":
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(path))
        said = "Connection refused"
    else:
        said = f"there is no {path}: its daemon does not run, or it is not mounted in here"
        if what == "a dangling link":
            path.symlink_to("nowhere")
    verdict, text = ask(f"unix://{path}")
    assert verdict is Verdict.UNKNOWN and said in text, text


@pytest.mark.parametrize("how", ["never accepts", "accepts and is silent", "talks nonsense", "hangs up"])
def test_a_peer_that_is_no_service_is_unknown_in_time(place: Path, how: str) -> None:
    path = place / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0 if how == "never accepts" else 8)
        listener.settimeout(BOUND_S)
        argv = [sys.executable, "-c", f"import test_nvhcd_client as t; print(t.ask({str(path)!r}, {SHORT_S})[0].name)"]
        asking = subprocess.Popen(argv, cwd=SERVICE.parent, stdout=subprocess.PIPE, text=True)
        if how != "never accepts":
            peer = listener.accept()[0]
            if how == "talks nonsense":
                peer.sendall(b"HTTP/1.1 200 OK\r\n\r\n{}" * 100)
            elif how == "hangs up":
                peer.close()
        out, _ = asking.communicate(timeout=BOUND_S)
    assert out == "UNKNOWN\n"


def test_a_service_that_hangs_is_unknown_in_time_and_may_answer_the_next_time(place: Path, serve: Serve) -> None:
    """The late answer to the first question harms nobody."""
    path = place / "s"
    os.mkfifo(f"{path}.go")
    service = serve("late", path)
    begun_s = time.monotonic()
    verdict, text = ask(path, SHORT_S)
    assert verdict is Verdict.UNKNOWN and text.startswith("timed out") and str(path) in text
    assert time.monotonic() - begun_s < 10 * SHORT_S
    assert service.stdout is not None and service.stdout.readline() == "asked\n"
    with open(f"{path}.go", "w"):  # the service was waiting: this does not block
        assert ask(path)[0] is Verdict.PASS


def test_a_service_that_dies_in_the_middle_is_unknown(place: Path, serve: Serve) -> None:
    path = place / "s"
    service = serve("dies", path)
    verdict, text = ask(path)
    assert service.wait(BOUND_S) == 7, "it died of our question"
    assert verdict is Verdict.UNKNOWN and text.startswith(f"no answer from {path}: unavailable: "), text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root distrusts what others could have made")
@pytest.mark.parametrize("whose", ["socket", "directory", "link", "directory everybody writes to"])
def test_root_believes_no_users_socket_and_a_user_does(place: Path, serve: Serve, whose: str) -> None:
    """A user's daemon, however well it speaks, says nothing to what runs as root."""
    own = place / "own"
    own.mkdir()
    path = own / "s"
    serve("sick", path)
    place.chmod(0o755)
    path.chmod(0o666)
    assert ask(path)[0] is Verdict.FAIL, "who may connect cannot change it"
    changed = {"socket": path, "directory": own}.get(whose)
    if changed:
        os.chown(changed, 65534, -1)
    elif whose == "link":
        changed = own / "link"
        changed.symlink_to(path)
        os.chown(changed, 65534, -1, follow_symlinks=False)
        path = changed
    else:
        changed = own
        own.chmod(0o777)
    verdict, text = ask(path)
    assert verdict is Verdict.UNKNOWN and "is not trusted by root, as" in text and f"{changed} can be" in text, text
    done = subprocess.run(
        [sys.executable, "-c", ASK_AS_NOBODY, str(path)], stdout=subprocess.PIPE, text=True, timeout=BOUND_S, check=True
    )
    assert done.stdout == "False\n", "a user's agent asks whom the user named"


# Everything is imported as root, who can read it.
ASK_AS_NOBODY = """
import os, sys, time
from nvrx_slurm.health.checks import node_service
from nvrx_slurm.health.check import NodeView
node_service.preload()
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
node = NodeView("/")
node.deadline_s = time.monotonic() + 60
print(node_service.gather(node, {"node_service": sys.argv[1]}).success)
"""


def test_any_path_can_be_the_socket(place: Path, serve: Serve) -> None:
    path = place / "a b%20#c?d=\u00e9.sock"
    serve("well", path)
    assert ask(f"unix://{path}")[0] is Verdict.PASS


RESIDENT = """
import sys
from nvrx_slurm.health.checks import node_service
from nvrx_slurm.health import policy, runner
from nvrx_slurm.health.check import NodeView

path, preload = sys.argv[1:]
if preload == "yes":
    node_service.preload()
assert ("grpc" in sys.modules) == (preload == "yes")
plan = policy.plan("preflight", only=["node-service"], expect={"node_service": path}, deadline_s=60.0)
for line in sys.stdin:
    (finding,) = runner.run(plan.checks, NodeView("/"), plan.expected, plan.deadline_s).findings
    print(finding.verdict.value, flush=True)
assert ("grpc" in sys.modules) == (preload == "yes")
"""


@pytest.mark.parametrize("preload", ["yes", "no"])
def test_a_resident_process_asks_again_and_again(place: Path, serve: Serve, preload: str) -> None:
    """Each check is a fork of it, with gRPC imported before or not; the socket is looked up each time."""
    path = place / "s"
    argv = [sys.executable, "-I", "-c", RESIDENT, str(path), preload]
    resident = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert resident.stdin is not None and resident.stdout is not None

    def again() -> str:
        resident.stdin.write("\n")
        resident.stdin.flush()
        return resident.stdout.readline()

    try:
        assert again() == "unknown\n"
        service = serve("well", path)
        assert [again() for _ in range(3)] == ["pass\n"] * 3
        service.kill()
        service.wait(BOUND_S)
        assert again() == "unknown\n"
        path.unlink(missing_ok=True)
        serve("sick", path)
        assert again() == "fail\n"
    finally:
        out, _ = resident.communicate(timeout=BOUND_S)
    assert (resident.returncode, out) == (0, "")


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("run/nvhcd.sock", "must be an absolute path of a Unix socket, or unix:// and such a path"),
        ("unix://run/nvhcd.sock", "must be an absolute path"),
        ("http://localhost:50051", "must be an absolute path"),
        ("", "must be an absolute path"),
        ("/" + "x" * 107, "must be at most 107 bytes long"),
    ],
)
def test_an_endpoint_that_is_none_is_told(endpoint: str, said: str) -> None:
    argv = [
        sys.executable,
        "-I",
        "-m",
        "nvrx_slurm.health",
        "--when",
        "preflight",
        "--expect",
        f"node_service={endpoint}",
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "node_service" in done.stderr and said in done.stderr and done.stderr.count("\n") == 1


def test_without_an_endpoint_nobody_is_asked_and_root_never_asks() -> None:
    assert "node-service" in [check.name for check in policy.plan("preflight").checks]
    for when in ("prolog", "epilog", "periodic"):
        assert "node-service" not in [check.name for check in policy.plan(when).checks]
    argv = [sys.executable, "-I", "-m", "nvrx_slurm.health", "--when", "preflight", "--only", "node-service"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    (finding,) = from_json(done.stdout).findings
    assert (finding.verdict, finding.text) == (Verdict.NOT_APPLICABLE, "no node_service is given")


def test_a_forked_check_imports_nothing_but_what_grpc_keeps_for_its_first_channel(place: Path) -> None:
    code = """
import sys
from nvrx_slurm.health.checks import node_service
node_service.preload()
before = set(sys.modules)
try:
    node_service.call(sys.argv[1], 10.0)
except ValueError as error:
    print(error)
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before} - {"grpc"}))
"""
    argv = [sys.executable, "-c", code, str(place / "nobody")]
    said, imported = subprocess.check_output(argv, text=True, timeout=60).splitlines()
    assert "no answer from" in said and imported == "[]"
