"""What nvrx-run asks Slurm, and how it ends a job that has lost its batch host.

All of this blocks: never call it on an event loop. `slurm.api` has the questions themselves.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm.api import connect
from nvrx_slurm.slurm.api.facts import (
    JobFacts,
    NoAnswer,
    NotInstalled,
    NotKnown,
    SlurmError,
    Waits,
)
from nvrx_slurm.system.ports import is_refused

if TYPE_CHECKING:
    from nvrx_slurm.slurm.api.cli import Slurm

T = TypeVar("T")
Default = TypeVar("Default")

END_TIME = "SLURM_JOB_END_TIME"
KILL_WAIT_S = 30.0  # slurm.conf(5), KillWait
# State words after which a node's processes of a job are certainly gone (scontrol(1), "NODE STATES").
_GONE = frozenset({"DOWN", "POWERED_DOWN", "POWERING_DOWN", "REBOOT_ISSUED"})
_SLURMD_PORT = 6818
_CONNECT_S = 2.0


class BatchHost(Enum):
    """What is known of the host of the batch script."""

    ALIVE = "it answers; or the job has no batch script, or has ended"
    GONE = "Slurm says that it is down, or nothing listens at the port of its slurmd"
    SILENT = "it does not answer, and Slurm has not given it up yet; or Slurm does not answer"


class Control:
    """Questions to Slurm by one backend, which is made for the first of them.

    Where no answer is no reason to stop, these methods give a default instead of an error.
    """

    def __init__(self, choice: str = "auto") -> None:
        """`choice`: as --slurm-api says."""
        self._choice = choice

    @cached_property
    def slurm(self) -> Slurm:
        """The backend. Raises NotUsable where pyslurm was asked for and does not work."""
        return connect(self._choice)[0]

    def _ask(self, question: Callable[[Slurm], T], otherwise: Default) -> T | Default:
        try:
            return question(self.slurm)
        except SlurmError:
            return otherwise

    def node_address(self, name: str) -> str:
        """Where other nodes reach node `name`: the name itself if it resolves, else Slurm's NodeAddr for it.

        Raises UsageError when neither gives an address. Blocks for the resolver plus at most 10 s.
        """
        if _resolves(name):
            return name
        address = self._ask(lambda slurm: slurm.nodes([name])[name].address, "")
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
        end_s = (os.environ if env is None else env).get(END_TIME, "")
        if re.fullmatch(r"[1-9][0-9]{0,9}", end_s):
            return max(0.0, int(end_s) - time.time())
        return self._ask(lambda slurm: slurm.job(job_id).time_left_s, None)

    def began(self, job_id: int) -> tuple[int, int] | None:
        """When a job with a batch script was submitted and started (Unix seconds); None if unknown."""
        job = self._ask(lambda slurm: slurm.job(job_id), None)
        known = job is not None and job.batch_host and 0 < job.submitted_s <= job.started_s
        return (job.submitted_s, job.started_s) if job is not None and known else None

    def kill_wait_s(self) -> float:
        """Seconds Slurm leaves between SIGTERM and SIGKILL (KillWait); 30, its default, if unknown."""
        told = self._ask(lambda slurm: slurm.config().get("KillWait", ""), "")  # "30 sec"
        found = re.match(r"\d{1,9}\b", told)
        return float(found[0]) if found else KILL_WAIT_S

    def job_now(self, job_id: int) -> JobFacts | None:
        """The job, with those of its nodes that Slurm does not consider dead; None if unknown.

        A batch script's variables keep the nodes it began with, also after a `--no-kill` job has lost some. Raises
        NotUsable.
        """
        slurm = self.slurm
        try:
            job = slurm.job(job_id)
        except SlurmError:
            return None
        states = self._ask(lambda slurm: slurm.nodes(job.nodes) if job.nodes else {}, {})
        alive = [
            name for name in job.nodes if name not in states or not states[name].states & _GONE
        ]
        return replace(job, nodes=tuple(alive))

    def step_id(self, job_id: int, step_name: str) -> str | None:
        """ "JOB.STEP" of the running step of `job_id` with that name (srun --job-name); None when there is none."""
        steps = self._ask(lambda slurm: slurm.steps(job_id), [])
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
            self.slurm.signal(step, signum)
        except SlurmError:
            return False
        return True

    def requeues(self, job_id: int) -> bool:
        """Whether Slurm starts this job again where it takes its nodes away."""
        return self._ask(lambda slurm: slurm.requeues(job_id), False)

    def set_comment(self, job_id: int, text: str) -> None:
        """Set the Comment of the job, which `squeue -O Comment` shows. Raises OSError where Slurm does not do it."""
        try:
            self.slurm.update_job(job_id, f"Comment={text}")
        except SlurmError as error:
            raise OSError(str(error)) from None

    # --- a job that may have lost its batch host ----------------------------------------------------------------

    def batch_host(self, job_id: int) -> BatchHost:
        """Ask Slurm and the host itself. Blocks up to 32 s. Raises NotInstalled where Slurm cannot be asked."""
        try:
            name = self.slurm.job(job_id).batch_host
            if not name:
                return BatchHost.ALIVE
            host = self.slurm.nodes([name])[name]
        except NotKnown:
            return BatchHost.ALIVE
        except NotInstalled:
            raise
        except SlurmError:
            return BatchHost.SILENT
        if host.states & _GONE:
            return BatchHost.GONE
        refused = is_refused(host.address or name, host.port or _SLURMD_PORT, _CONNECT_S)
        return {True: BatchHost.GONE, False: BatchHost.ALIVE, None: BatchHost.SILENT}[refused]

    def end_without_batch_host(
        self, job_id: int, code: int, with_scancel: bool, requeue: bool = False
    ) -> str:
        """End the job with `code` (0 to 255), if its batch host is gone. Returns what was done; "": the host is alive.

        The srun and the batch script die with their host. With `--no-kill` and output to files the step lives on, and
        the job stays RUNNING after the step's end. Slurm can end it with the right code, for its owner too.
        `with_scancel`: scancel the job where Slurm refuses. `requeue`: the job is to start again. Blocks up to 62 s.
        Raises NoAnswer when Slurm or the host does not answer, or Slurm refuses: try again. NotInstalled: as
        `batch_host`.
        """
        found = self.batch_host(job_id)
        if found is BatchHost.SILENT:
            raise NoAnswer("neither Slurm nor the host tells whether it is alive")
        if found is BatchHost.ALIVE:
            return ""
        gone = f"the batch host of job {job_id} is gone"
        try:
            if requeue:
                start_again(self.slurm, job_id)
                return f"{gone}: the job is requeued"
            self.slurm.complete(job_id, code)
            return f"{gone}: the job was ended with code {code}"
        except SlurmError as error:
            if isinstance(error, NoAnswer) or not with_scancel:
                raise NoAnswer(str(error)) from None
            self.slurm.cancel(job_id)
            failed = "requeue" if requeue else "slurm_complete_job"
            return f"{gone}, and {failed} failed ({error}); scancel ended the job"


def start_again(slurm: Slurm, job_id: int) -> None:
    """Requeue a job, unless it waits already: Slurm may have done what it did not answer. Raises SlurmError."""
    with suppress(Waits):
        slurm.requeue(job_id)


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):  # UnicodeError: a label too long for IDNA
        return False
