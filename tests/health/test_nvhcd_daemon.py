"""`nvrx health serve`: a real daemon on a real socket: its answers, its socket, and what it leaves behind."""

from __future__ import annotations

import grp
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from nvhcd_harness import BOUND_S, WELL, Daemon, call_of, pb
from recorded import Node, ended

from nvrx_slurm.config import nvhcd as config
from nvrx_slurm.errors import UsageError
from nvrx_slurm.health.service import daemon as service

pytestmark = pytest.mark.xdist_group("nvhcd daemon")  # most tests share one

UNREADABLE = '{"fail_count": 1, "failed_checks": ["its output cannot be read"]}'
DOCS = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "serve-node-health.md"


@pytest.fixture(scope="module")
def shared() -> Iterator[Daemon]:
    """One daemon for all tests that neither end nor configure it."""
    daemon = Daemon()
    yield daemon.start("")
    daemon.stop()
    daemon.close()


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (f"echo '{WELL}'", (True, 0, WELL, "")),
        ("""echo '{"fail_count": 1, "more": 2}'; echo why >&2; exit 1""",
         (False, 1, '{"fail_count": 1, "more": 2}', "why")),
        ("""echo checking; echo '{"fail_count": 3}'""", (True, 0, '{"fail_count": 3}', "")),
        (f"""echo '{WELL}'; echo '{{"fail_count": 2}}'; echo""", (True, 0, '{"fail_count": 2}', "")),
        ("""printf '{\n "fail_count":\n 2}\nDone.\n'""", (True, 0, UNREADABLE, "")),
        (f"head -c 30000000 /dev/zero; head -c 30000000 /dev/zero >&2; echo; echo '{WELL}'",
         (True, 0, WELL, "\0" * 16384)),
    ],
)  # fmt: skip
def test_the_answer_is_the_scripts(shared: Daemon, body: str, answer: tuple[bool, int, str, str]) -> None:
    shared.script(body)
    found = shared.answer("--no-slurm")
    assert (found.success, found.exit_code, found.output, found.error) == answer


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("#!/bin/bash\necho so far >&2; kill -9 $$", "ABORTED", "signal 9: so far"),
        ("#!/bin/bash\nexec /no/such/program", "FAILED_PRECONDITION", "cannot be executed"),
    ],
)
def test_a_script_that_cannot_tell_is_no_answer(shared: Daemon, text: str, status: str, said: str) -> None:
    """To a client a failed call is unknown: the node stays in use."""
    shared.script("").write_text(text)
    code, details = shared.error()
    assert code == status and said in details


def test_arguments_are_handed_on(shared: Daemon) -> None:
    shared.script("""printf '%s\n' "$@" >> args""")
    given = [["--no-slurm"], ["--no-slurm", "--group", "prolog", "epilog", "logs", "gpu"], ["a" * 256, *["b"] * 63]]
    for args in given:
        assert shared.answer(*args).success
    assert shared.lines("args") == [word for args in given for word in args]


def test_strange_arguments_are_refused(shared: Daemon) -> None:
    shared.script("echo begun >> log")
    for args in (["a"] * 65, ["a" * 257], ["a\0b"], ["a\nb"], ["$(id)"], ["a b"], ["a;b"], [""], ["\u00e9"], ["'"]):
        assert shared.error(*args)[0] == "INVALID_ARGUMENT", args
    assert shared.error("a" * (1 << 20))[0] == "RESOURCE_EXHAUSTED"
    assert shared.lines("log") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="root only distrusts what others can write to")
def test_root_runs_no_script_that_others_can_change(shared: Daemon) -> None:
    shared.script("echo ran >> log").chmod(0o775)
    code, details = shared.error()
    assert (code, shared.lines("log")) == ("FAILED_PRECONDITION", []) and "not trusted" in details


# --- one at a time ----------------------------------------------------------------------------------------------------

