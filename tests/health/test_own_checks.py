"""Checks of a site: executables that behave, and executables that do not."""

import os
import signal
from pathlib import Path

import pytest
from recorded import F, P, U, ended
from waits import WAIT_S

from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import policy, runner
from nvrx_slurm.health.check import NodeView

pytestmark = pytest.mark.process


def script(tmp_path, body):
    file = tmp_path / "own.sh"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return str(file)


def run(bare, own):
    return of_site(bare, bare.site(own=[{"name": "mine", **own}]))


def of_site(bare, site):
    """The finding of `mine`, whose child is forked from this process."""
    plan = policy.select("manual", only=["mine"], config=site, sysroot=str(bare.root))
    (finding,) = runner.run(plan.checks, NodeView(str(bare.root)), plan.expected, WAIT_S).findings
    return finding.verdict, finding.text


@pytest.mark.parametrize(
    "body, verdict, text",
    [
        ("echo all well; exit 0", P, "all well"),
        ("echo; echo disk 3 is gone; echo more; exit 1", F, "disk 3 is gone"),
        ("exit 7", U, "exit code 7, not 0, 1 or 2"),
        ("kill -9 $$", U, "ended by signal 9"),
        ("printf '\\033[31m\\377\\001 red'; exit 1", F, "?[31m\ufffd? red"),
        ("echo PATH=$PATH HOME=$HOME", P, "PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME="),
        ("head -c 1000000000 /dev/zero; exit 1", F, "?" * 397 + "..."),
    ],
)
def test_exit_code_and_first_line(bare, tmp_path, body, verdict, text):
    assert run(bare, {"run": script(tmp_path, body), "budget": 60}) == (verdict, text)


def test_one_that_never_ends_is_unknown_and_ended(bare, tmp_path):
    pid = tmp_path / "pid"
    body = f"echo $$ > {pid}; trap '' TERM; echo begun; while :; do read x < /dev/zero; done"
    assert run(bare, {"run": script(tmp_path, body), "budget": 1}) == (U, "timed out: begun")
    assert ended(int(pid.read_text()))


def test_one_that_cannot_be_run_is_unknown(bare):
    for path, said in (("/nowhere/own.sh", "cannot be used: No such file"), ("/etc", "cannot be executed")):
        verdict, text = run(bare, {"run": path})
        assert verdict is U and f"{path} {said}" in text


@pytest.mark.skipif(os.geteuid() != 0, reason="root only distrusts what others can write to")
def test_root_runs_nothing_that_others_can_change(bare, tmp_path):
    ran = tmp_path / "ran"
    file = Path(script(tmp_path, f"echo ran >>{ran}; exit 0"))
    site = bare.site(own=[{"name": "mine", "run": str(file)}])
    file.chmod(0o777)
    verdict, text = of_site(bare, site)
    assert verdict is U and "not trusted by root" in text
    file.chmod(0o755)
    Path(site).chmod(0o666)
    with pytest.raises(UsageError, match=f"{site} is not trusted by root"):
        of_site(bare, site)
    assert not ran.exists()
    Path(site).chmod(0o644)
    assert of_site(bare, site)[0] is P and ran.exists()


# A process of the command's own group, one of another session, and one whose parent has gone.
LEAVES = """
exec 3<>{up}
sleep 600 & echo $! >>{pids}
setsid sh -c 'echo $$ >>{pids}; echo >&3; exec sleep 600' &
( setsid sh -c 'echo $$ >>{pids}; echo >&3; exec sleep 600' & )
read x <&3; read x <&3
echo $$ >>{pids}; echo >{go}
wait
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_program_ends_all_that_its_checks_have_started(bare, tmp_path, signum):
    pids, up, go = (tmp_path / name for name in ("pids", "up", "go"))
    os.mkfifo(up)
    os.mkfifo(go)
    own = {"name": "mine", "run": script(tmp_path, LEAVES.format(pids=pids, up=up, go=go)), "budget": 600}
    process = bare.start("--only", "mine", "--deadline", "600", "--config", bare.site(own=[own]))
    assert go.read_text() == "\n"  # to its end: SIGPIPE would end a script whose reader has gone
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 4 and all(os.path.exists(f"/proc/{pid}") for pid in started)
    process.send_signal(signum)
    process.communicate(timeout=WAIT_S)
    assert all(ended(pid) for pid in started)
