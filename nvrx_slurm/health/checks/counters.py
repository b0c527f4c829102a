"""How much error counters rose lately, from what is kept on the node between two looks.

A counter that goes back was reset, or its device was: the next look counts from there. The file is `cache`'s: of this
user and of this boot.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nvrx_slurm.health import cache
from nvrx_slurm.health.check import NodeView
from nvrx_slurm.system import files
from nvrx_slurm.system.hardware import Absent

_WAIT_S = 3600.0  # for the lock; the deadline of the check ends the wait before


def rises(node: NodeView, check: str, now: Mapping[str, int], window_s: float) -> dict[str, int]:
    """By how much each counter rose within the window (only those that did); this look is kept for the next one.

    Raises Absent where nothing can be kept, and OSError.
    """
    with alone(node, check):
        kept = recall(node, check)
        last, at_s = kept.get("last", {}), cache.now_s()
        recent = [rise for rise in kept.get("rises", []) if at_s - rise[0] <= window_s]
        recent += [(at_s, name, count - last[name]) for name, count in now.items() if count > last.get(name, count)]
        remember(node, check, {"last": {**last, **now}, "rises": recent})
    risen: dict[str, int] = {}
    for _, name, by in recent:
        risen[name] = risen.get(name, 0) + by
    return risen


@contextmanager
def alone(node: NodeView, name: str) -> Iterator[None]:
    """Around `recall` and `remember`: no other process looks meanwhile. Raises as `rises`."""
    node.doing("waiting for another look to end")
    with files.file_lock(f"{_path(node, name)}.lock", _WAIT_S):
        yield


def recall(node: NodeView, name: str) -> dict[str, Any]:
    """What `remember` kept under this name since the node was booted; {} if nothing, or nothing that can be believed.

    Raises as `rises`.
    """
    try:
        found = cache.read_private(_path(node, name))
    except cache.Unusable:
        return {}
    ours = isinstance(found, dict) and found.get("boot") == cache.boot_id(node)
    return found if ours else {}


def remember(node: NodeView, name: str, facts: Mapping[str, object]) -> None:
    """Keep JSON under this name. Raises as `rises`."""
    cache.write_private(_path(node, name), {"boot": cache.boot_id(node), **facts})


def _path(node: NodeView, name: str) -> str:
    parent = "/run" if os.geteuid() == 0 else f"/run/user/{os.geteuid()}"
    if not node.state_dir and not os.path.isdir(node.path(parent)):
        raise Absent(f"there is nothing to compare with: no {parent} to keep it in")
    try:
        return f"{cache.private_directory(node)}/{name}.kept"
    except cache.Unusable as error:
        raise OSError(0, str(error)) from None