BLOCKING = """
n=$(wc -l < log 2>/dev/null || echo 0)
echo start >> log
read x < go
echo stop >> log
echo "{\\"fail_count\\": 0, \\"run\\": $((n / 2 + 1))}"
"""


def test_equal_questions_share_a_run_that_begins_after_them(shared: Daemon) -> None:
    """The first run began before the fifty asked, so it is not theirs."""
    shared.script(BLOCKING)
    go = shared.fifo("go")
    request = pb.HealthCheckRequest(args=["equal"])
    first = shared.ask.future(request, timeout=BOUND_S)
    shared.wait_for("check.sh, equal")
    with shared.connected(25) as asks:
        fifty = [ask.future(request, timeout=BOUND_S) for ask in asks * 2]
        shared.wait_for("asked with ('equal'", 50)
        for waiting in (first, fifty[0]):
            go.write_text("\n")  # the script has opened it, too
            waiting.result()
        runs = [json.loads(call.result().output)["run"] for call in (first, *fifty)]
    assert runs == [1] + [2] * 50
    assert shared.lines("log") == ["start", "stop"] * 2


def test_different_questions_wait_and_too_many_are_refused(shared: Daemon) -> None:
    shared.script(BLOCKING)
    go = shared.fifo("go")
    first = shared.ask.future(pb.HealthCheckRequest(args=["different"]), timeout=BOUND_S)
    shared.wait_for("check.sh, different")
    with shared.connected(4) as asks:
        others = []
        for n in range(16):  # in this order
            others.append(asks[n // 4].future(pb.HealthCheckRequest(args=[str(n)]), timeout=BOUND_S))
            shared.wait_for(f"asked with ('{n}'")
        code, details = shared.error("one", "more")
        assert code == "UNAVAILABLE" and "too many" in details
        for call in (first, *others):
            go.write_text("\n")
            assert call.result().success
    assert shared.lines("log") == ["start", "stop"] * 17


# --- processes --------------------------------------------------------------------------------------------------------

LEAVES = "setsid sh -c 'echo $$ > pid; echo > go; exec sleep 600' & read x < go"  # with our stdout and stderr open
NEVER = f"trap '' TERM; echo $$ > own; {LEAVES}; echo stuck >&2; echo > ready; while :; do read x < go; done"


def test_a_process_that_keeps_the_output_open_is_killed(shared: Daemon) -> None:
    shared.script(LEAVES)
    shared.fifo("go")
    assert shared.answer().success
    assert ended(int(*shared.lines("pid")))


def test_a_script_that_never_ends_is_killed_with_all_it_started(daemon: Daemon) -> None:
    daemon.settings["timeout"] = 3  # enough to begin on a busy machine
    daemon.start(NEVER.replace("echo > ready; ", ""))
    daemon.fifo("go")
    code, details = daemon.error()
    assert code == "ABORTED" and details.endswith("killed: stuck")
    assert ended(int(*daemon.lines("pid"))) and ended(int(*daemon.lines("own")))
    daemon.script("")
    assert daemon.answer().success


def begun(daemon: Daemon) -> grpc.Future:
    """A call whose script runs, and has started another process in a session of its own."""
    daemon.start(NEVER)
    daemon.fifo("go")
    ready = daemon.fifo("ready")
    asking = daemon.ask.future(pb.HealthCheckRequest(), timeout=BOUND_S)
    ready.read_text()
    return asking


def test_sigterm_during_a_run_leaves_nothing(daemon: Daemon) -> None:
    asking = begun(daemon)
    waiting = daemon.ask.future(pb.HealthCheckRequest(args=["next"]), timeout=BOUND_S)
    daemon.wait_for("asked with", 2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(daemon.socket))
        daemon.stop()
    for call in (asking, waiting):
        assert call.code() is grpc.StatusCode.UNAVAILABLE and "stopped" in call.details()
    assert ended(int(*daemon.lines("pid"))) and ended(int(*daemon.lines("own")))


def test_a_killed_daemon_takes_its_script_along_and_its_socket_is_replaced(daemon: Daemon) -> None:
    asking = begun(daemon)
    assert daemon.process is not None
    daemon.process.kill()
    daemon.process.wait(BOUND_S)
    assert asking.code() is grpc.StatusCode.UNAVAILABLE
    assert ended(int(*daemon.lines("own"))) and daemon.socket.is_socket()
    os.kill(int(*daemon.lines("pid")), signal.SIGKILL)
    daemon.start("")
    with grpc.insecure_channel(f"unix:{daemon.socket}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        assert call_of(channel)(pb.HealthCheckRequest(), timeout=BOUND_S).success
    daemon.stop()


STUCK = """
import asyncio, os, signal, sys
from nvrx_slurm.health.service import runs as module
from nvrx_slurm.child import bounded_process

bounded_process.REAP_S = 0.2
killpg, kill = os.killpg, os.kill
os.killpg = os.kill = lambda pid, signum: None  # as if the process were blocked in the kernel
signal.pidfd_send_signal = lambda *args: None

async def main():
    runs = module.Runs(module.Script(sys.argv[1]), 1.0, {})
    print((await runs.ask(())).text)
    print((await runs.ask(())).text)
    kill(runs._pid, signal.SIGKILL)
    os.waitid(os.P_PID, runs._pid, os.WEXITED | os.WNOWAIT)
    print((await runs.ask(("well",))).success)
    await runs.stop()

asyncio.run(main())
"""


def test_beside_a_process_that_cannot_be_ended_none_is_started(daemon: Daemon) -> None:
    script = daemon.script('echo $$ >> own; [ -n "$1" ] || exec sleep 600')
    done = subprocess.run(
        [sys.executable, "-I", "-c", STUCK, str(script)], stdout=subprocess.PIPE, text=True, timeout=BOUND_S, check=True
    )
    stuck, well = daemon.lines("own")
    first, second, third = done.stdout.splitlines()
    assert "did not end" in first and f"process {stuck}" in second and third == "True"
    assert ended(int(stuck)) and ended(int(well))


# --- the socket -------------------------------------------------------------------------------------------------------

CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


def connects(path: Path, *groups: int) -> bool:
    """Whether a user who is in these groups only gets a connection."""
    argv = ["/usr/bin/python3", "-I", "-c", CONNECT, str(path)]
    who = {"user": 65534, "group": 65534, "extra_groups": list(groups)}
    return not subprocess.run(argv, stderr=subprocess.DEVNULL, timeout=BOUND_S, check=False, **who).returncode


@pytest.mark.parametrize("group", ["", "daemon"])
def test_the_group_may_ask_or_everybody(daemon: Daemon, shared: Daemon, group: str) -> None:
    shared.script("")
    one = shared
    if group:
        daemon.settings["group"] = group
        one = daemon.start("")
    found = one.socket.stat()
    assert stat.S_IMODE(found.st_mode) == (0o660 if group else 0o666)
    assert found.st_gid == (grp.getgrnam(group).gr_gid if group else os.getegid())
    if os.geteuid() == 0:
        assert connects(one.socket) == (not group)
        assert connects(one.socket, 7001, grp.getgrnam("daemon").gr_gid)
    assert one.answer().success


def refused(daemon: Daemon) -> str:
    """The sentence with which it does not start; in this process."""
    file = daemon.dir / "nvhcd.yaml"
    file.write_text(json.dumps(daemon.settings))
    with pytest.raises(UsageError) as error:
        service.main(str(file))
    return str(error.value)


def test_a_socket_on_which_a_process_listens_is_left_alone(daemon: Daemon) -> None:
    with (
        socket.socket(socket.AF_UNIX) as other,
        socket.socket(socket.AF_UNIX) as one,
        socket.socket(socket.AF_UNIX) as two,
    ):
        other.bind(str(daemon.socket))
        other.listen(0)
        number = daemon.socket.stat().st_ino
        assert "listens there already" in refused(daemon)
        for waiting in (one, two):  # a peer that takes no connection listens, too
            waiting.setblocking(False)
            waiting.connect_ex(str(daemon.socket))
        assert "listens there already" in refused(daemon)
        assert daemon.socket.stat().st_ino == number


def test_only_a_dead_socket_is_replaced(daemon: Daemon) -> None:
    for make in (daemon.socket.touch, lambda: daemon.socket.symlink_to("kept")):
        make()
        assert "not a socket" in refused(daemon)
        daemon.socket.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(daemon.socket))
    assert daemon.start("").answer().success


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"socket_pth": "/run/s"}, "did you mean socket_path"),
        ({"socket_path": "/tmp/" + "s" * 103}, "107 bytes"),
        ({"healthcheck_path": "check.sh"}, "healthcheck_path must"),
        ({"healthcheck_path": "/etc/passwd"}, "cannot be executed"),
        ({"group": "no-such-group"}, "no group 'no-such-group'"),
    ],
)
def test_wrong_settings_are_told(daemon: Daemon, settings: dict[str, object], said: str) -> None:
    daemon.settings |= settings
    assert said in refused(daemon) and list(daemon.dir.glob("s*")) == []


