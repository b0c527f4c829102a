"""Limits of this process that a big job runs into: looked at early, raised where that is allowed."""

from __future__ import annotations

import contextlib
import re
import resource
from pathlib import Path

_OWN_FILES = 256  # logs, monitors and the like
_OOM_FILES = {"": "{}/memory.events", "memory": "memory/{}/memory.oom_control"}  # by the controllers of a hierarchy
_OOM_KILLS = re.compile(r"^oom_kill (\d+)", re.MULTILINE)


def oom_kills() -> int:
    """How many processes of this one's cgroup the kernel has killed for lack of memory; 0 where it does not tell."""
    groups = [line.split(":", 2)[1:] for line in _text("/proc/self/cgroup").splitlines()]
    files = [_OOM_FILES.get(controllers, "").format(path) for controllers, path in groups]
    files += _OOM_FILES[""].format(""), _OOM_FILES["memory"].format("")  # a container's own cgroup may be the root
    found = (_OOM_KILLS.search(_text(f"/sys/fs/cgroup/{file}")) for file in files if file)
    return next((int(one[1]) for one in found if one), 0)


def _text(path: str) -> str:
    """A file of the kernel; "" where it cannot be read."""
    with contextlib.suppress(OSError):
        return Path(path).read_text()
    return ""


def files_for(connections: int) -> str:
    """Make room for `connections` open streams (RLIMIT_NOFILE); returns a sentence if there is too little, else ""."""
    needed = (connections + _OWN_FILES) * 4 // 3  # unauthenticated peers may take a quarter (control/admission.py)
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
