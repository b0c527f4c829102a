"""A record on the node of the checks for which hooks drained it, so that a healthy node costs slurmctld no question.

The record also keeps checks that failed while slurmctld could not be told. It lasts until the next boot.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from nvrx_slurm.health import cache
from nvrx_slurm.health.check import NodeView

_LOCK_S = 1.0  # for other hooks to write the record, which is in memory


def read(node: NodeView, name: str) -> dict[str, float] | None:
    """Each check for which we drained, or are about to drain, the node `name`, with the time of its last failure
    (`cache.now_s`).

    {}: we did not drain the node. None: unknown, as after a boot. Only {} saves the question to slurmctld.
    """
    try:
        record = cache.read_private(_path(node, name))
        if record["boot"] != cache.boot_id(node):
            return None
        return {str(check): float(at_s) for check, at_s in record["checks"].items()}
    except (OSError, cache.Unusable, KeyError, TypeError, ValueError, AttributeError):
        return None


def update(node: NodeView, name: str, failed: Iterable[str] = (), since_s: float = 0.0) -> dict[str, float]:
    """Record that the checks `failed` failed now, drop failures from before `since_s`, and return the new record.

    If a failure cannot be recorded, the old record is removed: slurmctld is asked each time then.
    """
    from nvrx_slurm.system.files import file_lock  # not needed on a healthy node

    path = ""
    try:
        path = _path(node, name)
        with file_lock(f"{path}.lock", _LOCK_S):
            known = read(node, name) or {}
            kept = {check: at_s for check, at_s in known.items() if at_s >= since_s}
            kept.update(dict.fromkeys(failed, cache.now_s()))
            cache.write_private(path, {"boot": cache.boot_id(node), "checks": kept})
            return kept
    except (OSError, cache.Unusable):
        if path and failed:
            with contextlib.suppress(OSError):
                os.unlink(path)
        return {}


def _path(node: NodeView, name: str) -> str:
    return f"{cache.private_directory(node)}/drained-{name}.json"
