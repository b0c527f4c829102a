"""The backend by pyslurm, which runs in a child process of its own.

It answers about jobs and nodes, and ends jobs. The rest is inherited from the command line tools: those that make or
change something are beside sbatch and srun.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from typing import IO, Any

from nvrx_slurm.child import bootstrap
from nvrx_slurm.slurm.api import text
from nvrx_slurm.slurm.api.cli import Slurm
from nvrx_slurm.slurm.api.facts import (
    JobFacts,
    NoAnswer,
    NodeFacts,
    NotKnown,
    SlurmError,
)
from nvrx_slurm.system import bounded

_ERROR_BYTES = 4096
_ENDING_S = 1.0


def load() -> tuple[PySlurm | None, str]:
    """The backend, or None, and why: pyslurm has to be installed, to load, and to be of the cluster's version."""
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
    return found, "pyslurm is of this cluster's version"


class PySlurm(Slurm):
    """See Slurm. The child starts at the first question, and again after one that it did not answer."""

    name = "pyslurm"
    _child: subprocess.Popen[str] | None = None
    # what the child says on stderr; a file is never full, unlike a pipe that is not read
    _errors: IO[bytes]

    def ask(self, call: str, *args: Any) -> Any:
        """One request to the child. Raises SlurmError; NoAnswer after 10 s."""
        bound_s = self.tools.timeout_s
        with self.tools.turn.take(bound_s):
            request = json.dumps({"call": call, "args": args})
            try:
                child = self._running()
                answer = json.loads(
                    bounded.call(lambda: _exchange(child, request), bound_s, "nvrx pyslurm")
                )
            except (OSError, ValueError):
                why = f"pyslurm's process ended: {self._last_line() or 'it does not say why'}"
                self.close()
                raise NoAnswer(why) from None
            except bounded.Overrun:
                self.close()  # ends the thread, too
                raise NoAnswer(f"pyslurm did not answer within {bound_s:g} s") from None
            if "error" in answer:
                raise text.error(f"pyslurm's {call}", str(answer["error"]))
            return answer["ok"]

    def _running(self) -> subprocess.Popen[str]:
        """The child, started if there is none."""
        if self._child is None or self._child.poll() is not None:
            self.close()
            self._errors = tempfile.TemporaryFile()  # noqa: SIM115
            self._child = subprocess.Popen(
                bootstrap.command("nvrx_slurm.slurm.api.pyslurm_child"),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, errors="replace",
            )  # fmt: skip
        return self._child

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
        child = self._child
        self._child = None
        if child is not None:
            with suppress(BrokenPipeError), child, self._errors:  # a request that no one has read
                child.kill()

    def job(self, job_id: int) -> JobFacts:
        """Answer by Job.load."""
        plain = self.ask("job", job_id)
        for name in ("nodes", "excluded"):
            plain[name] = text.hosts(plain[name])
        return JobFacts(**plain)

    def _nodes(self, wanted: list[str]) -> dict[str, NodeFacts]:
        """Answer by Node.load and Nodes.load."""
        found = {}
        for plain in self.ask("nodes", wanted):
            lists = {"states": frozenset(plain["states"]), "partitions": tuple(plain["partitions"])}
            found[plain["name"]] = NodeFacts(**plain | lists)
        return found

    def cancel(self, job_id: int) -> None:
        """Cancel by Job.cancel."""
        with suppress(NotKnown):
            self.ask("cancel", job_id)

    def requeue(self, job_id: int) -> None:
        """Requeue by Job.requeue."""
        self.ask("requeue", job_id)


def _exchange(child: subprocess.Popen[str], request: str) -> str:
    """The answer to one request; "" from a child that has ended."""
    assert child.stdin is not None and child.stdout is not None
    print(request, file=child.stdin, flush=True)
    return child.stdout.readline()
