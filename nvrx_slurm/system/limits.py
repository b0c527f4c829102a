"""Limits of this process that a job runs into: looked at early, raised where that is allowed."""

from __future__ import annotations

import os
import re
import resource

from nvrx_slurm.errors import UsageError
from nvrx_slurm.system.memory import GROUPS, text

_OWN_FILES = 256  # logs, monitors and the like
_START_FILES = 16  # event loop, signals, console, directory and process of the checks
_OOM_FILES = {"": "memory.events", "memory": "memory.oom_control"}
_OOM_KILLS = re.compile(r"^oom_kill (\d+)", re.MULTILINE)


def oom_kills() -> int:
    """How many processes of this one's cgroup the kernel has killed for lack of memory; 0 where it does not tell."""
    for hierarchy, group in GROUPS.findall(text("/proc/self/cgroup")):
        found = _OOM_KILLS.search(
            text(f"/sys/fs/cgroup/{hierarchy}{group}/{_OOM_FILES[hierarchy]}")
        )
        if found:
            return int(found[1])
    return 0


def check_start() -> None:
    """Raises UsageError where this process may not even open what it needs before it can degrade."""
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < lowest + _START_FILES:
        raise UsageError(
            f"nvrx-run may open only {most} files, and needs more to begin; raise ulimit -n"
        )


def files_for(connections: int) -> str:
    """Make room for `connections` open streams (RLIMIT_NOFILE); returns a sentence if there is too little, else ""."""
    # unauthenticated peers may take a quarter (control/admission.py)
    needed = (connections + _OWN_FILES) * 4 // 3
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the kernel allows no infinite number
    if soft >= needed:
        return ""
    allowed = min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed >= needed:
        return ""
    return (
        f"the coordinator may open {allowed} files but {connections} nodes need {needed}: some will not get in;"
        " raise the hard limit (ulimit -Hn) on the first node"
    )
