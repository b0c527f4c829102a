"""`nvrx health serve`: a real daemon on a real socket: its answers, its socket, and what it leaves behind."""

import grp
import json
import os
import re
import signal
import socket
import stat
import subprocess
from pathlib import Path

import grpc
import pytest
from nvhcd_harness import WELL, pb, running
from recorded import ended
from waits import WAIT_S

from nvrx_slurm.config import nvhcd as config
from nvrx_slurm.errors import UsageError
from nvrx_slurm.health.service import daemon as service

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("nvhcd daemon")]  # most tests share one

UNREADABLE = '{"fail_count": 1, "failed_checks": ["its output cannot be read"]}'
DOCS = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "serve-node-health.md"


shared = pytest.fixture(running, scope="module")  # for all tests that neither end nor configure it


@pytest.mark.parametrize(
    "body, answer",
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
def test_the_answer_is_the_scripts(shared, body, answer):
    shared.script(body)
    found = shared.answer("--no-slurm")
    assert (found.success, found.exit_code, found.output, found.error) == answer


@pytest.mark.parametrize(
    "body, said",
    [("echo so far >&2; kill -9 $$", "signal 9: so far"), ("exec /no/such/program", "cannot be executed")],
)
def test_a_script_that_cannot_tell_is_no_answer(shared, body, said):
    """To a client a failed call is unknown: the node stays in use."""
    shared.script(body)
    code, details = shared.error()
    assert code == "ABORTED" and said in details


def test_only_words_that_were_listed_are_handed_on(shared):
    shared.script("""printf '%s\n' "$@" >> args""")
    given = [["--no-slurm"], ["--no-slurm", "--group", "prolog", "gpu"], ["a" * 256, *["b"] * 63]]
    for args in given:
        assert shared.answer(*args).success
    for args in (["a"] * 65, ["a" * 257], ["a\0b"], ["a\nb"], ["$(id)"], ["a b"], ["a;b"], [""], ["-"], ["--group=x"]):
        assert shared.error(*args)[0] == "INVALID_ARGUMENT", args
    assert shared.error("x" * (1 << 20))[0] == "RESOURCE_EXHAUSTED"
    assert shared.lines("args") == [word for args in given for word in args]


def test_runs_take_place_one_after_the_other(shared):
    """Each call has a run of its own; one whose client has given up has none."""
    shared.script("echo start $1 >> log; read x < go; echo stop >> log")
    go = shared.fifo("go")
    first, gone, last = [shared.ask.future(pb.HealthCheckRequest(args=[word]), timeout=WAIT_S) for word in "abc"]
    shared.wait_for("check.sh")
    gone.cancel()
    for call in (first, last):
        go.write_text("\n")  # the script has opened it, too
        assert call.result().success
    assert sorted(shared.lines("log")) == sorted(["start a", "stop", "start c", "stop"])


LEAVES = "setsid sh -c 'echo $$ > pid; echo > go; exec sleep 600' & read x < go"  # with our stdout and stderr open
NEVER = f"trap '' TERM; echo $$ > own; {LEAVES}; echo stuck >&2; echo > ready; while :; do read x < go; done"


def all_ended(daemon, *files):
    """Whether the processes end whose pids are in these files."""
    return all(ended(int(*daemon.lines(name))) for name in files)


def test_a_process_that_keeps_the_output_open_is_killed(shared):
    shared.script(LEAVES)
    shared.fifo("go")
    assert shared.answer().success
    assert all_ended(shared, "pid")


def test_a_script_that_never_ends_is_killed_with_all_it_started(daemon):
    daemon.settings["timeout"] = 3  # enough to begin on a busy machine
    daemon.start(NEVER.replace("echo > ready; ", ""))
    daemon.fifo("go")
    code, details = daemon.error()
    assert code == "ABORTED" and details.endswith("killed: stuck")
    assert all_ended(daemon, "pid", "own")
    daemon.script("")
    assert daemon.answer().success


def begun(daemon):
    """A call whose script runs, and has started another process in a session of its own."""
    daemon.start(NEVER)
    daemon.fifo("go")
    ready = daemon.fifo("ready")
    asking = daemon.ask.future(pb.HealthCheckRequest(), timeout=WAIT_S)
    ready.read_text()
    return asking


def test_sigterm_during_a_run_leaves_nothing(daemon):
    asking = begun(daemon)
    waiting = daemon.ask.future(pb.HealthCheckRequest(args=["next"]), timeout=WAIT_S)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(daemon.socket))
        daemon.stop()
    for call in (asking, waiting):
        assert call.exception() is not None
    assert all_ended(daemon, "pid", "own")


