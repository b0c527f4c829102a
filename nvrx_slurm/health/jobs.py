"""Which Slurm jobs a process belongs to: by its cgroup; where Slurm tracks no jobs by cgroup, by its environment."""

from __future__ import annotations

import re

from nvrx_slurm.health.check import NodeView

_JOB = re.compile(r"/job_([A-Za-z0-9]+)(?:/|$)")  # a part of a path of Slurm's cgroups


def of_cgroup(node: NodeView, pid: int) -> set[str]:
    """Jobs, as cgroups are named after them (the id; from Slurm 26.05 the SLUID). Raises OSError when it is gone.

    Only in hierarchies of Slurm's: anybody may call a cgroup of his own job_7.
    """
    lines = [line for line in node.text(f"/proc/{pid}/cgroup", 65536).splitlines() if "slurm" in line]
    return {job for line in lines for job in _JOB.findall(line)}


def of_environment(node: NodeView, pid: int) -> set[str]:
    """The id that the environment says: whatever the process wants. Raises OSError for somebody else's."""
    entries = node.text(f"/proc/{pid}/environ").split("\0")
    return {entry.partition("=")[2] for entry in entries if entry.startswith("SLURM_JOB_ID=")}
