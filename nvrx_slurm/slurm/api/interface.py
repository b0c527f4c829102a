"""The one interface to Slurm. `nvrx_slurm.slurm.api.connect` gives the backend that fits this machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from nvrx_slurm.slurm.api.facts import JobFacts, NodeFacts, StepFacts


class Slurm(Protocol):
    """Questions to Slurm and changes, each one call to slurmctld at most, bounded, and never two at a time.

    All methods block; never call one on an event loop. All raise SlurmError: NoAnswer when slurmctld is away or slow,
    NotKnown for a job, step or node that is not there, NotAllowed where this user may not.
    """

    name: str  # "cli" or "pyslurm"

    def job(self, job_id: int) -> JobFacts:
        """One job; of an array's id the task that has it."""

    def steps(self, job_id: int) -> list[StepFacts]:
        """The steps of a job that run now; [] when none does."""

    def nodes(self, names: Iterable[str] = ()) -> dict[str, NodeFacts]:
        """These nodes, or all, in one call. A name that Slurm does not know raises NotKnown."""

    def blocks(self) -> dict[str, str]:
        """The block of each node in topology/block; {} where Slurm has another topology."""

    def config(self) -> dict[str, str]:
        """slurm.conf as slurmctld runs it, by name; "(null)" is "". Values of Prolog[0], Prolog[1] are joined."""

    def signal(self, job_id: int, signum: int, step: str = "") -> None:
        """Send `signum` to the tasks of one step ("7.0"), or of all steps without the batch script."""

    def cancel(self, job_id: int) -> None:
        """scancel the job; of an array's id all its tasks. One that has ended, or is not known, is no error."""

    def requeue(self, job_id: int) -> None:
        """End the job and put it back into the queue."""

    def exclude(self, job_id: int, nodes: Sequence[str]) -> None:
        """Set the nodes that a waiting job must not get (sbatch --exclude)."""

    def drain(self, node: str, reason: str) -> None:
        """Let no new jobs start on the node."""

    def set_reason(self, node: str, reason: str) -> None:
        """Change the reason and leave the state as it is."""

    def undrain(self, node: str) -> None:
        """Take off the drain and nothing else: a node that is down stays down."""

    def submit(self, script: Path, options: Sequence[str] = ()) -> int:
        """sbatch the script with `options` before it; the job's id."""

    def complete(self, job_id: int, code: int) -> None:
        """End a job that has lost its batch host, with exit code `code` (0..255)."""

    def close(self) -> None:
        """End what the backend has started."""