def test_a_killed_daemon_takes_its_script_along_and_its_socket_is_replaced(daemon):
    asking = begun(daemon)
    daemon.process.kill()
    daemon.process.wait(WAIT_S)
    assert asking.code() is grpc.StatusCode.UNAVAILABLE
    assert all_ended(daemon, "own") and daemon.socket.is_socket()
    os.kill(int(*daemon.lines("pid")), signal.SIGKILL)
    daemon.start("")
    daemon.stop()


def test_beside_a_process_that_cannot_be_ended_none_is_started(daemon):
    script = daemon.script("echo begun >> log")
    runs = service.Runs(config.NvhcdFile(healthcheck_path=str(script)), "/")
    with subprocess.Popen(["/bin/sleep", "600"]) as stuck:
        runs._blocked = stuck.pid
        with pytest.raises(UsageError, match=f"process {stuck.pid} of an earlier run is blocked"):
            runs.answer(())
        assert daemon.lines("log") == []
        stuck.kill()


@pytest.mark.parametrize(
    "may, mode", [({}, 0o600), ({"group": "daemon"}, 0o660), ({"everybody": True}, 0o666)], ids=str
)
def test_who_may_ask(daemon, may, mode):
    """Of a file that lists no words a call may have one, NVRx's own."""
    daemon.settings |= may
    del daemon.settings["args"]
    found = daemon.start("""echo "$@" > args""").socket.stat()
    assert stat.S_IMODE(found.st_mode) == mode
    assert found.st_gid == (grp.getgrnam(may["group"]).gr_gid if "group" in may else os.getegid())
    assert daemon.answer("--no-slurm").success and daemon.lines("args") == ["--no-slurm"]
    assert daemon.error("gpu")[0] == "INVALID_ARGUMENT"


def refused(daemon):
    """The sentence with which it does not start; in this process."""
    file = daemon.dir / "nvhcd.yaml"
    file.write_text(json.dumps(daemon.settings))
    with pytest.raises(UsageError) as error:
        service.main(str(file))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return str(error.value)


def test_only_a_dead_socket_is_replaced(daemon):
    for make in (daemon.socket.touch, lambda: daemon.socket.symlink_to("kept")):
        make()
        assert "not a socket" in refused(daemon)
        daemon.socket.unlink()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(daemon.socket))
        other.listen(0)
        assert "listens there already" in refused(daemon) and daemon.socket.is_socket()
    assert daemon.start("").answer().success


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"socket_pth": "/run/s"}, "did you mean socket_path"),
        ({"socket_path": "/tmp/" + "s" * 103}, "107 bytes"),
        ({"healthcheck_path": "check.sh"}, "healthcheck_path must"),
        ({"healthcheck_path": "/etc/passwd"}, "cannot be executed"),
        ({"args": ["$(id)"]}, "args must have words of"),
        ({"group": "no-such-group"}, "no such group: 'no-such-group'"),
    ],
)
def test_wrong_settings_are_told(daemon, settings, said):
    daemon.settings |= settings
    assert said in refused(daemon) and list(daemon.dir.glob("s*")) == []


def test_without_a_script_our_own_checks_answer(daemon, dgx):
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
    assert code == "ABORTED" and "'cpu'" in details


@pytest.mark.parametrize("bcm, count", [("exit 0", 0), ("echo 2 GPUs are gone >&2; exit 1", 1)])
def test_the_wrapper_in_the_docs_works(shared, bcm, count):
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
