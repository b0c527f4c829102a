"""`nvrx health serve`: a real daemon on a real socket, asked by a real client."""

from __future__ import annotations

import grp
import json
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from recorded import Node, ended

from nvrx_slurm.config import nvhcd as config
from nvrx_slurm.health import nvhcd_pb2 as pb
from nvrx_slurm.health.node_service import METHOD

BOUND_S = 60.0
NVRX_ARGS = ["--no-slurm", "--group", "prolog", "epilog", "logs", "gpu"]
WELL = '{"fail_count": 0, "failed_checks": []}'
DOCS = Path(__file__).resolve().parents[2] / "docs" / "nvhcd.md"


class Daemon:
    """A daemon, its files in a directory with a short name."""

    def __init__(self) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="nvhcd-"))
        self.dir.chmod(0o755)
        self.socket = self.dir / "s"
        self.settings: dict[str, Any] = {"socket_path": str(self.socket), "log_level": "debug", "timeout": 60}
        self.args: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self.channel = grpc.insecure_channel(f"unix:{self.socket}", [("grpc.use_local_subchannel_pool", 1)])
        self.ask = self.channel.unary_unary(
            METHOD, pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString
        )

    def script(self, body: str) -> Path:
        """The health check script: `body` of a shell script that runs in the directory."""
        file = self.dir / "check.sh"
        file.write_text(f"#!/bin/bash\ncd {self.dir}\n{body}\n")
        file.chmod(0o755)
        self.settings["healthcheck_path"] = str(file)
        return file

    def launch(self) -> subprocess.Popen[str]:
        file = self.dir / "nvhcd.yaml"
        file.write_text(json.dumps(self.settings))
        argv = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "health", "serve", "--config", str(file), *self.args]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return self.process

    def start(self, body: str | None = None) -> Daemon:
        """Returns when it listens."""
        if body is not None:
            self.script(body)
        self.launch()
        self.wait_for("listening on")
        return self

    def wait_for(self, words: str, times: int = 1) -> None:
        """Read its log until so many lines have these words."""
        assert self.process is not None and self.process.stderr is not None
        lines = []
        while times:
            line = self.process.stderr.readline()  # pytest-timeout bounds it
            assert line, f"it ended: {lines}"
            lines.append(line)
            times -= words in line

    def refused(self) -> str:
        """The one sentence of a daemon that does not start."""
        out, err = self.launch().communicate(timeout=BOUND_S)
        assert self.process is not None
        assert (self.process.returncode, out) == (2, "") and err.count("\n") == 1, err
        return err

    def answer(self, *args: str) -> Any:
        return self.ask(pb.HealthCheckRequest(args=args), timeout=BOUND_S)

    def error(self, *args: str) -> tuple[str, str]:
        """(status, sentence) of a call that fails."""
        with pytest.raises(grpc.RpcError) as error:
            self.answer(*args)
        return error.value.code().name, error.value.details()

    def lines(self, name: str) -> list[str]:
        file = self.dir / name
        return file.read_text().splitlines() if file.exists() else []

    def stop(self) -> str:
        """The rest of its log."""
        assert self.process is not None
        self.process.terminate()
        out, err = self.process.communicate(timeout=BOUND_S)
        assert (self.process.returncode, out) == (0, "")
        assert sorted(path.name for path in self.dir.glob("s*")) == [], "its socket is gone"
        return err


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = Daemon()
    yield daemon
    daemon.channel.close()
    if daemon.process is not None and daemon.process.poll() is None:
        daemon.process.kill()
        daemon.process.communicate(timeout=BOUND_S)
    shutil.rmtree(daemon.dir)


