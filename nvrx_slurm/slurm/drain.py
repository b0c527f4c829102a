"""Draining nodes and taking them back, by scontrol: for Slurm's hooks, which run as root and have no PATH.

Each function is one call of scontrol, without a shell, with a bound.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from typing import NamedTuple

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.slurm import control

SCONTROL = tuple(f"{place}/scontrol" for place in ("/usr/bin", "/usr/local/bin", "/opt/slurm/bin"))
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
_WHO = re.compile(r"\s*\[([^\[\]@]*)@[^\[\]]*\]$")


class SlurmError(NvrxError):
    """scontrol is not there, refused, or did not answer in time: one sentence."""


class Note(NamedTuple):
    """What Slurm says about a node: state words ({"IDLE", "DRAIN"}), the reason ("" = none) and who gave it."""

    states: frozenset[str]
    reason: str
    who: str


def parse_note(text: str) -> Note:
    """Of one line of `scontrol show node -o`: State=IDLE+DRAIN ... Reason=text [root@2026-11-21T08:29:45]."""
    fields = control.parse_fields(text.strip())
    reason = fields.get("Reason", "")
    who = _WHO.search(reason)
    states = frozenset().union(*control.parse_node_states(text).values())
    return Note(states, reason[: who.start()] if who else reason, who[1] if who else "")


class Scontrol:
    """scontrol of an absolute path. All methods raise SlurmError, and end by `until_s` (time.monotonic())."""

    def __init__(self, path: str, node: str, until_s: float) -> None:
        if not NODE_NAME.fullmatch(node) or node.upper() == "ALL":  # which scontrol takes for all nodes
            raise SlurmError(f"{node!r} is no name of a node")
        self.path = path
        self.node = node
        self.until_s = until_s

    def note(self) -> Note:
        """What Slurm says about the node now. An answer without its name and a state is none."""
        line = self._run("show", "node", self.node, "-o")
        found = parse_note(line)
        if not found.states or control.parse_fields(line.strip()).get("NodeName") != self.node:
            raise SlurmError(f"{self.path} show node {self.node} does not tell its state: {line.strip()[:80]!r}")
        return found

    def drain(self, reason: str) -> None:
        """No new jobs on the node."""
        self._run("update", f"NodeName={self.node}", "State=DRAIN", f"Reason={reason}")

    def explain(self, reason: str) -> None:
        """Another reason; the state stays."""
        self._run("update", f"NodeName={self.node}", f"Reason={reason}")

    def undrain(self) -> None:
        """Take the drain off, and nothing else: a node that is down stays down."""
        self._run("update", f"NodeName={self.node}", "State=UNDRAIN")

    def config(self) -> str:
        """`scontrol show config`."""
        return self._run("show", "config")

    def _run(self, *words: str) -> str:
        timeout_s = max(0.05, self.until_s - time.monotonic())
        clean = {name: value for name, value in os.environ.items() if name != "SLURM_TIME_FORMAT"}
        try:
            done = subprocess.run(
                [self.path, *words], env={**clean, "LC_ALL": "C"}, stdin=subprocess.DEVNULL, capture_output=True,
                timeout=timeout_s, check=False, text=True, errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise SlurmError(f"{self.path} {words[0]} did not end within {timeout_s:.1f} s") from None
        except OSError as error:
            raise SlurmError(f"{self.path} cannot be run: {error.strerror}") from None
        if done.returncode:
            raise SlurmError(f"{self.path} {words[0]} failed: {' '.join(done.stderr.split())[:200]}")
        return done.stdout


def find(path: str = "") -> str:
    """The absolute path of scontrol: `path` if it is given, else where packages put it. Raises SlurmError."""
    for place in (path,) if path else SCONTROL:
        if os.access(place, os.X_OK):
            return place
    raise SlurmError(f"there is no {path or 'scontrol in ' + ', '.join(map(os.path.dirname, SCONTROL))}; set SCONTROL")