def test_a_file_that_is_none_is_told_and_an_empty_one_means_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    for text in ("- a", "a: [", "timeout: 1\ntimeout: 2", "\udcff: 1"):
        file.write_text(text, errors="surrogateescape")
        with pytest.raises(UsageError, match="f.yaml"):
            service.main(str(file))
    file.write_text("# nothing\nhealthcheck_path:\n")
    assert config.load(str(file)) == ("/var/run/nvhcd.sock", None, "info", 120.0, None)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UsageError, match="f.yaml"):
        service.main(str(file))


# --- our own checks, and the documents --------------------------------------------------------------------------------


def test_without_a_script_our_own_checks_answer(daemon: Daemon, dgx: Node) -> None:
    daemon.args = ["--sysroot", str(dgx.root)]
    daemon.start()
    found = daemon.answer("--no-slurm")
    assert (found.success, found.exit_code in (0, 3), found.output) == (True, True, WELL)
    dgx.write("/etc/nvrx/health.yaml", "expect: {cpus: 9999}\nchecks: {cpu-count: {when: [preflight]}}\n")
    found = daemon.answer("--no-slurm")
    assert (found.success, found.exit_code) == (False, 1)
    assert json.loads(found.output) == {"fail_count": 1, "failed_checks": ["cpu-count"]} and "9999" in found.error
    dgx.write("/etc/nvrx/health.yaml", "expect: {cpu: 9999}\n")
    code, details = daemon.error("--no-slurm")
    assert code == "FAILED_PRECONDITION" and "'cpu'" in details


@pytest.mark.parametrize(("bcm", "count"), [("exit 0", 0), ("echo 2 GPUs are gone >&2; exit 1", 1)])
def test_the_wrapper_in_the_docs_works(shared: Daemon, bcm: str, count: int) -> None:
    (text,) = re.findall(r"^```sh wrapper\n(.*?)^```", DOCS.read_text(), re.M | re.S)
    script = shared.script("")
    checks = shared.dir / "bcm"
    checks.write_text(f'#!/bin/sh\nset > {shared.dir}/env\necho "$@" > {shared.dir}/args\n{bcm}\n')
    checks.chmod(0o755)
    script.write_text(text.replace("/path/to/bcm-healthcheck", str(checks)))
    found = shared.answer("--no-slurm")
    assert (found.success, json.loads(found.output)["fail_count"]) == (not count, count)
    assert found.error == ("2 GPUs are gone" if count else "") and shared.lines("args") == ["--no-slurm"]
    assert any(line.startswith("SLURMD_NODENAME=") for line in shared.lines("env"))