# --- what the script says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (f"echo '{WELL}'", (True, 0, WELL, "")),
        ("""echo '{"fail_count": 1, "more": 2}'; echo why >&2; exit 1""",
         (False, 1, '{"fail_count": 1, "more": 2}', "why")),
        ("""echo checking; echo '{"fail_count": 3}'""", (True, 0, '{"fail_count": 3}', "")),
        ("""printf '{\n "fail_count":\n 0}\n'""", (True, 0, '{\n "fail_count":\n 0}', "")),
        ("echo all well", (True, 0, WELL, "")),
        ("exit 0", (True, 0, WELL, "")),
        ("exit 3", (False, 3, '{"fail_count": 1, "failed_checks": ["exit code 3"]}', "")),
        ("""echo '{"fail_count": "0"}'; exit 1""",
         (False, 1, '{"fail_count": 1, "failed_checks": ["exit code 1"]}', "")),
        ("echo '[]'; echo; printf '\\377\\000' >&2", (True, 0, WELL, "\ufffd\x00")),
        (f"head -c 100000000 /dev/zero; head -c 100000000 /dev/zero >&2; echo; echo '{WELL}'",
         (True, 0, WELL, "\0" * 16384)),
        ("read line; echo \"got '$line'\" >&2", (True, 0, WELL, "got ''")),
    ],
)  # fmt: skip
def test_answers(daemon: Daemon, body: str, answer: tuple[bool, int, str, str]) -> None:
    found = daemon.start(body).answer("--no-slurm")
    assert (found.success, found.exit_code, found.output, found.error) == answer
    daemon.stop()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("echo so far >&2; kill -9 $$", "ABORTED", "was ended by signal 9: so far"),
        ("exec /no/such/program", "FAILED_PRECONDITION", "cannot be executed: "),
    ],
)
def test_a_script_that_cannot_tell_is_no_answer(daemon: Daemon, body: str, status: str, said: str) -> None:
    """A client makes of a failed call that it does not know: the node stays in use."""
    code, details = daemon.start(body).error()
    assert code == status and said in details


def test_a_script_without_an_interpreter_is_no_answer(daemon: Daemon) -> None:
    daemon.script("").write_text("#!/no/such/shell\n")
    assert daemon.start().error()[0] == "FAILED_PRECONDITION"


def test_arguments_are_handed_on(daemon: Daemon) -> None:
    daemon.start("""printf '%s\n' "$@" >> args""")
    daemon.answer("--no-slurm")
    daemon.answer(*NVRX_ARGS)
    daemon.answer()
    assert daemon.lines("args") == ["--no-slurm", *NVRX_ARGS, ""]


@pytest.mark.parametrize(
    "args",
    [["a"] * 65, ["a" * 257], ["a\0b"], ["a\nb"], ["$(id)"], ["a b"], ["a;b"], [""], ["\u00e9"], ["'"]],
    ids=lambda args: ascii(args[0][:5]),
)
def test_strange_arguments_are_refused(daemon: Daemon, args: list[str]) -> None:
    daemon.start("echo begun >> log")
    assert daemon.error(*args)[0] == "INVALID_ARGUMENT"
    assert daemon.answer("a" * 256, *["b"] * 63).success
    assert daemon.lines("log") == ["begun"], "only the second one ran"


def test_a_request_without_end_is_refused(daemon: Daemon) -> None:
    daemon.start("echo begun >> log")
    assert daemon.error("a" * (1 << 20))[0] == "RESOURCE_EXHAUSTED"
    assert daemon.lines("log") == []


# --- one at a time ----------------------------------------------------------------------------------------------------

BLOCKING = """
n=$(wc -l < log 2>/dev/null || echo 0)
echo start >> log
read x < go
echo stop >> log
echo "{\\"fail_count\\": 0, \\"run\\": $((n / 2 + 1))}"
"""


def test_fifty_at_once_share_a_run_and_no_two_run_at_once(daemon: Daemon) -> None:
    """The first run began before the fifty asked, so it is not theirs; the second one is all theirs."""
    os.mkfifo(daemon.dir / "go")
    daemon.start(BLOCKING)
    request = pb.HealthCheckRequest(args=["--no-slurm"])
    first = daemon.ask.future(request, timeout=BOUND_S)
    daemon.wait_for("running ")
    fifty = [daemon.ask.future(request, timeout=BOUND_S) for _ in range(50)]
    daemon.wait_for("asked with", 50)
    for waiting in (first, fifty[0]):
        with open(daemon.dir / "go", "w") as go:  # the script has opened it, too
            go.write("\n")
        waiting.result()
    runs = [json.loads(call.result().output)["run"] for call in (first, *fifty)]
    assert runs == [1] + [2] * 50
    assert daemon.lines("log") == ["start", "stop"] * 2
    assert daemon.stop().count("running ") == 1  # the first was read above


