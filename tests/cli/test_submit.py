"""`nvrx submit`: what it renders, and what it refuses, without a Slurm."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from toolbox import nvrx

from nvrx_slurm.cli import submit
from nvrx_slurm.config.submit import SubmitConfig
from nvrx_slurm.node.output import strikes

pytestmark = pytest.mark.fast


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path


def rendered(*words, **env):
    done = nvrx("submit", "--dry-run", *words, "train.py", **env)
    assert done.exit_code == 0, done.output
    assert subprocess.run(["bash", "-n"], input=done.output, text=True).returncode == 0
    return done.output.splitlines()


def test_flags_of_nvrx_run_are_handed_on_and_counted(here):
    lines = rendered("--nnodes", "4:6", "--ft-rank-heartbeat-timeout", "30", "--srun-arg=--exact", "-r", "3")
    assert "#SBATCH --nodes=6" in lines
    flags = [line.strip(" \\") for line in lines if line.startswith("    --")]
    assert flags == ["--nnodes=4:6", "--ft-rank-heartbeat-timeout=30", "--srun-arg=--exact", "--redirects=3"]


def test_print_config_and_dry_run_mean_this_command(here):
    done = nvrx("submit", "--print-config", "--spares", "1", "train.py")
    assert done.exit_code == 0 and re.search(r"^spares +1 +--spares$", done.output, re.MULTILINE)
    assert not list(here.glob("nvrx_logs"))  # nothing was submitted
    assert "Print the sbatch script and exit." in nvrx("submit", "--help").output


def test_nodes_with_many_strikes_are_said_and_left_out_if_asked_for(here):
    logs = Path("nvrx_logs")
    logs.mkdir()
    for host, count in (("n1", 2), ("n2", 4), ("n3", 3), ("$(x)", 5)):
        for _ in range(count):
            strikes.add(logs, host, "7", "rank 3 failed")
    with (logs / "strikes.jsonl").open("a") as file:
        file.write('{"time": 1e9, "host": "n1"}\n{"time": "\n[]\n')  # old, torn, no strike
    assert strikes.suspects(logs) == {"n2": 4, "n3": 3}
    assert "n2 (4), n3 (3); leave them out: --avoid-strikes" in nvrx("submit", "--dry-run", "train.py").stderr
    assert not [line for line in nvrx("submit", "--dry-run", "train.py").stdout.splitlines() if "--exclude" in line]
    assert (
        "#SBATCH --exclude=n9,n2,n3"
        in nvrx("submit", "--dry-run", "--avoid-strikes", "--sbatch-arg=--exclude=n9", "train.py").stdout
    )


@pytest.mark.parametrize(("known", "excluded"), [(("n1", "n2"), ("--exclude=n2",)), (("n1",), ())])
def test_a_node_that_slurm_does_not_know_any_more_is_not_excluded(here, known, excluded):
    """sbatch would say "Invalid node name specified", and submit nothing until the strikes are old."""
    for host in ("n2", "retired") * strikes.MANY:
        strikes.add(here, host, "7", "rank 3 failed")
    slurm = SimpleNamespace(nodes=lambda: dict.fromkeys(known))
    found = submit._without_suspects(SubmitConfig(avoid_strikes=True), here, slurm)
    assert found.sbatch_args == excluded


def test_variables_and_the_warning_signal(here):
    lines = rendered("--ft-warning-signal", "SIGUSR2", NVRX_SUBMIT_PARTITION="gpu", NVRX_SPARES="2")
    assert {"#SBATCH --partition=gpu", "#SBATCH --nodes=3", "#SBATCH --signal=USR2@120"} <= set(lines)
    assert not [line for line in rendered("--ft-warning-signal", "none") if "--signal" in line]


def test_hostile_values_stay_one_word_each(here, monkeypatch):
    name = 'a b\'; touch pwned; $(touch pwned) "x" #'
    (here / name).touch()
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)  # no environment is activated: nvrx-run is the stub below
    done = nvrx("submit", "--dry-run", f"--sbatch-arg=--comment={name}", "--container-image", name, name, name, "")
    (here / "nvrx-run").write_text('#!/bin/bash\nprintf "%s\\0" "$@" > argv\n')
    (here / "nvrx-run").chmod(0o755)
    (here / "job").write_text(done.output)
    env = {"PATH": f"{here}:{os.defpath}"}
    assert subprocess.run(["bash", "job"], env=env, cwd=here).returncode == 0
    argv = (here / "argv").read_text().split("\0")[:-1]
    assert argv[-3:] == [name, name, ""]
    assert f"--srun-arg=--container-image={name}" in argv
    assert not (here / "pwned").exists()


@pytest.mark.parametrize(
    "words, tokens",
    [
        (["--nodes", "2", "--spares", "2", "train.py"], ["--spares 2"]),
        (["--nodes", "2", "--nnodes", "3", "train.py"], ["--nodes 2", "3"]),
        (["--time", "soon", "train.py"], ["--time", "soon"]),
        (["--time", "2", "train.py"], ["--time 2", "--warn-time 120"]),
        (["--array", "0-3", "--wait", "train.py"], ["--array excludes"]),
        (["--chain", "1", "train.py"], ["--chain", "2"]),
        (["--chain", "2", "--until-done", "train.py"], ["--chain", "--until-done"]),
        (["--chain", "2", "--array", "0-3", "train.py"], ["--array"]),
        (["--standalone", "train.py"], ["--standalone", "--nodes 1"]),
        (["--job-name", "a/b", "train.py"], ["--job-name"]),
        (["--gpus-per-node", "a100", "train.py"], ["--gpus-per-node", "a100:4"]),
        (["--container-workdir", "/x", "train.py"], ["--container-image"]),
        (["--venv", "/nowhere", "train.py"], ["--venv /nowhere"]),
        (["--ft-rank-heartbeat-timeout", "-1", "train.py"], ["--ft-rank-heartbeat-timeout"]),
        (["--sbatch-arg=a\nb", "train.py"], ["--sbatch-arg"]),
        (["nowhere.py"], ["nowhere.py"]),
        ([], ["script"]),
    ],
)
def test_refuses_in_one_sentence(words, tokens):
    done = nvrx("submit", *words)
    assert done.exit_code == 2, done.output
    assert len(done.output.splitlines()) == 1 and all(token in done.output for token in tokens), done.output
    assert not Path("nvrx_logs").exists()
