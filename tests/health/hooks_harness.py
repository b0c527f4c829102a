"""The hooks of prolog/ as Slurm runs them, with a scontrol that writes down what it was asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from recorded import Node

REPO = Path(__file__).resolve().parents[2]
BOUND_S = 60.0
SLACK_S = 10.0  # of a loaded machine, where what hangs would hang for ever
IDLE = "NodeName=n1 State=IDLE ThreadsPerCore=1"
# Answers `show node` from a file; says what it was asked, one line per call.
SCONTROL = """#!/bin/sh
echo "$*" >>{root}/asked
if [ -e {root}/scontrol-hangs ]; then exec sleep 600; fi
if [ -e {root}/scontrol-fails ]; then echo "slurm_update error: Invalid user id" >&2; exit 1; fi
case $1 in show) cat {root}/note ;; esac
"""


class Ran(NamedTuple):
    """`code`: exit code; `took_s`: wall time; `log`: what it wrote to LOG."""

    code: int
    took_s: float
    log: str


class Hooks:
    """An installed copy of prolog/ below `root`, which is root's, for the node `n1` recorded in `node`."""

    def __init__(self, root: Path, node: Node, **settings: object) -> None:
        self.root = root
        self.node = node
        self.directory = root / "hooks"
        shutil.copytree(REPO / "prolog", self.directory)
        scontrol = root / "scontrol"
        scontrol.write_text(SCONTROL.format(root=root))
        scontrol.chmod(0o755)
        self.slurm_says(IDLE)
        (node / "/run").mkdir(exist_ok=True)
        self.spool = root / "spool"
        self.around: list[str] = []  # a command that runs the hook
        self.site()
        self.configure(
            PYTHON=sys.executable, PACKAGE=REPO, LOG=root / "log", SCONTROL=scontrol, SYSROOT=node.root,
            CONFIG=root / "health.yaml", **settings,
        )  # fmt: skip

    def configure(self, **settings: object) -> None:
        """Write hooks.conf anew."""
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        (self.directory / "hooks.conf").write_text(text)

    def add(self, **settings: object) -> None:
        """Later lines of hooks.conf go over earlier ones."""
        with (self.directory / "hooks.conf").open("a") as file:
            file.writelines(f"{name}={value}\n" for name, value in settings.items())

    def site(self, hooks: dict[str, object] | None = None, **document: object) -> None:
        """Write the site file; suspicions are always below `root`."""
        written = Path(self.node.site(hooks={"suspicions": str(self.spool), **(hooks or {})}, **document))
        written.replace(self.root / "health.yaml")

    def slurm_says(self, line: str) -> None:
        """What `scontrol show node` answers from now on."""
        (self.root / "note").write_text(f"{line}\n")

    def asked(self) -> list[str]:
        """What scontrol was asked so far."""
        file = self.root / "asked"
        return file.read_text().splitlines() if file.exists() else []

    def run(self, hook: str, **env: str) -> Ran:
        """One run, as Slurm starts it: nothing in the environment that helps, a pipe for its output."""
        (self.root / "log").unlink(missing_ok=True)
        job = {} if hook == "healthcheck" else {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "65534"}
        started_s = time.monotonic()
        done = subprocess.run(
            [*self.around, str(self.directory / hook)], env={"SLURMD_NODENAME": "n1", **job, **env},
            stdin=subprocess.DEVNULL, capture_output=True, timeout=BOUND_S, check=False,
        )  # fmt: skip
        took_s = time.monotonic() - started_s
        assert (done.stdout, done.stderr) == (b"", b""), "slurmd's pipe is for people in terminals only"
        log = (self.root / "log").read_text() if (self.root / "log").exists() else ""
        return Ran(done.returncode, took_s, log)

    def break_lustre(self) -> None:
        """A fact of the recorded node that the check `lustre` fails for."""
        self.node.write("/sys/fs/lustre/health_check", "NOT HEALTHY\n")

    def mend_lustre(self) -> None:
        """As it was."""
        self.node.write("/sys/fs/lustre/health_check", "healthy\n")


def as_root() -> bool:
    """Slurm runs hooks as root."""
    return os.geteuid() == 0
