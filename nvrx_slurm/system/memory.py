"""How much more memory this process's job may use."""

from __future__ import annotations

import re
from pathlib import Path

# cgroups(7): version 2 has one hierarchy, version 1 one for each controller. A path says which group a process is in.
GROUPS = re.compile(r"^\d+:(memory|):(.*)", re.MULTILINE)
_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_AVAILABLE = re.compile(r"^MemAvailable: +(\d+) kB", re.MULTILINE)
_MAX_DEPTH = 32


def free_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes, and what limits them: the machine, or the nearest cgroup of this process and those above it.

    Pages of files that the kernel drops when memory is short count as free. (0, ...) where nothing can be read.
    """
    found = _AVAILABLE.search(text(root / "proc/meminfo"))
    free = int(found[1]) * 1024 if found else 0
    of = "the machine"
    for kind, group in GROUPS.findall(text(root / "proc/self/cgroup")):
        top = root / "sys/fs/cgroup" / kind
        here = top / group.lstrip("/")
        for _ in range(_MAX_DEPTH):
            left = _left(here, *_FILES[kind])
            if left is not None and left < free:
                free, of = (
                    left,
                    f"the memory limit of cgroup {here.relative_to(root / 'sys/fs/cgroup')}",
                )
            if here == top or top not in here.parents:
                break
            here = here.parent
    return max(0, free), of


def _left(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """None: the group has no limit."""
    most, used = text(group / limit).strip(), text(group / usage).strip()
    if not most.isdecimal() or not used.isdecimal():
        return None
    droppable = re.search(rf"^{reclaimable} (\d+)", text(group / "memory.stat"), re.MULTILINE)
    return int(most) - int(used) + (int(droppable[1]) if droppable else 0)


def text(path: str | Path) -> str:
    """A file of the kernel; "" where it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""
