"""The file that tells the in-process wrappers of this node which ranks are dead (min-healthy)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from nvrx_slurm.core.agent.events import PostGone
from nvrx_slurm.system.files import BOARD_NAME

_VERSION = 1
_MAX_REASON_CHARS = 500


class DeadRanksFile:
    """One JSON line for each note in the file of NVRX_BOARD. A wrapper's monitor process watches the file, so it need
    not wait for a heartbeat timeout."""

    def __init__(self, private_dir: Path, say: Callable[[str], None]) -> None:
        self.path = private_dir / BOARD_NAME
        self._say = say

    def create(self) -> None:
        """Make the file. It is never made anew: readers know their place in it. Raises OSError."""
        self.path.touch(0o600)

    def note(self, gone: PostGone) -> None:
        """Add a note; that it cannot be written is said."""
        reason = gone.reason[:_MAX_REASON_CHARS]
        note = {"v": _VERSION, "cycle": gone.cycle, "ranks": list(gone.ranks), "why": reason}
        try:
            with self.path.open("r+b", buffering=0) as file:
                file.seek(0, os.SEEK_END)
                file.write(json.dumps(note).encode() + b"\n")
        except OSError as error:
            self._say(f"the wrappers will hear of dead ranks late: {self.path}: {error.strerror}")
