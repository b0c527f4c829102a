"""Limits of this process that a big job runs into: looked at early, raised where that is allowed."""

from __future__ import annotations

import resource

_OWN_FILES = 256  # logs, monitors and the like


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
