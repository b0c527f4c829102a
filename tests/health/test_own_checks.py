"""Checks of a site: executables that behave and that do not, and Python ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded import BOUND_S, Node, ended

from nvrx_slurm.health.check import Verdict


def script(tmp_path: Path, body: str) -> str:
    file = tmp_path / "own.sh"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return str(file)


def run(dgx: Node, own: dict[str, object]) -> tuple[Verdict, str]:
    return of_program(dgx, dgx.site(own=[{"name": "mine", **own}]))


def of_program(dgx: Node, site: str) -> tuple[Verdict, str]:
    _, report = dgx.program("--only", "mine", "--config", site)
    (finding,) = report.findings
    return finding.verdict, finding.text


@pytest.mark.parametrize(
    ("body", "verdict", "text"),
    [
        ("echo all well; exit 0", Verdict.PASS, "all well"),
        ("exit 0", Verdict.PASS, "exit code 0"),
        ("echo; echo disk 3 is gone; echo more; exit 1", Verdict.FAIL, "disk 3 is gone"),
        ("echo cannot tell >&2; exit 2", Verdict.UNKNOWN, "cannot tell"),
        ("echo careful >&2; echo fan 2 stands; exit 1", Verdict.FAIL, "fan 2 stands"),
        ("exit 7", Verdict.UNKNOWN, "exit code 7, not 0, 1 or 2"),
        ("kill -9 $$", Verdict.UNKNOWN, "ended by signal 9"),
        ("printf '\\033[31m\\377\\001 red'; exit 1", Verdict.FAIL, "?[31m\ufffd? red"),
        ("read line; echo got $line", Verdict.PASS, "got"),
        ("echo PATH=$PATH HOME=$HOME", Verdict.PASS, "PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME="),
        ("head -c 1000000000 /dev/zero; exit 1", Verdict.FAIL, "?" * 397 + "..."),
    ],
)
def test_exit_code_and_first_line(dgx: Node, tmp_path: Path, body: str, verdict: Verdict, text: str) -> None:
    assert run(dgx, {"run": script(tmp_path, body), "budget": 60}) == (verdict, text)


def test_one_that_never_ends_is_unknown_and_ended(dgx: Node, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    body = f"echo $$ > {pid}; trap '' TERM; echo begun; while :; do read x < /dev/zero; done"
    assert run(dgx, {"run": script(tmp_path, body), "budget": 1}) == (Verdict.UNKNOWN, "timed out: begun")
    assert ended(int(pid.read_text()))


@pytest.mark.parametrize("last", ["exit 1", "sleep 600"])
def test_one_that_leaves_processes_in_other_sessions_leaves_none(dgx: Node, tmp_path: Path, last: str) -> None:
    """Not of the same group, and their parent has gone: found all the same."""
    pids, go = tmp_path / "pids", tmp_path / "go"
    os.mkfifo(go)
    escapes = f"setsid sh -c 'echo $$ >> {pids}; echo > {go}; sleep 600' > /dev/null 2>&1 &"
    body = f"( {escapes} )\nread x < {go}\necho left one; {last}"
    run(dgx, {"run": script(tmp_path, body), "budget": 3})
    (pid,) = pids.read_text().split()
    assert ended(int(pid))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({"run": "/nowhere/own.sh"}, "/nowhere/own.sh cannot be used: No such file or directory"),
        ({"run": "/etc"}, "/etc cannot be executed"),
        ({"run": "/etc/passwd"}, "/etc/passwd cannot be executed"),
    ],
)
def test_one_that_cannot_be_run_is_unknown_and_the_others_are_looked_at(
    dgx: Node, own: dict[str, object], said: str
) -> None:
    dgx.write("/sys/fs/lustre/health_check", "NOT HEALTHY\n")
    mine = {"name": "mine", **own}
    code, report = dgx.program("--only", "mine", "--only", "lustre", "--config", dgx.site(own=[mine]))
    found = {finding.check: finding for finding in report.findings}
    assert found["mine"].verdict is Verdict.UNKNOWN and said in found["mine"].text
    assert found["lustre"].verdict is Verdict.FAIL and code == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="root only distrusts what others can write to")
def test_root_runs_nothing_that_others_can_change(dgx: Node, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "bin").mkdir(mode=0o755)
    file = Path(script(tmp_path / "bin", f"echo ran >>{ran}; exit 0"))
    site = dgx.site(own=[{"name": "mine", "run": str(file)}])
    for make in (
        lambda: file.chmod(0o777),
        lambda: (file.chmod(0o755), os.chown(file, 65534, 65534)),
        lambda: (os.chown(file, 0, 0), file.parent.chmod(0o777)),
    ):
        make()
        verdict, text = of_program(dgx, site)
        assert verdict is Verdict.UNKNOWN and "not trusted by root" in text
    assert not ran.exists()
    file.parent.chmod(0o755)
    Path(site).chmod(0o666)
    process = dgx.start("--only", "mine", "--config", site)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and f"{site} is not trusted by root" in err and not ran.exists()
    Path(site).chmod(0o644)
    assert of_program(dgx, site)[0] is Verdict.PASS and ran.exists()


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


def leaving(dgx: Node, tmp_path: Path) -> tuple[str, Callable[[], list[int]]]:
    """A site file with a check that starts these and waits; what waits for them to be there and tells their pids."""
    pids, up, go = (tmp_path / name for name in ("pids", "up", "go"))
    os.mkfifo(up)
    os.mkfifo(go)
    own = {"name": "mine", "run": script(tmp_path, LEAVES.format(pids=pids, up=up, go=go)), "budget": 600}

    def begun() -> list[int]:
        with open(go, "rb"):  # written to when all of them run
            return [int(pid) for pid in pids.read_text().split()]

    return dgx.site(own=[own]), begun


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_whoever_ends_the_program_ends_all_that_its_checks_have_started(
    dgx: Node, tmp_path: Path, signum: signal.Signals
) -> None:
    site, begun = leaving(dgx, tmp_path)
    process = dgx.start("--only", "mine", "--deadline", "600", "--config", site)
    pids = begun()
    assert len(pids) == 4 and all(map(alive, pids))
    process.send_signal(signum)
    process.communicate(timeout=BOUND_S)
    assert all(ended(pid) for pid in pids)


def test_so_does_the_end_of_the_residents_questions(dgx: Node, tmp_path: Path) -> None:
    site, begun = leaving(dgx, tmp_path)
    argv = ["--serve", "--only", "mine", "--deadline", "600", "--config", site, "--sysroot", str(dgx.root)]
    resident = subprocess.Popen(
        [sys.executable, "-I", "-m", "nvrx_slurm.health", *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert resident.stdin is not None
    resident.stdin.write(b"check\n")
    resident.stdin.flush()
    pids = begun()
    assert len(pids) == 4 and all(map(alive, pids))
    resident.communicate(timeout=BOUND_S)
    assert resident.returncode == 0 and all(ended(pid) for pid in pids)


def alive(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state not in "ZX"
