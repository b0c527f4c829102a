"""Writes --ft-cycle-info-dir beside the coordinator: one file per cycle and a link to the newest."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections import deque
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.logs.cycle_info import CycleFiles, document
from nvrx_slurm.core.logs.names import cycle_file
from nvrx_slurm.system import bounded
from nvrx_slurm.system.files import write_atomic

_WRITE_S = 5.0


class CycleInfo:
    """Sees what the coordinator sends. Files are written in a thread: their file system may hang."""

    def __init__(self, files: CycleFiles, core: Coordinator, say: Callable[[str], None]) -> None:
        self._files, self._core, self._say = files, core, say
        self._now: dict[str, object] = {}
        self._cycle = -1
        self._writes: deque[tuple[str, bytes]] = deque(maxlen=16)
        self._task: asyncio.Task[None] | None = None

    def sent(self, command: ev.SendTo) -> None:
        """A plan begins a cycle; the first Stop or Finish ends it."""
        message = command.message
        if isinstance(message, t.Plan) and message.cycle > self._cycle:
            self._cycle = message.cycle
            files = self._files
            log_file = cycle_file(files.prefix, message.cycle, files.part) if files.prefix else ""
            nodes = self._core.roster.members.in_order()
            self._now = document(self._files, self._core.job.assignment, nodes, log_file)
            self._now["cycle_start_time"] = _utc()
            self._write()
        elif isinstance(message, (t.Stop, t.Finish)) and self._now and not self._now["cycle_end_time"]:
            self._now["cycle_end_time"] = _utc()
            self._write()

    def _write(self) -> None:
        self._writes.append((self._files.name(self._cycle), json.dumps(self._now, indent=1).encode()))
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._write_all())

    async def _write_all(self) -> None:
        while self._writes:
            name, data = self._writes.popleft()
            try:
                await bounded.call_async(partial(self._put, name, data), _WRITE_S, "the cycle info directory")
            except (OSError, RuntimeError, bounded.Overrun) as error:
                self._say(f"{self._files.directory}/{name} cannot be written: {error}")

    def _put(self, name: str, data: bytes) -> None:
        """In the thread."""
        directory, link = self._files.directory, self._files.current
        os.makedirs(directory, exist_ok=True)
        write_atomic(os.path.join(directory, name), data)
        temporary = f"{link}.{secrets.token_hex(4)}"
        os.symlink(name, temporary)
        try:
            os.replace(temporary, link)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    async def close(self) -> None:
        """Write the rest, bounded."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_WRITE_S)


def _utc() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
