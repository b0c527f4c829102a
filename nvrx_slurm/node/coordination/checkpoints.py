"""Watches the directory of checkpoints (--ft-checkpoint-dir) on the coordinator's node.

A thread reads, because the file system may hang: then nothing waits for it, and no second thread is started.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from nvrx_slurm.core.checkpoint.advice import worries
from nvrx_slurm.core.checkpoint.recognise import Checkpoint
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.coordinator.states import Stage
from nvrx_slurm.node.shell import Post
from nvrx_slurm.system import bounded

INTERVAL_S = 20.0
_READ_TIMEOUT_S = 5.0
_WRITING_S = 60.0  # one that has changed since may be under way
_MOST_TOLD, _MOST_INTERVALS = 4, 16


class CheckpointWatch:
    """`facts`: what status.json tells, None = nothing is known; `iteration`: of the newest complete checkpoint."""

    def __init__(
        self, root: str, pattern: str | None, core: Coordinator, post: Post, say: Callable[[str], None]
    ) -> None:
        self._root, self._pattern, self._core, self._post, self._say = root, pattern, core, post, say
        self._reading = False
        self._saved: dict[str, float] = {}  # complete ones that were seen: name -> when they were saved (Unix seconds)
        self._samples: dict[tuple[str, float], bytes] = {}
        self._free = 0
        self._said: set[str] = set()  # what the last sentences were about
        self._told: tuple[str, ...] | None = None  # paths that the core knows
        self.facts: dict[str, Any] | None = None
        self.iteration: int | None = None

    async def watch(self) -> None:
        """Read again and again while a cycle runs. Never returns."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            if self._core.state is Stage.RUNNING and self._core.roster.quorum.elected:
                await self.read()

    async def read(self, resumes: bool = False) -> None:
        """Find out what is there, and tell the core; at most 5 s. `resumes`: ranks are about to resume, so an answer is
        waited for, and nobody writes."""
        try:
            found = await self._survey()
        except (bounded.Overrun, OSError, RuntimeError) as error:  # RuntimeError: no thread can be started
            why = str(getattr(error, "strerror", None) or error)
            self._say_once({"read": f"the checkpoints in {self._root} are not known: {why}"})
        else:
            self._take(found, resumes)
        if resumes and self._told is None:
            self._post(ev.CheckpointsFound(()))

    async def _survey(self) -> list[Checkpoint]:
        if self._reading:
            raise bounded.Overrun("its file system does not answer")
        return await bounded.call_async(self._load, _READ_TIMEOUT_S, "the directory")

    def _load(self) -> list[Checkpoint]:
        """In the thread."""
        from nvrx_slurm.system import checkpoints  # not at the start

        self._reading = True
        try:
            found = checkpoints.survey(self._root, self._pattern)
            complete = [one for one in found if not one.why][:2]
            known, keys = self._samples, [(one.name, one.saved_s) for one in complete]
            self._samples = {key: known.get(key) or checkpoints.sample(self._root, key[0]) for key in keys}
            space = os.statvfs(self._root)
            self._free = space.f_bavail * space.f_frsize
            return found
        finally:
            self._reading = False

    def _take(self, found: list[Checkpoint], resumes: bool) -> None:
        complete, now = [one for one in found if not one.why], time.time()
        paths = tuple(os.path.join(self._root, one.name) for one in complete[:_MOST_TOLD])
        if paths != self._told:
            self._told = paths
            told = zip(complete, paths, strict=False)
            self._post(ev.CheckpointsFound(tuple(ev.Resumable(c.iteration, path, now - c.saved_s) for c, path in told)))
        newest = complete[0] if complete else None
        self.iteration = newest.iteration if newest is not None else None
        later = found[: found.index(newest)] if newest is not None else found
        torn = [one for one in later if resumes or now - one.saved_s > _WRITING_S]
        for one in torn if resumes else ():
            use = f"; {newest.name} is complete" if newest is not None else ""
            self._say(f"checkpoint {one.name} is torn: {one.why}{use}")
        notes = self._worries(newest, now)
        self._say_once(notes)
        self.facts = (
            newest
            if newest is None
            else {
                "iteration": newest.iteration,
                "time": newest.saved_s,
                "name": newest.name,
                "bytes": newest.size,
                "torn": [{"name": one.name, "why": one.why[:200]} for one in torn[:_MOST_TOLD]],
                "notes": [*notes.values()],
            }
        )

    def _worries(self, newest: Checkpoint | None, now: float) -> dict[str, str]:
        if newest is None:
            return {}
        self._saved[newest.name] = newest.saved_s
        times, core = sorted(self._saved.values())[-_MOST_INTERVALS:], self._core
        runs_s = asyncio.get_running_loop().time() - core.job.started_at
        mine = self._samples.get((newest.name, newest.saved_s))
        same = [name for (name, _), data in self._samples.items() if data and data == mine and name != newest.name]
        return worries(
            min(now - newest.saved_s, runs_s),
            [later - earlier for earlier, later in pairwise(times)],
            "".join(same[:1]),
            newest.size,
            self._free,
            max(newest.took_s, core.ledger.book.save_s),
            core.settings.warn_before_end_s,
        )

    def _say_once(self, notes: dict[str, str]) -> None:
        for about, note in notes.items():
            if about not in self._said:
                self._say(note)
        self._said = {*notes}
