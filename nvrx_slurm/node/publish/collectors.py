"""--ft-metrics-file and OTLP: the metrics of the job, from the published views.

The end waits at most _END_S for a collector that has answered before, and for none that has not.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from nvrx_slurm import __version__
from nvrx_slurm.core.samples import otlp, text_of
from nvrx_slurm.node.output.writer import Writer
from nvrx_slurm.node.publish.announce import post
from nvrx_slurm.node.publish.publisher import View
from nvrx_slurm.system.files import write_atomic

if TYPE_CHECKING:
    from nvrx_slurm.config.otel import OtlpTarget

_END_S = 0.5
_LONGEST_POST_S = 4.0  # whatever OTEL_EXPORTER_OTLP_TIMEOUT says


class MetricsFile:
    """A listener: writes the file `path`."""

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self._path = path
        self._file = Writer(say)

    def tell(self, view: View) -> None:
        """The newest view of an elected coordinator is written."""
        if view["term"] > 0 and view["state"] != "ended":
            self._file.put(self._path, lambda: write_atomic(self._path, text_of(view)))

    async def close(self) -> None:
        """Remove the file, which node_exporter would go on to show."""
        self._file.put(self._path, self._remove)
        await self._file.close(_END_S)

    def _remove(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path)


class MetricsPush:
    """A listener: pushes to the collector `target`."""

    def __init__(self, target: OtlpTarget, say: Callable[[str], None]) -> None:
        self._target = target
        self._pushes = Writer(say, "reach")
        self._next_s = -math.inf  # monotonic seconds
        self._answers = False  # the last push was answered

    def tell(self, view: View) -> None:
        """Push the view of an elected coordinator every so many seconds, and the last one."""
        now = time.monotonic()
        if view["term"] > 0 and (view["state"] == "ended" or now >= self._next_s):
            self._next_s = now + self._target.every_s
            self._pushes.put(self._target.url.split("/")[2], partial(self._push, view))

    async def close(self) -> None:
        """Push the rest, bounded."""
        await self._pushes.close(_END_S if self._answers else 0.0)

    def _push(self, view: View) -> None:
        target = self._target
        self._answers = False
        instance = f"{view['job']['job']}/{view['job']['run']}"
        body = json.dumps(otlp(view, {"service.instance.id": instance} | dict(target.resource), __version__))
        post(target.url, body.encode(), dict(target.headers), min(target.timeout_s, _LONGEST_POST_S))
        self._answers = True
