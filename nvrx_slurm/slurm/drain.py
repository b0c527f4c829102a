"""Draining nodes and taking them back, by scontrol: for Slurm's hooks, which run as root and have no PATH.

Each function is one call of scontrol, without a shell, with a bound.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import time
from typing import NamedTuple

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.slurm import control

SCONTROL = tuple(f"{place}/scontrol" for place in ("/usr/bin", "/usr/local/bin", "/opt/slurm/bin"))
NODE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}", re.ASCII)
_MAX_BYTES = 1 << 20  # of an answer
_REAP_S = 0.1  # longest wait for a killed one to end
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
            process = subprocess.Popen(
                [self.path, *words], env={**clean, "LC_ALL": "C"}, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            raise SlurmError(f"{self.path} cannot be run: {error.strerror}") from None
        try:
            out, err = _read(process, time.monotonic() + timeout_s)
            code = process.wait(max(0.0, self.until_s - time.monotonic()))
        except (TimeoutError, subprocess.TimeoutExpired):
            raise SlurmError(f"{self.path} {words[0]} did not end within {timeout_s:.1f} s") from None
        except OverflowError:
            raise SlurmError(f"{self.path} {words[0]} says more than {_MAX_BYTES} bytes") from None
        finally:
            _end(process)
        if code:
            raise SlurmError(f"{self.path} {words[0]} failed: {' '.join(err.split())[:200]}")
        return out


def _read(process: subprocess.Popen[bytes], until_s: float) -> tuple[str, str]:
    """All that it says. Raises TimeoutError, and OverflowError when that is more than _MAX_BYTES."""
    assert process.stdout is not None and process.stderr is not None
    said = {process.stdout.fileno(): b"", process.stderr.fileno(): b""}
    still = set(said)
    while still:
        ready = select.select(still, [], [], max(0.0, until_s - time.monotonic()))[0]
        if not ready:
            raise TimeoutError
        for fd in ready:
            more = os.read(fd, 65536)
            said[fd] += more
            if len(said[fd]) > _MAX_BYTES:
                raise OverflowError
            if not more:
                still.remove(fd)
    out, err = (data.decode(errors="replace") for data in said.values())
    return out, err


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it if it has not ended; init gets what is blocked in the kernel."""
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)


def find(path: str = "") -> str:
    """The absolute path of scontrol: `path` if it is given, else where packages put it. Raises SlurmError."""
    for place in (path,) if path else SCONTROL:
        if os.access(place, os.X_OK):
            return place
    raise SlurmError(f"there is no {path or 'scontrol in ' + ', '.join(map(os.path.dirname, SCONTROL))}; set SCONTROL")
