"""What the attribution process is told, and what it answers. Cheap to import."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any

from nvrx_slurm.core.words import one_line
from nvrx_slurm.system.foreign import last_bytes

PORT = 50050  # of the service that a job runs itself
FOLDER = "attribution"  # of results, in the log tree
_REASON_CHARS, _SOURCE_CHARS = 400, 60
_MAX_KEY_BYTES = 8192


@dataclass(frozen=True)
class AttributionSpec:
    """What the process needs to know about its job. Empty text = not given."""

    endpoint: str  # where the service is; "" = this process is it
    prefix: str = "/"  # of the merged logs, without links; the log of this process is beside them
    tree: str = ""  # our own log tree of this run
    startup_s: float = 20.0  # a later start is said
    log_level: int = 20
    user: str = ""
    job_id: str = ""
    cluster: str = ""
    llm_base_url: str = ""
    llm_model: str = ""
    llm_key_file: str = ""
    export_url: str = ""
    port: int = PORT


@dataclass(frozen=True)
class CycleNews:
    """A cycle runs, or is over."""

    cycle: int
    log: str  # the merged log of the cycle
    over: bool = False
    lasted_s: float = 0.0
    fault: dict[str, Any] = field(
        default_factory=dict
    )  # the first cause, as the coordinator knows it; {} = none


@dataclass(frozen=True)
class Recommendation:
    """The recommendation about one cycle, and all that was found out about it. Its text is not trusted."""

    action: str = "UNKNOWN"  # STOP, RESTART, CONTINUE, UNKNOWN or TIMEOUT
    reason: str = ""
    source: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """One line for people; "" where nothing is known."""
        said = one_line(self.reason)[:_REASON_CHARS]
        if self.action == "UNKNOWN" and not said:
            return ""
        source = one_line(self.source)[:_SOURCE_CHARS]
        return self.action + (f": {said}" if said else "") + (f" ({source})" if source else "")


def read_key(path: str) -> str:
    """The key of a language model. Raises OSError, and ValueError for a file that others can use or without a key."""
    if not path:
        raise ValueError("a language model needs one")
    if os.stat(path).st_mode & 0o077:
        raise ValueError("others than its owner may use it (chmod 600)")
    key = last_bytes(path, _MAX_KEY_BYTES).decode("ascii", "replace").strip()
    if not re.fullmatch("[!-~]+", key):
        raise ValueError("it must hold the key, and nothing else")
    return key
