"""Writes status.json beside the coordinator: at each change of state, and every INTERVAL_S while nothing changes.

One thread completes what it tells, also for other listeners, and has it written: the file system may hang, and then
the coordinator goes on without a status. The thread does not tell the loop when it is done, which would be one wake-up
more.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.coordinator.states import Stage
from nvrx_slurm.core.coordinator.status import VERSION, JobLabels, snapshot, state_of, status
from nvrx_slurm.core.progress import checkpoint, now_doing, progress
from nvrx_slurm.declared import plain
from nvrx_slurm.node.output.result import BackgroundWrites
from nvrx_slurm.system import bounded
from nvrx_slurm.system.files import write_atomic
from nvrx_slurm.system.foreign import first_bytes
from nvrx_slurm.types import Account, Pace

INTERVAL_S = 5.0  # a reader takes a coordinator for silent after three of them
_READ_S = 0.5  # for the checkpoint iteration file; a later answer is for the next content
_WRITE_S = 1.0  # for one writing
_SAY_S = 30.0  # between two sentences about what the job waits for
_SOON_S = 0.5  # changes within this time share one write
_HEAD = re.compile(rb'\{"version": \d+, "term": (\d+), "writer": "([^"]*)"')
_HEAD_BYTES, _MAX_DIGITS = 512, 18


class StatusFile:
    """Keeps `path` true. `writer`: this agent's life. `progress`: the checkpoint iteration file, where there is one.

    A candidate that is not elected writes only where no other node has written. A coordinator does not replace what one
    of a later term has written: it was stopped for a while, and does not know yet.
    """

    def __init__(self, core: Coordinator, path: Path, labels: JobLabels, writer: str, progress: str | None) -> None:
        self._core, self._path, self._labels, self._writer, self._progress = core, path, labels, writer, progress
        self.say: Callable[[str], None] = lambda sentence: None
        self._loop = asyncio.get_running_loop()
        self._since, self._state = self._loop.time(), state_of(core)
        self._say_at = self._since + _SAY_S
        self._key: tuple[object, ...] = ()
        self._timer: asyncio.TimerHandle | None = None
        self._thread: threading.Thread | None = None
        self._waiting = queue.SimpleQueue[dict[str, Any] | None]()  # for the thread
        self._writing = threading.Lock()  # held by the thread that writes the file
        self._reads = threading.Lock()  # held by the thread that reads the checkpoint iteration file
        self._checkpoint: dict[str, Any] | None = None
        self.checkpoint: Callable[[], dict[str, Any] | None] = lambda: None  # what a watch has found
        self._paces: dict[str, Pace] = {}  # by node
        self.on_content: Callable[[dict[str, Any]], None] = lambda content: None
        self.on_complete: Callable[[dict[str, Any]], None] | None = None  # the same, with what takes long to make
        self.counted: Callable[[], Account | None] = lambda: None  # the account until the last plan

    def mark(self) -> None:
        """A step of the core is over: write soon if something has changed that people want to see."""
        core, members, now = self._core, self._core.roster.members, self._loop.time()
        excluded, state = len(core.budget.history.excluded), state_of(core)
        if state != self._state:
            self._state, self._since, self._say_at = state, now, now + _SAY_S
        votes = core.electing.votes if core.state is Stage.ELECTING else 0
        key = (core.state, core.job.cycle, len(members), members.ready, excluded, core.hangs.search is None, votes)
        if key != self._key:
            self._key = key
            self._write_soon()

    def told(self, node_id: str, pace: Pace) -> None:
        """How far the ranks of a node are."""
        if not self._paces:
            self._write_soon()
        self._paces[node_id] = pace

    def _write_soon(self) -> None:
        if self._timer is None or self._timer.when() > self._loop.time() + _SOON_S:
            self._wake(_SOON_S)

    def end(self, writes: BackgroundWrites) -> None:
        """The core has ended: the last content."""
        self.close()
        content = self._content()
        writes.begin(self._path, lambda: self._replace(self._complete(content)))

    def close(self) -> None:
        """Write no more."""
        self._stop_timer()
        self._waiting.put(None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self, after_s: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(after_s, self._write)

    def _write(self) -> None:
        self._wake(INTERVAL_S)
        self._waiting.put(self._content())
        if self._thread is None:
            self._thread = bounded.begin(self._write_all, "status.json")

    def _content(self) -> dict[str, Any]:
        core, unix_s, labels = self._core, time.time(), self._labels
        found = status(core, self._since, self._loop.time(), unix_s, self.counted())
        head = {"version": VERSION, "term": found["term"], "writer": self._writer, "written": unix_s}
        content = {**head, "interval_s": INTERVAL_S, "job": plain(labels), **found, "ranks": snapshot(core)}
        if seen := self.checkpoint():
            content["checkpoint"] = seen
        members, cycle = core.roster.members, core.job.cycle
        self._paces = {node: pace for node, pace in self._paces.items() if node in members and pace.cycle == cycle}
        content["progress"] = partial(progress, [*self._paces.values()])
        if core.roster.quorum.elected:
            self.on_content(content)
        if found["waits"] and self._loop.time() >= self._say_at:
            self._say_at += _SAY_S
            self.say(now_doing(content, unix_s))
        return content

    # --- in threads -------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (content := self._waiting.get()) is not None:
            content = self._complete(content)
            if not self._writing.locked():  # else it hangs: the next content is newer
                with suppress(OSError, bounded.Overrun):  # a reader sees that the file is old
                    bounded.call(partial(self._replace, content), _WRITE_S, "status.json")

    def _complete(self, content: dict[str, Any]) -> dict[str, Any]:
        """For the file and for other listeners, who do not wait for the file."""
        if self._progress and not self._reads.locked():
            with suppress(bounded.Overrun):
                bounded.call(partial(self._read_progress, self._progress), _READ_S, "progress")
        content = {"checkpoint": self._checkpoint} | content
        content |= {name: content[name]() for name in ("ranks", "progress")}  # of all ranks: not on the loop
        if self.on_complete is not None and content["term"] > 0:  # of a coordinator that is elected
            self._loop.call_soon_threadsafe(self.on_complete, content)
        return content

    def _replace(self, content: dict[str, Any]) -> None:
        with self._writing:
            if self._may_replace(content):
                write_atomic(self._path, json.dumps(content).encode())

    def _may_replace(self, content: dict[str, Any]) -> bool:
        try:
            found = _HEAD.match(first_bytes(self._path, _HEAD_BYTES))
        except FileNotFoundError:
            return True
        if found is None or found[2].decode("utf-8", "replace") == self._writer:
            return True
        return content["term"] > 0 and int(found[1][:_MAX_DIGITS]) <= content["term"]

    def _read_progress(self, path: str) -> None:
        """In a thread of its own: this file may be on another file system, which hangs."""
        with self._reads, suppress(OSError), open(path, "rb") as file:
            text = file.read(_HEAD_BYTES).strip()
            if text.isdigit() and len(text) <= _MAX_DIGITS:
                self._checkpoint = checkpoint(self._checkpoint, int(text), os.fstat(file.fileno()).st_mtime)
