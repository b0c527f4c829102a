"""The files that a worker's interpreter runs before its script."""

import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from nvrx_slurm.node.workers import start_up

pytestmark = pytest.mark.fast


def test_bytecode_is_that_of_the_source_where_python_may_write_none(tmp_path, monkeypatch):
    for name in (*start_up._PROGRAM, "hook"):
        (tmp_path / f"{name}.py").write_text("AGE = 'old'")
    monkeypatch.setattr(start_up, "_WARM", tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    program = start_up.StartUp(tmp_path)
    program.write()
    assert (tmp_path / "__pycache__").is_dir()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "steps.py").write_text("AGE = 'newer'")
    program.write()
    compiled = Path(cache_from_source(program.directory / "nvrx_steps.py"))
    assert b"newer" in compiled.read_bytes()
