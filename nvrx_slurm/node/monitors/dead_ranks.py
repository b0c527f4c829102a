"""The file that tells the in-process wrappers of this node which ranks are dead (min-healthy)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from nvrx_slurm.core.agent.events import PostGone

_VERSION = 1
_MAX_REASON_CHARS = 500


def note_gone(board: Path, say: Callable[[str], None], gone: PostGone) -> None:
    """Add a JSON line to the file of NVRX_BOARD; that it cannot be written is said.

    A wrapper's monitor process watches the file, so it need not wait for a heartbeat timeout. The file is never made
    anew: readers know their place in it.
    """
    note = {"v": _VERSION, "cycle": gone.cycle, "ranks": list(gone.ranks), "why": gone.reason[:_MAX_REASON_CHARS]}
    try:
        with board.open("r+b", buffering=0) as file:
            file.seek(0, os.SEEK_END)
            file.write(json.dumps(note).encode() + b"\n")
    except OSError as error:
        say(f"the wrappers will hear of dead ranks late: {board}: {error.strerror}")
