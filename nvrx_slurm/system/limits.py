"""Limits of this process that a job runs into: looked at early, raised where that is allowed, told from defects."""

from __future__ import annotations

import errno
import os
import re
import resource
from contextlib import ExitStack
from pathlib import Path

from nvrx_slurm.errors import UsageError

_OWN_FILES = 256  # logs, monitors and the like
_START_FILES = 16  # event loop, signals, console, directory and process of the checks
_OF_THE_MACHINE = (
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT),
    *(errno.EIO, errno.ESTALE, errno.EROFS),
)
# Version 2 has one hierarchy; version 1 one for each controller. A path says which group of it a process is in.
_GROUPS = re.compile(r"^\d+:(memory|):(.*)", re.MULTILINE)
_OOM_FILES = {"": "memory.events", "memory": "memory.oom_control"}
_OOM_KILLS = re.compile(r"^oom_kill (\d+)", re.MULTILINE)


def oom_kills() -> int:
    """How many processes of this one's cgroup the kernel has killed for lack of memory; 0 where it does not tell."""
    for hierarchy, group in _GROUPS.findall(_text("/proc/self/cgroup")):
        found = _OOM_KILLS.search(_text(f"/sys/fs/cgroup/{hierarchy}{group}/{_OOM_FILES[hierarchy]}"))
        if found:
            return int(found[1])
    return 0


def _text(path: str) -> str:
    """A file of the kernel; "" where it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def check_start() -> None:
    """Raises UsageError where this process may not even open what it needs before it can degrade."""
    with ExitStack() as opened:
        try:
            for _ in range(_START_FILES):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            raise UsageError(f"too few files may be open here ({most}): {error.strerror}; raise ulimit -n") from None


def lack(error: Exception) -> str:
    """What the machine does not give, by the error of a call; "" where the error tells of a defect."""
    if isinstance(error, MemoryError):
        return "there is no memory"
    if isinstance(error, OSError) and error.errno in _OF_THE_MACHINE:
        return f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)
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