def test_different_questions_wait_and_too_many_are_refused(daemon: Daemon) -> None:
    os.mkfifo(daemon.dir / "go")
    daemon.start(BLOCKING)
    first = daemon.ask.future(pb.HealthCheckRequest(), timeout=BOUND_S)
    daemon.wait_for("running ")
    others = [daemon.ask.future(pb.HealthCheckRequest(args=[str(n)]), timeout=BOUND_S) for n in range(8)]
    daemon.wait_for("asked with", 8)
    assert daemon.error("one", "more") == ("UNAVAILABLE", "too many different health checks are waiting")
    for call in (first, *others):
        with open(daemon.dir / "go", "w") as go:
            go.write("\n")
        assert call.result().success
    assert daemon.lines("log") == ["start", "stop"] * 9


# --- what scripts leave -----------------------------------------------------------------------------------------------

LEAVES = "setsid sh -c 'echo $$ > pid; echo > go; exec sleep 600' & read x < go"  # with our stdout and stderr open


def test_a_script_that_never_ends_is_ended_with_all_it_started(daemon: Daemon) -> None:
    os.mkfifo(daemon.dir / "go")
    daemon.settings["timeout"] = 2
    daemon.start(f"trap '' TERM; echo $$ > own; {LEAVES}; echo stuck >&2; while :; do read x < go; done")
    code, details = daemon.error()
    assert code == "ABORTED" and details.endswith("did not end in time and was killed: stuck")
    assert ended(int(*daemon.lines("pid"))) and ended(int(*daemon.lines("own")))
    daemon.script("")
    assert daemon.answer().success
    daemon.stop()


def test_a_process_that_keeps_the_output_open_holds_nobody_up(daemon: Daemon) -> None:
    os.mkfifo(daemon.dir / "go")
    assert daemon.start(LEAVES).answer().success
    assert ended(int(*daemon.lines("pid")))
    daemon.stop()


def test_sigterm_during_a_run_leaves_nothing(daemon: Daemon) -> None:
    os.mkfifo(daemon.dir / "go")
    os.mkfifo(daemon.dir / "ready")
    daemon.start(f"trap '' TERM; echo $$ > own; {LEAVES}; echo > ready; while :; do read x < go; done")
    asking = daemon.ask.future(pb.HealthCheckRequest(), timeout=BOUND_S)
    waiting = daemon.ask.future(pb.HealthCheckRequest(args=["next"]), timeout=BOUND_S)
    with open(daemon.dir / "ready") as ready:
        ready.readline()
    daemon.wait_for("asked with", 2)
    daemon.stop()
    for call in (asking, waiting):
        assert call.code() is grpc.StatusCode.UNAVAILABLE
        assert call.details() == "the service was stopped"
    assert ended(int(*daemon.lines("pid"))) and ended(int(*daemon.lines("own")))


def test_a_killed_daemon_takes_its_script_along_and_its_socket_is_taken_over(daemon: Daemon) -> None:
    os.mkfifo(daemon.dir / "ready")
    daemon.start("trap '' TERM; echo $$ > own; echo > ready; while :; do read x < ready; done")
    asking = daemon.ask.future(pb.HealthCheckRequest(), timeout=BOUND_S)
    with open(daemon.dir / "ready") as ready:
        ready.readline()
    assert daemon.process is not None
    daemon.process.kill()
    daemon.process.communicate(timeout=BOUND_S)
    assert asking.code() is grpc.StatusCode.UNAVAILABLE
    assert ended(int(*daemon.lines("own")))
    assert daemon.socket.is_socket()
    daemon.start("")
    with grpc.insecure_channel(f"unix:{daemon.socket}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        ask = channel.unary_unary(METHOD, pb.HealthCheckRequest.SerializeToString, pb.HealthCheckResponse.FromString)
        assert ask(pb.HealthCheckRequest(), timeout=BOUND_S).success
    daemon.stop()


# --- the socket -------------------------------------------------------------------------------------------------------


def test_everybody_may_ask_unless_there_is_a_group(daemon: Daemon) -> None:
    daemon.start("")
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o666
    daemon.stop()
    daemon.settings["group"] = grp.getgrgid(os.getegid()).gr_name
    daemon.start()
    found = daemon.socket.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, os.getegid())
    if os.geteuid() == 0:
        connect = f"import socket; socket.socket(socket.AF_UNIX).connect({str(daemon.socket)!r})"
        stranger = {"user": 65534, "group": 65534, "extra_groups": []}
        done = subprocess.run(
            ["/usr/bin/python3", "-I", "-c", connect], stderr=subprocess.PIPE, text=True, check=False, **stranger
        )
        assert "PermissionError" in done.stderr, "the kernel looked at its credentials"
    daemon.stop()


