"""The templates are valid, hand on what they are given, and use only options that the installed Slurm has."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

DIRECTORY = Path(__file__).resolve().parents[2] / "sbatch_templates"
TEMPLATES = sorted(DIRECTORY.glob("*.sbatch"))
SCRIPT_ARGS = ["train.py", "--name", "two words", "$HOME", ""]

# Stands in for srun and nvrx-run: shows exactly what it was given (NUL-separated), ends with a code of its own.
RECORDER = """#!/bin/bash
printf '%s\\0' "${0##*/}" "$@" > "$RECORD"
exit "${END_WITH:-93}"
"""


@pytest.fixture(params=TEMPLATES, ids=lambda path: path.stem)
def template(request: pytest.FixtureRequest) -> Path:
    return request.param


def sbatch_options(template: Path) -> list[str]:
    return re.findall(r"^#SBATCH\s+--([a-z-]+)", template.read_text(), re.MULTILINE)


def run_template(template: Path, tmp_path: Path, args: list[str], **knobs: str) -> tuple[int, list[str], str]:
    """Run it as a batch script; its exit code, the argv of the command it became, and its stderr."""
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "$@" > "$RECORD.scontrol"\n')
    (tmp_path / "scontrol").chmod(0o755)
    for name in ("srun", "nvrx-run"):
        (tmp_path / name).write_text(RECORDER)
        (tmp_path / name).chmod(0o755)
    record = tmp_path / "argv"
    env = {"PATH": f"{tmp_path}:{os.defpath}", "RECORD": str(record), "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "4"}
    env |= {"NVRX_CONTAINER_IMAGE": "/images/a b.sqsh"} | knobs
    done = subprocess.run(["bash", template, *args], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    argv = record.read_text().split("\0")[:-1] if record.exists() else []
    return done.returncode, argv, done.stderr


def test_hands_on_the_script_its_args_and_its_exit_code(template: Path, tmp_path: Path) -> None:
    code, argv, stderr = run_template(template, tmp_path, SCRIPT_ARGS, NVRX_SPARES="2", NVRX_INIT_TIMEOUT="90")

    assert (code, stderr) == (93, "")
    assert argv[-len(SCRIPT_ARGS) :] == SCRIPT_ARGS
    assert argv[argv.index("--spares") + 1] == "2"
    assert argv[argv.index("--ft-rank-init-timeout") + 1] == "90"


def test_without_a_script_it_says_how_to_use_it(template: Path, tmp_path: Path) -> None:
    code, argv, stderr = run_template(template, tmp_path, [])

    assert (code, argv) == (2, [])
    assert stderr.startswith(f"usage: sbatch [sbatch options] {template.name} SCRIPT")


@pytest.mark.parametrize(("end", "knob"), [(138, "1"), (138, "0"), (93, "1"), (143, "1"), (0, "1")])
def test_requeues_what_stopped_early_if_asked_to(template: Path, tmp_path: Path, end: int, knob: str) -> None:
    code, _, stderr = run_template(template, tmp_path, SCRIPT_ARGS, NVRX_REQUEUE=knob, END_WITH=str(end))
    asked = tmp_path / "argv.scontrol"
    assert (code, stderr) == (end, "")
    assert (asked.read_text() if asked.exists() else "") == ("requeue 7\n" if (end, knob) == (138, "1") else "")


def test_activates_the_environment_it_is_told(template: Path, tmp_path: Path) -> None:
    activate = tmp_path / "venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.write_text('touch "$PWD/activated"\n')
    _, argv, _ = run_template(template, tmp_path, SCRIPT_ARGS, NVRX_VENV=str(tmp_path / "venv"))
    assert (tmp_path / "activated").exists()
    assert "--ft-rank-init-timeout" not in argv  # it would kill a script that never calls the monitor


def test_srun_direct_writes_out_the_step_that_survives(tmp_path: Path) -> None:
    _, argv, _ = run_template(DIRECTORY / "srun-direct.sbatch", tmp_path, SCRIPT_ARGS)
    step = argv[: argv.index("nvrx-run")]

    assert step[0] == "srun"
    survival = {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--mpi=none", "--input=none", "--cpus-per-task=4"}
    assert survival <= set(step)
    output = next(option.removeprefix("--output=") for option in step if option.startswith("--output="))
    assert (tmp_path / output).parent.is_dir(), "srun does not make the directory of its output"


def test_container_options_reach_srun_as_one_word_each(tmp_path: Path) -> None:
    _, argv, _ = run_template(DIRECTORY / "container.sbatch", tmp_path, SCRIPT_ARGS)
    assert argv[0] == "nvrx-run"
    assert "--srun-arg=--container-image=/images/a b.sqsh" in argv


def test_one_agent_per_node_that_outlives_a_lost_node(template: Path) -> None:
    assert {"no-kill", "ntasks-per-node", "open-mode", "requeue", "signal", "time"} <= set(sbatch_options(template))


def test_the_readme_explains_every_option_and_knob(template: Path) -> None:
    readme = (DIRECTORY / "README.md").read_text()
    assert [option for option in sbatch_options(template) if f"`--{option}" not in readme] == []
    knobs = re.findall(r'^: "\$\{(NVRX_\w+)', template.read_text(), re.MULTILINE)
    assert knobs and [knob for knob in knobs if f"`{knob}`" not in readme] == []
