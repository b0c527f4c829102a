"""The backend by pyslurm, which runs in a child process of its own.

What it does not do better is inherited from the command line tools: `config`, `submit` and `complete`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, BinaryIO

from nvrx_slurm.child import bounded_process
from nvrx_slurm.slurm.api import text
from nvrx_slurm.slurm.api.cli import CommandLine
from nvrx_slurm.slurm.api.facts import JobFacts, NoAnswer, NodeFacts, NotKnown, SlurmError, StepFacts

_MAX_BYTES = 64 << 20  # of an answer
_CHUNK_BYTES = 1 << 20
_ERROR_BYTES = 4096
_ENDING_S = 1.0


def load() -> tuple[PySlurm | None, str]:
    """The backend, or None and why not: pyslurm has to be installed, to load, and to be of the cluster's version."""
    if find_spec("pyslurm") is None:
        return None, "pyslurm is not installed"
    found = PySlurm()
    try:
        mine, cluster = found.ask("version")
    except SlurmError as error:
        found.close()
        return None, f"pyslurm does not work: {error}"
    if mine.split(".")[:2] != cluster.split(".")[:2]:
        found.close()
        return None, f"pyslurm {mine} does not match Slurm {cluster}"
    return found, ""


class PySlurm(CommandLine):
    """See interface.Slurm. The child starts at the first question, and again after one that it did not answer."""

    name = "pyslurm"
    _child: subprocess.Popen[bytes] | None = None
    _errors: BinaryIO  # what the child says on stderr

    def ask(self, call: str, *args: Any) -> Any:
        """One request to the child. Raises SlurmError; NoAnswer after 10 s."""
        bound_s = self.tools.timeout_s
        with self.tools.turn.take(bound_s):
            until_s = time.monotonic() + bound_s
            try:
                line = self._exchange(json.dumps({"call": call, "args": args}).encode() + b"\n", until_s)
                found = json.loads(line)
            except (OSError, ValueError):
                said = self._last_line()
                self.close()
                raise NoAnswer(f"pyslurm's process ended: {said or 'it does not say why'}") from None
            except NoAnswer:
                self.close()
                raise
            if "error" in found:
                raise text.error(f"pyslurm's {call}", str(found["error"]))
            return found["ok"]

    def _exchange(self, request: bytes, until_s: float) -> bytes:
        if self._child is None or self._child.poll() is not None:
            self.close()
            argv = [sys.executable, "-P", "-m", "nvrx_slurm.slurm.api.pyslurm_child"]
            if sys.version_info < (3, 11):
                argv.remove("-P")
            # A file is never full, unlike a pipe that is not read.
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._child = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
            )
        child = self._child
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(request)
        answer = bytearray()
        while not answer.endswith(b"\n"):
            if not bounded_process.wait([child.stdout.fileno()], until_s):
                raise NoAnswer(f"pyslurm did not answer within {self.tools.timeout_s:g} s")
            more = os.read(child.stdout.fileno(), _CHUNK_BYTES)
            if not more or len(answer) > _MAX_BYTES:
                raise OSError("no answer" if not more else "too long an answer")
            answer += more
        return bytes(answer)

    def _last_line(self) -> str:
        """What the child, or libslurm in it, said last."""
        if self._child is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_ENDING_S)  # its output has ended, it follows
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _ERROR_BYTES))
        return self._errors.read().decode(errors="replace").strip().rpartition("\n")[2]

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            with child, self._errors:
                child.kill()

    # --- questions --------------------------------------------------------------------------------------------

    def job(self, job_id: int) -> JobFacts:
        """By Job.load."""
        plain = self.ask("job", job_id)
        for name in ("nodes", "excluded"):
            plain[name] = text.hosts(plain[name])
        return JobFacts(**plain)

    def steps(self, job_id: int) -> list[StepFacts]:
        """By JobSteps.load."""
        try:
            found = self.ask("steps", job_id)
        except NotKnown:
            return []
        return [StepFacts(step_id, name, text.hosts(nodes)) for step_id, name, nodes in found]

    def nodes(self, names: Iterable[str] = ()) -> dict[str, NodeFacts]:
        """By Node.load, Nodes.load."""
        wanted = [text.node_name(name) for name in names]
        rows = self.ask("nodes", wanted)
        found = {
            name: NodeFacts(name, frozenset(state.replace("*", "").split("+")), reason, by, address, port, tuple(parts))
            for name, state, reason, by, address, port, parts in rows
        }
        if missing := [name for name in wanted if name not in found]:
            raise NotKnown(f"Slurm: node {missing[0]} not found")
        return found

    # --- changes ----------------------------------------------------------------------------------------------

    def signal(self, job_id: int, signum: int, step: str = "") -> None:
        """By send_signal."""
        self.ask("signal", job_id, signum, step)

    def cancel(self, job_id: int) -> None:
        """By Job.cancel."""
        with suppress(NotKnown):  # it has ended
            self.ask("cancel", job_id)

    def requeue(self, job_id: int) -> None:
        """By Job.requeue."""
        self.ask("requeue", job_id)

    def exclude(self, job_id: int, nodes: Sequence[str]) -> None:
        """By Job.modify."""
        self.ask("exclude", job_id, [text.node_name(name) for name in nodes])

    def drain(self, node: str, reason: str) -> None:
        """By Node.modify."""
        self.ask("update_node", text.node_name(node), {"state": "DRAIN", "reason": reason})

    def set_reason(self, node: str, reason: str) -> None:
        """By Node.modify."""
        self.ask("update_node", text.node_name(node), {"reason": reason})

    def undrain(self, node: str) -> None:
        """By Node.modify."""
        self.ask("update_node", text.node_name(node), {"state": "UNDRAIN"})
