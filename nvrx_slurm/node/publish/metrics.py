"""--ft-metrics-file and OTLP: the metrics of the job, from the content of status.json.

A file system or a collector that hangs holds one thread. Neither delays the loop; the end waits at most _END_S for a
collector that has answered before, and for none that has not.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvrx_slurm import __version__
from nvrx_slurm.core.metrics import otlp, text_of
from nvrx_slurm.node.publish.announce import post
from nvrx_slurm.node.output.console import once
from nvrx_slurm.node.output.result import BackgroundWrites
from nvrx_slurm.system.files import write_atomic

if TYPE_CHECKING:
    from nvrx_slurm.config.otel import OtlpTarget

_END_S = 0.5
_LONGEST_POST_S = 4.0  # whatever OTEL_EXPORTER_OTLP_TIMEOUT says


class MetricsExport:
    """Writes the file `path` and pushes to `target`. None: not wanted."""

    def __init__(self, path: str | None, target: OtlpTarget | None, say: Callable[[str], None]) -> None:
        self._path, self._target = path, target
        self._loop = asyncio.get_running_loop()
        self._files, self._pushes = BackgroundWrites(once(say)), BackgroundWrites(once(say), "reach")
        self._writing, self._pushing = threading.Lock(), threading.Lock()
        self._pushed_at = -math.inf
        self._answers = False  # the last push was answered
        if target is not None and target.problem:
            self._target = None
            say(target.problem)

    def tell(self, found: dict[str, Any]) -> None:
        """The content of status.json is complete."""
        ended, now, target = found["state"] == "ended", self._loop.time(), self._target
        if self._path and not ended and not self._writing.locked():
            self._files.begin(Path(self._path), partial(self._write, self._path, found))
        if target is None or self._pushing.locked() or (not ended and now < self._pushed_at + target.every_s):
            return
        self._pushed_at = now
        self._pushes.begin(Path(target.url.split("/")[2]), partial(self._push, target, found))

    async def close(self) -> None:
        """Remove the file, which node_exporter would go on to show. Push the rest, bounded."""
        if self._path and not self._writing.locked():
            self._files.begin(Path(self._path), partial(self._remove, self._path))
            await self._files.close(_END_S)
        await self._pushes.close(_END_S if self._answers else 0.0)

    # --- in threads -------------------------------------------------------------------------------------------

    def _write(self, path: str, found: dict[str, Any]) -> None:
        with self._writing:
            write_atomic(path, text_of(found))

    def _remove(self, path: str) -> None:
        with self._writing, suppress(FileNotFoundError):
            os.unlink(path)

    def _push(self, target: OtlpTarget, found: dict[str, Any]) -> None:
        with self._pushing:
            self._answers = False
            instance = f"{found['job']['job']}/{found['job']['run']}"
            body = json.dumps(otlp(found, {"service.instance.id": instance} | dict(target.resource), __version__))
            post(target.url, body.encode(), dict(target.headers), min(target.timeout_s, _LONGEST_POST_S))
            self._answers = True
