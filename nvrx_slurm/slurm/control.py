"""What nvrx-run asks Slurm. Where no answer is no reason to stop, these methods give a default instead of an error.

They block: never call one on an event loop. `slurm.api` has the questions themselves.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm.api import connect
from nvrx_slurm.slurm.api.facts import SlurmError

if TYPE_CHECKING:
    from nvrx_slurm.slurm.api.cli import Slurm

END_TIME = "SLURM_JOB_END_TIME"
KILL_WAIT_S = 30.0  # slurm.conf(5), KillWait
# State words after which a node's processes of a job are certainly gone (scontrol(1), "NODE STATES").
_GONE = frozenset({"DOWN", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED"})


class Control:
    """Questions to Slurm by one backend, which is made for the first of them."""

    def __init__(self, choice: str = "auto") -> None:
        """`choice`: as --slurm-api says."""
        self._choice = choice

    @cached_property
    def slurm(self) -> Slurm:
        """The backend. Raises NotUsable where pyslurm was asked for and does not work."""
        return connect(self._choice)[0]

    def node_address(self, name: str) -> str:
        """Where other nodes reach node `name`: the name itself if it resolves, else Slurm's NodeAddr for it.

        Raises UsageError when neither gives an address. Blocks for the resolver plus at most 10 s.
        """
        if _resolves(name):
            return name
        try:
            address = self.slurm.nodes([name])[name].address
        except SlurmError:
            address = ""
        if address and address != name and _resolves(address):
            return address
        raise UsageError(
            f"node {name}: its name does not resolve and Slurm knows no usable NodeAddr for it; "
            "add it to DNS or /etc/hosts, or set NodeAddr in slurm.conf."
        )

    def time_left_s(self, job_id: int, env: Mapping[str, str] | None = None) -> float | None:
        """Seconds until Slurm ends the job (>= 0; inf: it has no limit); None if unknown.

        env: where SLURM_JOB_END_TIME is looked up (23.02 and later set it; the limit may have been changed since);
        default os.environ. Without it Slurm is asked.
        """
        text = (os.environ if env is None else env).get(END_TIME, "")
        if text.isascii() and text.isdigit() and 0 < int(text) < 1 << 33:
            return max(0.0, int(text) - time.time())
        try:
            return self.slurm.job(job_id).time_left_s
        except SlurmError:
            return None

    def kill_wait_s(self) -> float:
        """Seconds Slurm leaves between SIGTERM and SIGKILL (KillWait); 30, its default, if unknown."""
        try:
            return seconds(self.slurm.config(), "KillWait", KILL_WAIT_S)
        except SlurmError:
            return KILL_WAIT_S

    def job_nodes(self, job_id: int) -> list[str] | None:
        """The nodes that the job has now and that Slurm does not consider dead; None if unknown.

        A batch script's variables keep the nodes it began with, also after a `--no-kill` job has lost some.
        """
        slurm = self.slurm  # a command ends where it is not usable
        try:
            names = slurm.job(job_id).nodes
        except SlurmError:
            return None
        try:
            states = slurm.nodes(names) if names else {}
        except SlurmError:
            return list(names) or None
        return [name for name in names if not is_gone(states[name].states)] or None

    def step_id(self, job_id: int, step_name: str) -> str | None:
        """ "JOB.STEP" of the running step of `job_id` with that name (srun --job-name); None when there is none."""
        try:
            steps = self.slurm.steps(job_id)
        except SlurmError:
            return None
        return next((step.step_id for step in steps if step.name == step_name), None)

    def signal_step(self, job_id: int, step_name: str, signum: int) -> bool:
        """Have Slurm send `signum` to the tasks of the step of `job_id` that was named `step_name` (srun --job-name).

        False when there is no such step (any more) or Slurm does not answer. Unlike a signal to srun, which kills the
        step at once for SIGTERM, this delivers just the signal.
        """
        step = self.step_id(job_id, step_name)
        if step is None:
            return False
        try:
            self.slurm.signal(job_id, signum, step)
        except SlurmError:
            return False
        return True


def seconds(config: Mapping[str, str], name: str, otherwise: float) -> float:
    """The number in a value of slurm.conf such as "30 sec"."""
    found = re.match(r"\d{1,9}\b", config.get(name, ""))
    return float(found[0]) if found else otherwise


def is_gone(states: frozenset[str]) -> bool:
    """Whether Slurm considers the node dead: then, as far as it knows, no process of a job runs there."""
    return bool(states & _GONE)


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):  # UnicodeError: a label too long for IDNA
        return False