def test_a_socket_somebody_listens_on_is_theirs(daemon: Daemon) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(daemon.socket))
        other.listen(0)
        number = daemon.socket.stat().st_ino
        assert "somebody listens there already" in daemon.refused()
        assert daemon.socket.stat().st_ino == number, "another program's socket is left alone"
        with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
            for waiting in (one, two):  # a peer that takes no connection listens, too
                waiting.setblocking(False)
                waiting.connect_ex(str(daemon.socket))
            assert "somebody listens there already" in daemon.refused()


@pytest.mark.parametrize("what", ["a file", "a directory", "a link"])
def test_nothing_but_a_socket_is_replaced(daemon: Daemon, what: str) -> None:
    target = daemon.dir / "target"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(target))
    {"a file": daemon.socket.touch, "a directory": daemon.socket.mkdir}.get(
        what, lambda: daemon.socket.symlink_to(target)
    )()
    before = daemon.socket.lstat()
    assert "is there already and no socket" in daemon.refused()
    assert daemon.socket.lstat() == before and target.is_socket()


def test_what_came_in_its_place_is_not_removed(daemon: Daemon) -> None:
    daemon.start("")
    daemon.socket.unlink()
    daemon.socket.write_text("mine")
    assert daemon.process is not None
    daemon.process.terminate()
    daemon.process.communicate(timeout=BOUND_S)
    assert daemon.socket.read_text() == "mine"


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"socket_pth": "/run/s"}, "'socket_pth' is not a key; did you mean socket_path?"),
        ({"zzz": 1}, "'zzz' is not a key; known: socket_path, healthcheck_path, log_level, timeout, group"),
        ({"socket_path": "s"}, "socket_path must be an absolute path"),
        ({"socket_path": "/nowhere/s"}, "/nowhere"),
        ({"socket_path": "/tmp/" + "s" * 100}, "is too long for a Unix socket"),
        ({"healthcheck_path": "check.sh"}, "healthcheck_path must be an absolute path"),
        ({"healthcheck_path": "/no/check.sh"}, "/no/check.sh cannot be used: No such file or directory"),
        ({"healthcheck_path": "/etc/passwd"}, "/etc/passwd cannot be executed"),
        ({"healthcheck_path": "/tmp"}, "/tmp cannot be executed"),
        ({"log_level": "loud"}, "log_level must be debug or info"),
        ({"timeout": 0}, "timeout must be a number of seconds > 0"),
        ({"timeout": True}, "timeout must be a number of seconds > 0"),
        ({"timeout": "1h"}, "timeout must be a number of seconds > 0"),
        ({"group": "no-such-group"}, "there is no group 'no-such-group'"),
    ],
)
def test_settings_that_are_wrong_are_told(daemon: Daemon, settings: dict[str, Any], said: str) -> None:
    daemon.settings |= settings
    assert said in daemon.refused()
    assert list(daemon.dir.glob("s*")) == []


@pytest.mark.parametrize("text", ["- a", "a: [", "text", "\tb: 1", "timeout: 1\ntimeout: 2"])
def test_a_file_that_is_none_is_told(daemon: Daemon, text: str) -> None:
    file = daemon.dir / "f.yaml"
    file.write_text(text)
    argv = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "health", "serve", "--config", str(file)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1) and str(file) in done.stderr


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("# nothing\nhealthcheck_path:\n")
    assert config.load(str(tmp_path / "f.yaml")) == ("/var/run/nvhcd.sock", None, "info", 120.0, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="root only distrusts what others can write to")
