"""What Slurm answers and what it refuses, the same for both backends and all versions from 22.05 on."""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_slurm.errors import NvrxError


class SlurmError(NvrxError):
    """Slurm refused, or a tool of it cannot be run: one sentence with Slurm's reason."""


class NoAnswer(SlurmError):
    """Slurm does not answer now; it may later."""


class NotKnown(SlurmError):
    """Slurm knows no such job, step or node (any more)."""


class NotAllowed(SlurmError):
    """This user may not do that on this cluster."""


class Waits(SlurmError):
    """The job waits already."""


class NotInstalled(SlurmError):
    """There is no Slurm here, or it cannot be run."""


@dataclass(frozen=True)
class JobFacts:
    """One job. States are Slurm's long words in upper case; unknown ones are kept as they are."""

    job_id: int
    state: str  # "PENDING", "RUNNING", "COMPLETING", "COMPLETED", ...
    reason: str  # why it waits: "Priority", "JobHeldUser", ...; "" = none
    nodes: tuple[str, ...]  # allocated now; () while it waits
    excluded: tuple[str, ...]
    restarts: int  # how often Slurm requeued it
    requeue: bool  # whether it may be requeued
    partition: str
    reservation: str  # "" = none
    num_nodes: int  # how many nodes it asks for, or has
    batch_host: str  # "" = no batch script
    time_left_s: float | None  # inf = no limit; None = not running
    exit_code: int  # 0..255, or 128 + signal; 0 while it runs
    submitted_s: int = 0  # Unix seconds; 0 = not known. Of a requeued job: when it was requeued
    started_s: int = 0  # the same; 0 also while it waits
    qos: str = ""  # the same for pyslurm, which is not asked
    preempted: bool = False  # Slurm takes its nodes away, now or after the GraceTime
    # beginnings of names: such variables are here from another job, in which sbatch was called; pyslurm is not asked
    inherited: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepFacts:
    """A running step: its id in Slurm's words ("7.0", "7.batch"), its name (srun --job-name)."""

    step_id: str
    name: str


@dataclass(frozen=True)
class NodeFacts:
    """One node. `states`: upper case without marks, {"IDLE", "DRAIN", "NOT_RESPONDING"}."""

    name: str
    states: frozenset[str]
    reason: str  # "" = none
    reason_by: str  # the user that set it; "" = none
    address: str  # NodeAddr
    port: int  # port of its slurmd; 0 = unknown
    partitions: tuple[str, ...] = ()
