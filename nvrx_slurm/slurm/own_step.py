"""The step that a process is in, by what it cannot inherit.

sbatch and salloc pass the environment on. In a job that is submitted from a step, as from a shell of `srun --pty bash`,
the variables of that step (SLURM_STEP_*) are still there, while those of the job are its own.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_CGROUP = re.compile(r"/job_(\d+)/step_(\w+)")
_TITLE = re.compile(r"slurmstepd: \[(\d+)\.(\w+)\]")
_MOST_PARENTS = 64
# not SLURM_STEPMGR, the host that the steps of a job are asked of: it is of the job
_OF_STEP = ("SLURM_STEP_", "SLURM_STEPID")


class OwnStep(NamedTuple):
    """`name`: a number, or "batch", "interactive", "extern"."""

    job_id: str
    name: str


def find(proc: Path = Path("/proc")) -> OwnStep | None:
    """By the nearest slurmstepd above this process, else by its cgroup; None where neither can be seen.

    In this order, because a cluster may run without cgroups of its own in a job of another one.
    """
    pid = "self"
    with suppress(OSError, IndexError):
        for _ in range(_MOST_PARENTS):
            if found := _TITLE.match((proc / pid / "cmdline").read_text(errors="replace")):
                return OwnStep(*found.groups())
            pid = (proc / pid / "stat").read_text(errors="replace").rpartition(")")[2].split()[1]
    with suppress(OSError):
        if found := _CGROUP.search((proc / "self/cgroup").read_text(errors="replace")):
            return OwnStep(*found.groups())
    return None


def forget_another(env: MutableMapping[str, str], step: OwnStep | None) -> None:
    """Remove the variables of a step that this process is not in."""
    if step is None or step.name == "extern":  # by ssh into the job
        return
    # the components of a heterogeneous job have ids of their own
    of_another_job = step.job_id != env.get("SLURM_JOB_ID") and "SLURM_HET_SIZE" not in env
    if of_another_job or not step.name.isdecimal():
        for name in [*env]:
            if name.startswith(_OF_STEP):
                del env[name]