def test_root_runs_nothing_that_others_can_change(daemon: Daemon) -> None:
    script = daemon.script("echo ran >> log")
    script.chmod(0o777)
    assert "not trusted by root" in daemon.refused()
    script.chmod(0o755)
    daemon.start()
    script.chmod(0o775)
    code, details = daemon.error()
    assert (code, daemon.lines("log")) == ("FAILED_PRECONDITION", []) and "not trusted by root" in details
    script.chmod(0o755)
    assert daemon.answer().success and daemon.lines("log") == ["ran"]
    daemon.stop()
    daemon.dir.chmod(0o777)
    assert "not trusted by root" in daemon.refused()


# --- our own checks ---------------------------------------------------------------------------------------------------


def test_without_a_script_our_own_checks_answer(daemon: Daemon, dgx: Node) -> None:
    daemon.args = ["--sysroot", str(dgx.root)]
    daemon.start()
    found = daemon.answer(*NVRX_ARGS)
    assert (found.success, found.exit_code in (0, 3), found.output) == (True, True, WELL)
    dgx.write("/etc/nvrx/health.yaml", "expect: {cpus: 9999}\n")
    found = daemon.answer("--no-slurm")
    assert (found.success, found.exit_code) == (False, 1)
    assert json.loads(found.output) == {"fail_count": 1, "failed_checks": ["cpu-count"]}
    assert found.error.startswith("cpu-count: ") and "9999" in found.error
    dgx.write("/etc/nvrx/health.yaml", "expect: {cpu: 9999}\n")
    code, details = daemon.error("--no-slurm")
    assert code == "FAILED_PRECONDITION" and "'cpu' is not a key" in details
    daemon.stop()


# --- the documents ----------------------------------------------------------------------------------------------------


def test_the_settings_in_the_docs_are_settings(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", DOCS.read_text(), re.M | re.S)
    (tmp_path / "f.yaml").write_text(text)
    assert config.load(str(tmp_path / "f.yaml")).healthcheck_path == "/usr/local/sbin/nvrx-bcm-healthcheck-wrapper.sh"


@pytest.mark.parametrize(("bcm", "count"), [("exit 0", 0), ("echo 2 GPUs are gone >&2; exit 1", 1)])
def test_the_wrapper_in_the_docs_works(daemon: Daemon, bcm: str, count: int) -> None:
    (text,) = re.findall(r"^```sh wrapper\n(.*?)^```", DOCS.read_text(), re.M | re.S)
    script = daemon.script("")
    checks = daemon.dir / "bcm"
    checks.write_text(f'#!/bin/sh\nset > {daemon.dir}/env\necho "$@" > {daemon.dir}/args\n{bcm}\n')
    checks.chmod(0o755)
    assert "/path/to/bcm-healthcheck" in text
    script.write_text(text.replace("/path/to/bcm-healthcheck", str(checks)))
    found = daemon.start().answer("--no-slurm")
    assert (found.success, json.loads(found.output)["fail_count"]) == (not count, count)
    assert found.error == ("2 GPUs are gone" if count else "")
    assert daemon.lines("args") == ["--no-slurm"]
    assert any(line.startswith("SLURMD_NODENAME=") for line in daemon.lines("env"))
    daemon.stop()


def test_the_unit_starts_what_there_is() -> None:
    unit = (DOCS.parents[1] / "prolog" / "nvrx-health.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S+/nvrx (.*)$", unit, re.M)
    argv = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", *command.split()[:2], "--help"]
    help_text = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_S, check=True).stdout
    assert all(word in help_text for word in command.split() if word.startswith("--"))


def test_a_client_learns_what_the_daemon_found(daemon: Daemon) -> None:
    """The check `node-service` and the daemon, as in a job."""
    daemon.start("""echo '{"fail_count": 1, "failed_checks": ["ib"]}'; echo "$@" >&2; exit 1""")
    argv = [sys.executable, "-I", "-m", "nvrx_slurm.health", "--when", "gate", "--only", "node-service"]
    argv += ["--expect", f"node_service=unix://{daemon.socket}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_S, check=False)
    (finding,) = json.loads(done.stdout)["findings"]
    assert (done.returncode, finding["text"]) == (1, "fail_count is 1 (ib): --no-slurm")
    daemon.stop()
