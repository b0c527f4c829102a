"""nvrx-run within the test's process, in a clean environment, for all that ends before anything is started."""

import os
import sys

import pytest
from cli_harness import CLEAN, Done

from nvrx_slurm.cli.run import main


@pytest.fixture
def work(tmp_path, monkeypatch):
    """The working directory, with a training script."""
    (tmp_path / "train.py").write_text("print('rank', 'ran')")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def clean(monkeypatch):
    """No variables but PATH and its like."""
    for name in os.environ:
        monkeypatch.delenv(name)
    for name, value in CLEAN.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def nvrx_run(work, clean, monkeypatch, capfd):
    """Runs `nvrx-run WORDS` with the variables NAME=VALUE."""

    def run(*words, **env):
        monkeypatch.setattr(sys, "argv", ["nvrx-run", *words])
        with monkeypatch.context() as variables, pytest.raises(SystemExit) as ended:
            for name, value in env.items():
                variables.setenv(name, value)
            main(list(words))
        return Done(int(str(ended.value.code)), *capfd.readouterr())

    return run


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A machine that has Slurm's client and a slurm.conf."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nexit 1\n")
    srun.chmod(0o755)
    (tmp_path / "slurm.conf").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    return {"SLURM_CONF": str(tmp_path / "slurm.conf"), "PATH": str(tmp_path)}
