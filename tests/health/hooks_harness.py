"""Slurm's hooks in this process and through hook.sh, with a scontrol that behaves as slurmctld would."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from waits import WAIT_S

from nvrx_slurm.health import registry, runner
from nvrx_slurm.health.hooks import run as hooks_run

REPO = Path(__file__).resolve().parents[2]
SLACK_S = 10.0  # of a loaded machine, where a defect would hang for ever
NOBODY, ANOTHER = 65534, 65533
SUCCESS, FAILED = {"SLURM_JOB_EXIT_CODE2": "0:0"}, {"SLURM_JOB_EXIT_CODE2": "1:0"}
CHECKS = ("lustre",)  # the others are switched off: these tests are not about them
LUSTRE = "nvrx:lustre:/sys/fs/lustre/health_check says 'NOT HEALTHY' instead of healthy"
SHOW, UNDRAIN = "show node n1 -o", "update NodeName=n1 State=UNDRAIN"
DRAIN = f"update NodeName=n1 State=DRAIN Reason={LUSTRE}"
# Keeps what it is told, as slurmctld does, and each call as a line of `asked`.
SCONTROL = """#!/bin/sh
echo "$*" >>{root}/asked
if [ -e {root}/scontrol-hangs ]; then exec sleep 600; fi
if [ -e {root}/scontrol-fails ]; then echo "slurm_update error: Invalid user id" >&2; exit 1; fi
drained() {{ echo "NodeName=n1 State=IDLE+DRAIN Reason=${{1#Reason=}} [root@2026-11-21T12:00:00]" >{root}/note; }}
case "$1 $3" in
show*) cat {root}/note ;;
*State=DRAIN) drained "$4" ;;
*State=UNDRAIN) echo "NodeName=n1 State=IDLE" >{root}/note ;;
*Reason=*) drained "$3" ;;
esac
"""
# A site's own check, which fails while there is a file.
OWN = """#!/bin/sh
if [ -e {flag} ]; then echo it stands still; exit 1; fi
echo it turns
"""


def drained(reason=LUSTRE, states="IDLE+DRAIN", who="root"):
    """A line of `scontrol show node`."""
    return f"NodeName=n1 State={states} ThreadsPerCore=1 Reason={reason} [{who}@2026-11-21T12:00:00]"


def script(place, body):
    place.write_text(body if body.startswith("#!") else f"#!/bin/sh\n{body}\n")
    place.chmod(0o755)
    return place


class Ran(NamedTuple):
    """`code`: exit code; `took_s`: wall time; `log`: the text of LOG."""

    code: int
    took_s: float
    log: str


class Hooks:
    """The hooks below `root`, which is root's, on the node `n1`: a tree with a Lustre client and nothing else."""

    def __init__(self, root):
        self.root = root
        self.node = root / "node"
        self.around = []  # a command that runs hook.sh
        for folder in ("run", "sys/fs/lustre", "proc/sys/kernel/random"):
            (self.node / folder).mkdir(parents=True)
        (self.node / "proc/sys/kernel/random/boot_id").write_text("one\n")
        self.mend_lustre()
        self.settings = {
            "PYTHON": sys.executable, "PACKAGE": REPO, "LOG": root / "log", "SYSROOT": self.node,
            "SCONTROL": script(root / "scontrol", SCONTROL.format(root=root)), "CONFIG": root / "health.yaml",
        }  # fmt: skip
        self.slurm_says("NodeName=n1 State=IDLE ThreadsPerCore=1")
        self.site()

    def site(self, checks=None, **document):
        """Write the site file (YAML is a superset of JSON)."""
        off = {name: {"when": []} for name in registry.built_in() if name not in CHECKS}
        (self.root / "health.yaml").write_text(json.dumps({"checks": {**off, **(checks or {})}, **document}))

    def own(self, name, when, **more):
        """Add a check of the site's own; the file that makes it fail."""
        flag = self.root / f"{name}-broken"
        file = script(self.root / name, OWN.format(flag=flag))
        self.site(own=[{"name": name, "run": [str(file)], "when": when, **more}])
        return flag

    def slurm_says(self, line):
        """The answer of `scontrol show node` from now on."""
        (self.root / "note").write_text(f"{line}\n")

    def note(self):
        """State and the checks of the reason as Slurm shows them."""
        found = (self.root / "note").read_text().partition("State=")[2]
        return " ".join(found.replace("Reason=", "").replace("ThreadsPerCore=1 ", "").partition(":/")[0].split())

    def asked(self):
        file = self.root / "asked"
        return file.read_text().splitlines() if file.exists() else []

    def updates(self):
        return [line for line in self.asked() if line.startswith("update")]

    def break_lustre(self):
        (self.node / "sys/fs/lustre/health_check").write_text("NOT HEALTHY\n")

    def mend_lustre(self):
        (self.node / "sys/fs/lustre/health_check").write_text("healthy\n")

    def _env(self, hook):
        (self.root / "log").unlink(missing_ok=True)
        return {} if hook == "healthcheck" else {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": str(NOBODY)}

    def _ran(self, code, started_s):
        log = self.root / "log"
        return Ran(code, time.monotonic() - started_s, log.read_text() if log.exists() else "")

    def run(self, hook, **env):
        """One run in this process; the exit code is start.py's, with 1 for a refusal."""
        given = {f"NVRX_{name}": str(self.settings[name]) for name in ("LOG", "SYSROOT", "SCONTROL", "CONFIG")}
        budget = {"NVRX_BUDGET": str(self.settings.get("PROLOG_BUDGET", 6))}
        started_s = time.monotonic()
        when = "periodic" if hook == "healthcheck" else hook
        code = hooks_run.main(when, {**given, **budget, **self._env(hook), **env})
        return self._ran(1 if code == hooks_run.REFUSE else code, started_s)

    def install(self, **settings):
        """Copy prolog/ below `root` and write hooks.conf; the folder. Later calls change settings."""
        self.settings.update(settings)
        folder = self.root / "hooks"
        if not folder.exists():
            shutil.copytree(REPO / "prolog", folder)
        text = "".join(f"{name}={value}\n" for name, value in self.settings.items())
        (folder / "hooks.conf").write_text(text)
        return folder

    def sh(self, hook, **env):
        """One run as Slurm starts it: nothing helpful in the environment, a pipe for its output."""
        folder = self.root / "hooks"
        started_s = time.monotonic()
        done = subprocess.run(
            [*self.around, str(folder / hook)], env={"SLURMD_NODENAME": "n1", **self._env(hook), **env},
            stdin=subprocess.DEVNULL, capture_output=True, timeout=WAIT_S,
        )  # fmt: skip
        assert (done.stdout, done.stderr) == (b"", b""), "slurmd's pipe is for terminals only"
        return self._ran(done.returncode, started_s)

    def version(self):
        """What `nvrx doctor` asks: everything a hook needs is checked and loaded."""
        argv = ["/bin/sh", str(self.root / "hooks/hook.sh"), "version"]
        return subprocess.run(argv, env={}, capture_output=True, text=True, timeout=WAIT_S)


def made(root, monkeypatch):
    """Hooks that can run in this process."""
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(runner, "stop_on_sigterm", lambda: None)  # it would end pytest
    return Hooks(root)


def as_root():
    """Slurm runs hooks as root."""
    return os.geteuid() == 0


HOOKS = [pytest.mark.process, pytest.mark.skipif(not as_root(), reason="Slurm's hooks run as root")]  # marks
