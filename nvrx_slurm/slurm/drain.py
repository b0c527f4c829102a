"""Draining nodes and taking them back with scontrol, for Slurm's hooks, which run as root and have no PATH.

Each method is one call of scontrol, without a shell, with a bound: also where scontrol is on a file system that hangs.
"""

from __future__ import annotations

import os
import re
import time
from typing import NamedTuple

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.slurm import control
from nvrx_slurm.system import bounded_process, trust

SCONTROL = tuple(f"{place}/scontrol" for place in ("/usr/bin", "/usr/local/bin", "/opt/slurm/bin"))
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
_MAX_BYTES = 1 << 20  # of an answer
_ERROR_BYTES = 4096
_MIN_S = 0.05
_WHO = re.compile(r"\s*\[([^\[\]@]*)@[^\[\]]*\]$")


class SlurmError(NvrxError):
    """scontrol is missing, refused, or did not answer in time: one sentence."""


class Note(NamedTuple):
    """A node in Slurm's words: its states ({"IDLE", "DRAIN"}), the reason ("" = none) and the user that set it."""

    states: frozenset[str]
    reason: str
    who: str


def parse_note(text: str) -> Note:
    """From one line of `scontrol show node -o`: State=IDLE+DRAIN ... Reason=text [root@2026-11-21T08:29:45]."""
    fields = control.parse_fields(text.strip())
    reason = fields.get("Reason", "")
    who = _WHO.search(reason)
    states = frozenset().union(*control.parse_node_states(text).values())
    return Note(states, reason[: who.start()] if who else reason, who[1] if who else "")


class Scontrol:
    """scontrol at `path` for the node `node`. All methods raise SlurmError, and end by `until_s` (time.monotonic()).
    To be used in a process without threads, because it forks."""

    def __init__(self, path: str, node: str, until_s: float) -> None:
        if not NODE_NAME.fullmatch(node) or node.upper() == "ALL":  # scontrol takes ALL for all nodes
            raise SlurmError(f"{node!r} is not the name of a node")
        self.path = path
        self.node = node
        self.until_s = until_s

    def note(self) -> Note:
        """The node's present note. An answer without its name or a state raises."""
        line = self._run("show", "node", self.node, "-o")
        found = parse_note(line)
        if not found.states or control.parse_fields(line.strip()).get("NodeName") != self.node:
            raise SlurmError(f"{self.path} show node {self.node} does not tell its state: {line.strip()[:80]!r}")
        return found

    def drain(self, reason: str) -> None:
        """Let no new jobs start on the node."""
        self._run("update", f"NodeName={self.node}", "State=DRAIN", f"Reason={reason}")

    def set_reason(self, reason: str) -> None:
        """Change the reason and leave the state as it is."""
        self._run("update", f"NodeName={self.node}", f"Reason={reason}")

    def undrain(self) -> None:
        """Take off the drain and nothing else: a node that is down stays down."""
        self._run("update", f"NodeName={self.node}", "State=UNDRAIN")

    def config(self) -> str:
        """`scontrol show config`."""
        return self._run("show", "config")

    def _run(self, *words: str) -> str:
        env = {name: value for name, value in os.environ.items() if name != "SLURM_TIME_FORMAT"}
        error_fd = os.memfd_create("stderr")

        def work(pipe: int) -> None:
            # In the child: both the look at the path and execve(2) block on a file system that hangs.
            os.dup2(pipe, 1)
            os.dup2(error_fd, 2)
            try:
                trust.require(self.path, SlurmError)
                os.execve(self.path, [self.path, *words], {**env, "LC_ALL": "C"})
            except (OSError, SlurmError) as error:
                os.write(2, f"cannot be run: {error}".encode())
                raise

        timeout_s = max(_MIN_S, self.until_s - time.monotonic())
        try:
            ended = bounded_process.fork(work, timeout_s, limit=_MAX_BYTES).finish()
            said = " ".join(os.pread(error_fd, _ERROR_BYTES, 0).decode(errors="replace").split())
        except OSError as error:
            raise SlurmError(f"{self.path} cannot be run: {error.strerror}") from None
        finally:
            os.close(error_fd)
        call = f"{self.path} {words[0]}"
        if ended.code is None:
            raise SlurmError(f"{call} did not end within {timeout_s:.1f} s")
        if ended.truncated:
            raise SlurmError(f"{call} says more than {_MAX_BYTES} bytes")
        if ended.code:
            raise SlurmError(f"{call} failed: {said[:200]}")
        return ended.stdout.decode(errors="replace")


def find(path: str = "") -> str:
    """The absolute path of scontrol: `path` if it is given, else the first of SCONTROL. Raises SlurmError."""
    found = path or next((place for place in SCONTROL if os.access(place, os.X_OK)), "")
    if not found:
        raise SlurmError(f"there is no scontrol in {', '.join(map(os.path.dirname, SCONTROL))}; set SCONTROL")
    return found
