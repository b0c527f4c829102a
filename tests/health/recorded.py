"""A DGX-like node as a tree of files, and checks run on it as programs do."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from nvrx_slurm.health.report import Report, from_json

BOUND_S = 60.0
DATA = Path(__file__).resolve().parents[1] / "data" / "dgx.py"


def _recorded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dgx", DATA)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Node:
    """A recorded node whose files a test may break."""

    def __init__(self, root: Path) -> None:
        self.recorded = _recorded()
        self.root = root
        self.recorded.build(root)
        (root / f"run/user/{os.geteuid()}").mkdir(parents=True)

    def __truediv__(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def write(self, path: str, text: str) -> None:
        self.recorded.write(self.root, path, text)

    def start(self, *args: str) -> subprocess.Popen[str]:
        """`python -I -m nvrx_slurm.health` on this node, as a hook or the agent starts it."""
        argv = [sys.executable, "-I", "-m", "nvrx_slurm.health", "--sysroot", str(self.root), *args]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def program(self, *args: str) -> tuple[int, Report]:
        """(exit code, report) of it."""
        process = self.start(*args)
        out, err = process.communicate(timeout=BOUND_S)
        assert out, err
        return process.returncode, from_json(out)

    def site(self, **document: object) -> str:
        """Write a site file (YAML is a superset of JSON); its path."""
        file = self.root.parent / f"{self.root.name}.yaml"
        file.write_text(json.dumps(document))
        return str(file)


def ended(pid: int) -> bool:
    """Whether a process that is not our child ends within the bound."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(BOUND_S * 1000))
    finally:
        os.close(fd)
