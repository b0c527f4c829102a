"""What the agent tells the in-process wrappers on its node: ranks that are known to be dead, one JSON line each time.

The file belongs to this agent's private directory; NVRX_BOARD names it. A wrapper's monitor process watches it, so a
death that the job's control plane has seen reaches every wrapper in milliseconds, not after a heartbeat timeout.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from nvrx_slurm.system.files import BOARD_NAME

BOARD_ENV = "NVRX_BOARD"
_VERSION = 1
_MAX_REASON_CHARS = 500


class Board:
    """Appends to the file; readers see whole lines only (one write each)."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / BOARD_NAME
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    def post(self, cycle: int, ranks: tuple[int, ...], reason: str) -> None:
        """These ranks of the plan of `cycle` are dead. Raises OSError (the directory is gone, no space)."""
        note = {"v": _VERSION, "cycle": cycle, "ranks": list(ranks), "why": reason[:_MAX_REASON_CHARS]}
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, json.dumps(note).encode() + b"\n")
        finally:
            os.close(fd)
