"""Bad input at the command line: exit code 2, one sentence that names it, and nothing started or made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
TASK = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "1",
    "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_PROCID": "0", "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_NODES": "1", "SLURMD_NODENAME": "n1", "SLURM_CLUSTER_NAME": "c",
}  # fmt: skip


AS_NOBODY = """
import os, sys, nvrx_slurm.agent.program, nvrx_slurm.cli.place  # while the interpreter's files can still be read
from nvrx_slurm.cli.run import main
os.setgroups([]); os.setgid(65534); os.setuid(65534)
main(sys.argv[1:])
"""


def nvrx_run(*words: str, cwd: Path, nobody: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONPATH": str(REPO), "SLURM_CONF": "/nonexistent"}
    program = ["-c", AS_NOBODY] if nobody else ["-m", "nvrx_slurm.cli.run"]
    return subprocess.run(
        [sys.executable, *program, *words], cwd=cwd, env=clean | env,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    """One sentence on stderr with these parts, exit code 2, no output."""
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr.startswith("nvrx-run") and done.stderr.count("\n") == 1 and len(done.stderr) < 600
    assert all(part in done.stderr for part in parts), done.stderr


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('rank', 'ran')")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--nnodes=3:2",), ("--nnodes '3:2'", "1 <= MIN <= MAX")),
        (("--nnodes=0",), ("--nnodes '0'", "MIN or MIN:MAX")),
        (("--nnodes=a:b",), ("--nnodes 'a:b'", "for example 4 or 4:6")),
        (("--nproc-per-node=gpu",), ("--nproc-per-node=gpu", "no GPU on this node", "give a number")),
        (("--nproc-per-node=0",), ("--nproc-per-node '0'", "from 1 to 1024")),
        (("--local-ranks-filter=99",), ("names local rank 99", "local rank 0 only")),
        (("--nproc-per-node=4", "--local-ranks-filter=0,4"), ("names local rank 4", "local ranks 0 to 3")),
        (("--local-ranks-filter=-1",), ("--local-ranks-filter '-1'", "separated by commas")),
        (("--term-timeout=soon",), ("--term-timeout 'soon'", "seconds >= 0 and <= 2000000")),
        (("--term-timeout=1e7",), ("--term-timeout '1e7'", "<= 2000000")),
        (("--ft-rank-section-timeouts=step",), ("'step'", "NAME:SECONDS", "setup:600,step:30")),
        (("--ft-rank-section-timeouts=step:0",), ("'step:0'", "SECONDS > 0, or none")),
        (("--ft-rank-section-timeouts=a:1,a:2",), ("each name once",)),
        (("--ft-rank-termination-signal=SIGKIL",), ("'SIGKIL'", "did you mean SIGKILL")),
        (("--ft-log-level=LOUD",), ("'LOUD'", "DEBUG, INFO")),
        (("--ft-cfg-path=gone.yaml",), ("gone.yaml does not exist", "--ft-cfg-path")),
        (("--rdzv-endpoint=:29400", "--nnodes=2"), ("':29400'", "HOST:PORT")),
        (("--max-restart=1",), ("--max-restart is not a flag", "did you mean --max-restarts")),
    ],
)
def test_flags(work: Path, words: tuple[str, ...], parts: tuple[str, ...]) -> None:
    refused(nvrx_run(*words, "train.py", cwd=work, CUDA_VISIBLE_DEVICES=""), *parts)
    assert [path.name for path in work.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("- fault_tolerance\n", ("has no fault_tolerance: section",)),
        ("fault_tolerance: [1]\n", ("must be a mapping of names to values, not list",)),
        ("fault_tolerance:\n\tlog_level: INFO\n", ("line 2 column 1", "use spaces instead of tabs")),
        ("fault_tolerance: {rank_heartbeat_timout: 3}\n", ("did you mean rank_heartbeat_timeout",)),
        ("fault_tolerance: {rank_heartbeat_timeout: soon}\n", ("rank_heartbeat_timeout = 'soon'", "number of seconds")),
        ("fault_tolerance: {rank_termination_signal: SIGKIL}\n", ("did you mean SIGKILL",)),
        ("fault_tolerance: {log_level: LOUD}\n", ("log_level = 'LOUD'", "must be DEBUG")),
        ("fault_tolerance: {rank_section_timeouts: step}\n", ("rank_section_timeouts = 'step'", "NAME:SECONDS")),
    ],
)
def test_yaml(work: Path, content: str, parts: tuple[str, ...]) -> None:
    (work / "ft.yaml").write_text(content)
    refused(nvrx_run("--ft-cfg-path=ft.yaml", "train.py", cwd=work), "ft.yaml", *parts)


# --- the script -----------------------------------------------------------------------------------------------------


def test_a_script_that_cannot_be_run(work: Path) -> None:
    (work / "empty").mkdir()
    (work / "plain").write_text("#!/bin/sh\n")
    refused(nvrx_run(cwd=work), "no training script was given")
    refused(nvrx_run("gone.py", cwd=work), "gone.py does not exist (in ", "check the path")
    refused(nvrx_run("x" * 300, cwd=work), "does not exist")
    refused(nvrx_run("empty", cwd=work), "empty is a directory without a __main__.py")
    refused(nvrx_run("--no-python", "./plain", cwd=work), "./plain is not an executable file")
    (work / "empty" / "__main__.py").write_text("print('rank', 'ran')")
    done = nvrx_run("--standalone", "empty", cwd=work)
    assert done.returncode == 0 and "rank ran" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run it as another user")
def test_a_script_that_the_user_may_not_read(work: Path) -> None:
    for directory in (work, *work.parents):
        if not directory.stat().st_mode & 0o001:
            directory.chmod(0o711)
        if directory.name.startswith("pytest-of-"):
            break
    (work / "train.py").chmod(0o600)
    refused(nvrx_run("train.py", cwd=work, nobody=True), "train.py may not be read by this user", "permissions")
    (work / "train.py").chmod(0o644)
    done = nvrx_run("train.py", cwd=work, nobody=True)
    refused(done, "the log directory ", "cannot be made: Permission denied; give another with --log-dir")


def test_a_working_directory_that_is_gone(work: Path) -> None:
    (work / "gone").mkdir()
    code = f"import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, {[sys.executable, '-m']!r} + sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "nvrx_slurm.cli.run", "--standalone", str(work / "train.py")],
        cwd=work / "gone", env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    refused(done, "the working directory is gone", "cd to one that exists")


# --- the surroundings -----------------------------------------------------------------------------------------------


def test_a_coordinator_that_does_not_resolve(work: Path) -> None:
    """Who should be it knows at once; the others look for it as long as for one that comes late."""
    meet = ("--nnodes=2", "--rdzv-endpoint=nosuchhost.invalid:29400", "--rdzv-conf=join_timeout=1")
    done = nvrx_run(*meet, "--node-rank=0", "train.py", cwd=work, NVRX_TOKEN="a" * 64)
    refused(done, "the coordinator's host name nosuchhost.invalid does not resolve")
    done = nvrx_run(*meet, "--node-rank=1", "train.py", cwd=work, NVRX_TOKEN="a" * 64)
    assert done.returncode == 96 and "no coordinator could be reached within 1 s (join timeout)" in done.stderr
    assert "last try: nosuchhost.invalid:29400" in done.stderr


@pytest.mark.parametrize("text", ["soon", "nan", "-1", "1e400"])
def test_a_kill_wait_that_is_none(work: Path, text: str) -> None:
    refused(nvrx_run("train.py", cwd=work, **TASK, NVRX_KILL_WAIT=text), f"NVRX_KILL_WAIT='{text}'", "unset it")


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (("--term-timeout=100",), {}, "--term-timeout '100' is cut to 25 s: Slurm kills everything KillWait (30 s)"),
        ((), {"PET_TERM_TIMEOUT": "60"}, "PET_TERM_TIMEOUT='60' is cut to 25 s"),
        (("--term-timeout=20",), {}, ""),
        ((), {}, ""),  # the default is nobody's wish
    ],
)
def test_a_term_timeout_that_slurm_cuts_is_said(
    work: Path, words: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    done = nvrx_run(*words, "train.py", cwd=work, **TASK, **env, NVRX_KILL_WAIT="30")
    assert done.returncode == 0, done
    assert said in done.stderr if said else "is cut to" not in done.stderr


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (("--ft-stop-before-end=60",), {}, "--ft-stop-before-end has no effect: this is no Slurm job"),
        (
            ("--ft-stop-before-end=60",),
            {"NVRX_FT_WARN_BEFORE_END": "300"},
            "NVRX_FT_WARN_BEFORE_END and --ft-stop-before-end have no effect: this is no Slurm job",
        ),
        (("--ft-warn-before-end=300",), TASK, ""),
        ((), {}, ""),
    ],
)
def test_a_time_limit_that_nobody_has_is_said(
    work: Path, words: tuple[str, ...], env: dict[str, str], said: str
) -> None:
    done = nvrx_run(*words, "train.py", cwd=work, **env)
    assert done.returncode == 0, done
    assert done.stderr.count(said) == 1 if said else " no effect" not in done.stderr
