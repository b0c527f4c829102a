"""What people see of the commands: on a terminal and in a pipe, completed by a shell, as manual pages."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
import manpages
import pytest
from click.testing import CliRunner
from test_goodput import write
from test_status import GOOD
from toolbox import nvrx

from nvrx_slurm.cli.toolbox import main
from nvrx_slurm.core.words import unix_s, utc
from nvrx_slurm.views.screen import clock

pytestmark = pytest.mark.fast


ANSI = re.compile(r"\x1b\[[0-9;]*m")
ENV = {"PYTHONPATH": str(Path(__file__).parents[2]), "COLUMNS": "50", "TZ": "Asia/Tokyo"}


def on_terminal(words, **more):
    """What a command prints on a terminal of 50 columns."""
    ours, theirs = pty.openpty()
    env = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")} | ENV | more
    with subprocess.Popen([sys.executable, "-m", "nvrx_slurm.cli.toolbox", *words], stdout=theirs, env=env):
        os.close(theirs)
        shown = b""
        try:
            while data := os.read(ours, 4096):
                shown += data
        except OSError:  # EIO: the other end is closed
            os.close(ours)
    return shown.decode()


@pytest.mark.parametrize("command", ["status", "list", "why", "goodput"])
def test_lines_fit_a_terminal_which_shows_colours(tmp_path, command):
    write(
        tmp_path, "7/r0", "2026-03-01T10:00:00.000Z", code=1, reason="r", first_cause=None, cycles=[], summary="s" * 60
    )
    (tmp_path / "8/r0").mkdir(parents=True)
    (tmp_path / "8/r0/status.json").write_text(json.dumps({**GOOD, "written": time.time()}))
    job = {"status": "8", "list": "--log-dir=.", "why": "7", "goodput": "7"}[command]
    words = [command, job.replace(".", str(tmp_path))]
    shown = on_terminal(words, PET_LOG_DIR=str(tmp_path))
    assert ANSI.search(shown) and max(len(ANSI.sub("", line)) for line in shown.split("\r\n")) <= 50, shown
    assert not ANSI.search(on_terminal(words, PET_LOG_DIR=str(tmp_path), NO_COLOR="1"))
    in_pipe = nvrx(*words, **ENV, PET_LOG_DIR=str(tmp_path)).output
    assert not ANSI.search(in_pipe) and max(map(len, in_pipe.splitlines())) > 50
    forced = nvrx(*words, PET_LOG_DIR=str(tmp_path), FORCE_COLOR="1").output
    first, plain = (re.sub(r"\d+ s\b", "", text.splitlines()[0]) for text in (forced, in_pipe))  # a second may be over
    assert ANSI.sub("", first) == plain != first


def test_times_are_local_for_people_and_utc_in_files(monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        at = unix_s("2026-03-01T10:00:00.250Z")
        assert clock(at, at - 3.25, at) == "19:00:00 +3.2s" and clock(at, at, at + 1e6) == "01 Mar 19:00:00 +0.0s"
        assert utc(at) == "2026-03-01T10:00:00.250Z" and unix_s("2026-03-01T10:00:00.250+00:00") == at
    finally:
        monkeypatch.undo()
        time.tzset()


def completed(line, where):
    words = line.split(" ")
    env = {"_NVRX_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    done = CliRunner(env={**env, "PET_LOG_DIR": str(where)}).invoke(main, prog_name="nvrx")
    return [found.partition(",")[2] for found in done.output.splitlines()]


def test_a_shell_completes_jobs_and_checks(tmp_path):
    for job in ("99", "471", "48", ".hidden", "4;id", "4$(id)", "4\nplain,4`id`", "4 -o x", "4\x1b]2;x\x07", "4\udcff"):
        (tmp_path / job).mkdir()
    for command in ("status", "stacks", "why", "logs", "replay", "report", "goodput"):
        assert completed(f"nvrx {command} 4", tmp_path) == ["471", "48"]
    assert completed("nvrx status ", tmp_path) == ["471", "99", "48"]
    assert completed("nvrx why ./x", tmp_path / "none") == ["./x"]  # a path
    assert "gpu-ecc" in completed("nvrx health explain gpu-", tmp_path)
    assert "gpu-ecc" in completed("nvrx health run --only gpu-e", tmp_path)


@pytest.mark.parametrize(("shell", "cursor"), [("zsh", "2"), ("fish", "4")])
def test_other_shells_get_the_same_jobs(tmp_path, shell, cursor):
    (tmp_path / "471").mkdir()
    env = {"_NVRX_COMPLETE": f"{shell}_complete", "COMP_WORDS": "nvrx status 4", "COMP_CWORD": cursor}
    done = CliRunner(env={**env, "PET_LOG_DIR": str(tmp_path)}).invoke(main, prog_name="nvrx")
    assert re.findall(r"\w+", done.output)[:2] == ["plain", "471"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is missing")
def test_fish_completes(tmp_path):
    (tmp_path / "471").mkdir()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HOME": str(tmp_path), "PET_LOG_DIR": str(tmp_path)}
    words = "_NVRX_COMPLETE=fish_source nvrx | source; complete -C 'nvrx report 4'"
    done = subprocess.run(["fish", "-c", words], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["471"]


def test_help_has_four_groups_and_cuts_nothing():
    text = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["Options", "Run", "Watch", "Explain", "Administer"]
    assert text.count("...") == 1 and max(map(len, text.splitlines())) <= 80
    named = re.findall(r"^  ([a-z]+) ", text, re.MULTILINE)
    assert sorted(named) == sorted(main.list_commands(click.Context(main)))
    inner = [CliRunner().invoke(main, [name, "--help"], terminal_width=80).output for name in ("health", "metrics")]
    assert [text.count("...") for text in inner] == [1, 1] and not re.search(r"\w\.\.\.$", "".join(inner), re.M)


def test_every_command_has_a_page_that_groff_takes():
    pages = manpages.pages()
    assert {"nvrx-run.1", "nvrx.1", "nvrx-status.1", "nvrx-health-run.1"} <= pages.keys()
    assert all(f"\\-\\-{flag}" in pages["nvrx-run.1"] for flag in ("nnodes", "ft\\-segment", "monitor\\-interval"))
    if shutil.which("groff"):
        text = "".join(pages.values()).encode()
        done = subprocess.run(["groff", "-man", "-ww", "-z"], input=text, capture_output=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
