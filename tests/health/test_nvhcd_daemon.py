"""`nvrx health serve`: a real daemon on a real socket, asked by a real client: what it answers, and what it leaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from nvhcd_harness import BOUND_S, NVRX_ARGS, WELL, Daemon
from recorded import Node, ended

from nvrx_slurm.config import nvhcd as config
from nvrx_slurm.health.checks.node_service import METHOD
from nvrx_slurm.health.service import nvhcd_pb2 as pb

UNREADABLE = '{"fail_count": 1, "failed_checks": ["its output cannot be read"]}'
DOCS = Path(__file__).resolve().parents[2] / "docs" / "nvhcd.md"


# --- what the script says ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (f"echo '{WELL}'", (True, 0, WELL, "")),
        ("""echo '{"fail_count": 1, "more": 2}'; echo why >&2; exit 1""",
         (False, 1, '{"fail_count": 1, "more": 2}', "why")),
        ("""echo checking; echo '{"fail_count": 3}'""", (True, 0, '{"fail_count": 3}', "")),
        ("""printf '{\n "fail_count":\n 0}\n'""", (True, 0, '{\n "fail_count":\n 0}', "")),
        ("""echo '{"fail_count": 2}'; echo Done.""", (True, 0, '{"fail_count": 2}', "")),
        (f"""echo '{WELL}'; echo '{{"fail_count": 2}}'; echo""", (True, 0, '{"fail_count": 2}', "")),
        ("""printf '{\n "fail_count":\n 2}\nDone.\n'""", (True, 0, UNREADABLE, "")),
        ("""echo '{"fail_count": 0, "failed_che'""", (True, 0, UNREADABLE, "")),
        ("""echo "{'fail_count': 2}" """, (True, 0, UNREADABLE, "")),
        ("""echo '{"fails": 2}'""", (True, 0, UNREADABLE, "")),
        ("""echo '{"fail_count": 1e999'; exit 3""",
         (False, 3, '{"fail_count": 1, "failed_checks": ["exit code 3"]}', "")),
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
    with daemon.connected(25) as asks:
        fifty = [ask.future(request, timeout=BOUND_S) for ask in asks * 2]
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
    with daemon.connected(4) as asks:
        others = []
        for n, ask in enumerate(asks):  # in this order
            others.append(ask.future(pb.HealthCheckRequest(args=[str(n)]), timeout=BOUND_S))
            daemon.wait_for("asked with")
        assert daemon.error("one", "more") == ("UNAVAILABLE", "too many different health checks are waiting")
        for call in (first, *others):
            with open(daemon.dir / "go", "w") as go:
                go.write("\n")
            assert call.result().success
    assert daemon.lines("log") == ["start", "stop"] * 5


# --- what scripts leave -----------------------------------------------------------------------------------------------

LEAVES = "setsid sh -c 'echo $$ > pid; echo > go; exec sleep 600' & read x < go"  # with our stdout and stderr open


def test_a_script_that_never_ends_is_ended_with_all_it_started(daemon: Daemon) -> None:
    os.mkfifo(daemon.dir / "go")
    daemon.settings["timeout"] = 5  # enough to begin on a busy machine
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


STUCK = """
import asyncio, os, signal, sys
from nvrx_slurm.health.service import runs as nvhcd_runs
from nvrx_slurm.system.processes import Child

Child.signal_group = lambda self, signum: None  # as if it were blocked in the kernel
nvhcd_runs._REAP_S = 0.2

async def main():
    runs = nvhcd_runs.Runs(nvhcd_runs.Script(sys.argv[1]), 5.0, {})
    working = asyncio.ensure_future(runs.work())
    print((await runs.ask((), 0)).text)
    print((await runs.ask((), 0)).text)
    os.kill(runs._child.pid, signal.SIGKILL)
    print((await runs.ask(("well",), 0)).success)
    await runs.stop(working)

asyncio.run(main())
"""


def test_beside_a_process_that_cannot_be_ended_none_is_started(daemon: Daemon) -> None:
    script = daemon.script('echo $$ >> own; [ -n "$1" ] || exec sleep 600')
    done = subprocess.run(
        [sys.executable, "-I", "-c", STUCK, str(script)], stdout=subprocess.PIPE, text=True, timeout=BOUND_S, check=True
    )
    stuck, well = daemon.lines("own")
    first, second, third = done.stdout.splitlines()
    assert first.endswith("did not end in time and was killed")
    assert second == f"process {stuck} of an earlier run is blocked in the kernel and cannot be ended"
    assert third == "True" and ended(int(stuck)) and ended(int(well))


# --- our own checks ---------------------------------------------------------------------------------------------------


def test_without_a_script_our_own_checks_answer(daemon: Daemon, dgx: Node) -> None:
    daemon.args = ["--sysroot", str(dgx.root)]
    daemon.start()
    found = daemon.answer(*NVRX_ARGS)
    assert (found.success, found.exit_code in (0, 3), found.output) == (True, True, WELL)
    dgx.write("/etc/nvrx/health.yaml", "expect: {cpus: 9999}\nchecks: {cpu-count: {when: [preflight]}}\n")
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
    argv = [sys.executable, "-I", "-m", "nvrx_slurm.health", "--when", "preflight", "--only", "node-service"]
    argv += ["--expect", f"node_service=unix://{daemon.socket}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_S, check=False)
    (finding,) = json.loads(done.stdout)["findings"]
    assert (done.returncode, finding["text"]) == (1, "fail_count is 1 (ib): --no-slurm")
    daemon.stop()
