"""Writes status.json beside the coordinator. A file system that hangs leaves it old, and readers see that."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

from nvrx_slurm.node.output.writer import HANGS_S, Writer
from nvrx_slurm.node.publish.publisher import View
from nvrx_slurm.system.files import write_atomic
from nvrx_slurm.system.foreign import first_bytes

_HEAD = re.compile(rb'\{"version": \d+, "term": (\d+), "writer": "([^"]*)"')
_HEAD_BYTES = 512
_MAX_DIGITS = 18


class StatusFile:
    """A listener: keeps `path` true.

    A candidate that is not elected writes only where no other node has written. A coordinator does not replace what one
    of a later term has written: it was stopped for a while, and does not know yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = Writer(lambda sentence: None)

    def tell(self, view: View) -> None:
        """The newest view is written."""
        self._file.put(self._path, partial(self._replace, view))

    async def close(self) -> None:
        """Wait for the last view, bounded."""
        await self._file.close(HANGS_S)

    # --- the thread -------------------------------------------------------------------------------------------

    def _replace(self, view: View) -> None:
        if self._may_replace(view):
            write_atomic(self._path, json.dumps(view).encode())

    def _may_replace(self, view: View) -> bool:
        try:
            found = _HEAD.match(first_bytes(self._path, _HEAD_BYTES))
        except FileNotFoundError:
            return True
        if found is None or found[2].decode("utf-8", "replace") == view["writer"]:
            return True
        return view["term"] > 0 and int(found[1][:_MAX_DIGITS]) <= view["term"]
