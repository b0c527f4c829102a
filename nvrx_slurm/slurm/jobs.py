"""Which Slurm jobs a process belongs to: by its cgroup."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvrx_slurm.health.check import NodeView

# Slurm's cgroups: v2 ".../slurmstepd.scope/job_7/..." (several slurmd: "NODE_slurmstepd.scope"), v1
# "/slurm/uid_1000/job_7/..." ("slurm_NODE"). Below user.slice users make cgroups of any name.
_JOB = re.compile(
    r"^(?!/user\.slice/).*?/(?:[^/]+_)?slurm(?:stepd\.scope|(?:_[^/]+)?/uid_\d+)/job_([A-Za-z0-9]+)(?:/|$)"
)


def of_cgroup(node: NodeView, pid: int) -> set[str]:
    """Names of jobs in the cgroups of a process: ids, and SLUIDs from Slurm 26.05. Raises OSError when it is gone.

    Only hierarchies of Slurm's count, because users may name their own cgroups job_7.
    """
    paths = [line.split(":", 2)[-1] for line in node.text(f"/proc/{pid}/cgroup", 65536).split("\n")]
    return {found[1] for path in paths if (found := _JOB.match(path))}
