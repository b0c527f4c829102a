"""Publishes how the job is, once: at each change that people want to see, and every INTERVAL_S while nothing changes.

The loop takes a view of the core. A thread completes it with what has to be read or takes long, and hands the same view
to each listener. A listener only puts work into a `Writer` of its own, so one that hangs delays no other one.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.coordinator.states import OVER, Stage
from nvrx_slurm.core.coordinator.status import VERSION, JobLabels, snapshot, state_of, status
from nvrx_slurm.core.progress import checkpoint, now_doing, progress
from nvrx_slurm.declared import plain
from nvrx_slurm.node.output.writer import Writer
from nvrx_slurm.system import bounded
from nvrx_slurm.types import Account, Pace

INTERVAL_S = 5.0  # a reader takes a coordinator for silent after three of them
_SOON_S = 0.5  # changes within this time share one view
_READ_S = 0.5  # for the checkpoint iteration file; a later answer is for the next view
_CLOSE_S = 1.0  # for the views that are not complete yet
_SAY_S = 30.0  # between two sentences about what the job waits for
_MOST_WAITING = 4  # views that are not complete yet
_MOST_BYTES = 512
_MAX_DIGITS = 18

View = dict[str, Any]  # the content of status.json


class Viewer(Protocol):
    """Shows the job to people."""

    def tell(self, view: View) -> None:
        """A new view, in a thread. Must not block. A view with term 0 is of a candidate that is not elected."""

    async def close(self) -> None:
        """Wait until all views that were told are written. Bounded."""


class Facts(Protocol):
    """What a watch of checkpoints has found."""

    facts: View | None


class Publisher:
    """Publishes views of `core` to `listeners`. `writer`: this agent's life; `progress`: the checkpoint iteration file.

    `counted()`: the account until the last plan. `watch`: of checkpoints, where there is one.
    """

    def __init__(
        self,
        core: Coordinator,
        labels: JobLabels,
        writer: str,
        progress: str | None,
        counted: Callable[[], Account | None],
        watch: Facts | None,
        listeners: Sequence[Viewer],
    ) -> None:
        self._core = core
        self._head = {"interval_s": INTERVAL_S, "job": plain(labels)}
        self._writer = writer
        self._progress = progress
        self._counted = counted
        self._watch = watch
        self._listeners = listeners
        self._loop = asyncio.get_running_loop()
        self._state = state_of(core)
        self._since = self._loop.time()
        self._key: tuple[object, ...] = ()
        self._timer: asyncio.TimerHandle | None = None
        self._paces: dict[str, Pace] = {}  # by node
        self._views = Writer(lambda sentence: None, most=_MOST_WAITING)
        self._reads = threading.Lock()  # held by the thread that reads the checkpoint iteration file
        self._checkpoint: View | None = None

    def mark(self) -> None:
        """A step of the core is over: publish soon if something has changed that people want to see."""
        core = self._core
        members = self._core.roster.members
        state = state_of(core)
        if state != self._state:
            self._state = state
            self._since = self._loop.time()
        excluded = len(core.budget.history.excluded)
        votes = core.electing.votes if core.state is Stage.ELECTING else 0
        key = (core.state, core.job.cycle, len(members), members.ready, excluded, core.hangs.search is None, votes)
        if key != self._key:
            self._key = key
            self._publish_soon()

    def told(self, node_id: str, pace: Pace) -> None:
        """How far the ranks of a node are."""
        if not self._paces:
            self._publish_soon()
        self._paces[node_id] = pace

    def stop(self) -> None:
        """Publish no more by itself."""
        if self._timer is not None:
            self._timer.cancel()

    async def close(self) -> None:
        """Have all listeners write the last view, at the same time; each has a bound of its own."""
        self.stop()
        await self._views.close(_CLOSE_S)
        listeners = self._listeners
        self._listeners = ()  # a second call does nothing
        await asyncio.gather(*(listener.close() for listener in listeners))

    def _publish_soon(self) -> None:
        if self._timer is None or self._timer.when() > self._loop.time() + _SOON_S:
            self._wake(_SOON_S)

    def _wake(self, after_s: float) -> None:
        self.stop()
        self._timer = self._loop.call_later(after_s, self._publish_again)

    def _publish_again(self) -> None:
        self._wake(INTERVAL_S)
        self.publish()

    def publish(self) -> None:
        """Publish how the job is now."""
        now = time.time()
        found = status(self._core, self._since, self._loop.time(), now, self._counted())
        view = {
            "version": VERSION,  # readers of the file look for these four at its beginning
            "term": found["term"],
            "writer": self._writer,
            "written": now,
            **self._head,
            **found,
        }
        if self._watch is not None and self._watch.facts:
            view["checkpoint"] = self._watch.facts
        self._forget_old_paces()
        paces = list(self._paces.values())
        self._views.put("the view", partial(self._complete, view, snapshot(self._core), paces))

    def _forget_old_paces(self) -> None:
        """Keep what members have told of the present cycle. At the end all have left."""
        members = self._core.roster.members
        is_over = self._core.state in OVER
        for node, pace in list(self._paces.items()):
            is_gone = node not in members and not is_over
            if is_gone or pace.cycle != self._core.job.cycle:
                del self._paces[node]

    # --- in threads -------------------------------------------------------------------------------------------

    def _complete(self, view: View, ranks: Callable[[], View], paces: list[Pace]) -> None:
        if self._progress and not self._reads.locked():
            with suppress(bounded.Overrun):
                bounded.call(partial(self._read_progress, self._progress), _READ_S, "progress")
        complete = {"checkpoint": self._checkpoint} | view | {"ranks": ranks(), "progress": progress(paces)}
        for listener in self._listeners:
            listener.tell(complete)

    def _read_progress(self, path: str) -> None:
        """Read the file in a thread of its own: it may be on another file system, which hangs."""
        with self._reads, suppress(OSError), open(path, "rb") as file:
            text = file.read(_MOST_BYTES).strip()
            if text.isdigit() and len(text) <= _MAX_DIGITS:
                self._checkpoint = checkpoint(self._checkpoint, int(text), os.fstat(file.fileno()).st_mtime)


class WaitLines:
    """A listener: says on the console what the job waits for, where that takes long."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._said_at = 0.0  # Unix seconds

    def tell(self, view: View) -> None:
        """Say it where it was not said for _SAY_S."""
        written = view["written"]
        if view["waits"] and written >= max(view["since"], self._said_at) + _SAY_S:
            self._said_at = written
            with suppress(RuntimeError):  # the loop is closed: the program has ended
                self._loop.call_soon_threadsafe(self._say, now_doing(view, written))

    async def close(self) -> None:
        """Do nothing: nothing waits."""
