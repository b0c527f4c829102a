"""The templates are what `nvrx submit --dry-run` prints, with comments, and hand on what they are given."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from nvrx_slurm.cli import submit
from nvrx_slurm.cli.toolbox import main

pytestmark = pytest.mark.process


DIRECTORY = Path(__file__).resolve().parents[2] / "sbatch_templates"
TEMPLATES = sorted(DIRECTORY.glob("*.sbatch"))
SCRIPT_ARGS = ["train.py", "--name", "two words", "$HOME", ""]
BY_HAND = ("export TORCH_NCCL_RETHROW_CUDA_ERRORS",)  # lines that no flag renders

# Stands in for nvrx-run: shows exactly what it was given (NUL-separated), ends with a code of its own.
RECORDER = """#!/bin/bash
printf '%s\\0' "$@" > "$RECORD"
exit 93
"""


@pytest.fixture(params=TEMPLATES, ids=lambda path: path.stem)
def template(request):
    return request.param


def run_template(template, tmp_path, args):
    """Run it as a batch script; its exit code, the argv of nvrx-run, and its stderr."""
    (tmp_path / "nvrx-run").write_text(RECORDER)
    (tmp_path / "nvrx-run").chmod(0o755)
    record = tmp_path / "argv"
    env = {"PATH": f"{tmp_path}:{os.defpath}", "RECORD": str(record), "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", template, *args], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    argv = record.read_text().split("\0")[:-1] if record.exists() else []
    return done.returncode, argv, done.stderr


def test_is_what_nvrx_submit_prints_with_comments(template, monkeypatch):
    text = template.read_text()
    said = re.search(r"^#   nvrx (submit --dry-run (?:.*\\\n#)*.*)$", text, re.MULTILINE)
    monkeypatch.setattr(submit.os, "getcwd", lambda: "/data/me")
    monkeypatch.setattr(submit.os.path, "abspath", lambda path: os.path.normpath(f"/data/me/{path}"))
    monkeypatch.setattr(submit.sys, "prefix", submit.sys.base_prefix)  # the templates name no environment
    done = CliRunner().invoke(main, shlex.split(said[1].replace("\\\n#", " ")))
    assert done.exit_code == 0, done.output
    lines = [
        line for line in text.splitlines() if line and (line[:2] == "#!" or line[:8] == "#SBATCH " or line[0] != "#")
    ]
    assert [line for line in lines if not line.startswith(BY_HAND)] == [
        line for line in done.output.splitlines() if line
    ]


def test_hands_on_the_script_its_args_and_its_exit_code(template, tmp_path):
    code, argv, stderr = run_template(template, tmp_path, SCRIPT_ARGS)
    assert (code, stderr) == (93, "")
    assert argv[-len(SCRIPT_ARGS) :] == SCRIPT_ARGS
    assert "--spares=1" in argv


def test_without_a_script_it_says_how_to_use_it(template, tmp_path):
    code, argv, stderr = run_template(template, tmp_path, [])
    assert (code, argv) == (2, [])
    assert stderr.startswith("usage: sbatch")


def test_the_readme_explains_every_option(template):
    readme = (DIRECTORY / "README.md").read_text()
    options = re.findall(r"^#SBATCH\s+--([a-z-]+)", template.read_text(), re.MULTILINE)
    assert options and [option for option in options if f"`--{option}" not in readme] == []
    assert f"`{template.name}`" in readme
