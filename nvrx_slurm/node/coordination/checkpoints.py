"""Watches the directory of checkpoints (--ft-checkpoint-dir) on the coordinator's node.

A thread reads, because the file system may hang: then nothing waits for it, and no second thread is started.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any

from nvrx_slurm.core.account.follower import JobAccount
from nvrx_slurm.core.checkpoint.advice import worries
from nvrx_slurm.core.checkpoint.recognise import Checkpoint, no_iteration
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator, Stage
from nvrx_slurm.node.shell import Post
from nvrx_slurm.system import bounded

INTERVAL_S, _READ_TIMEOUT_S = 20.0, 5.0
_WRITING_S = 60.0  # one that has changed since may be under way
_MOST_TOLD = 4


class CheckpointWatch:
    """`facts`: what status.json tells, None = nothing is known; `iteration`: of the newest complete checkpoint."""

    def __init__(
        self, root: str, pattern: str | None, core: Coordinator, account: JobAccount, post: Post,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._root = root
        self._pattern = pattern
        self._core = core
        self._post = post
        self._say = say
        self._account = account
        self._reads = bounded.OneAtATime()
        self._saved: dict[
            str, float
        ] = {}  # complete ones that were seen: name -> when they were saved (Unix seconds)
        self._samples: dict[tuple[str, float], bytes] = {}
        self._said: set[str] = set()  # what the last sentences were about
        self._told: tuple[str, ...] | None = None  # paths that the core knows
        self._free = 0
        self._nameless = ""
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
        waited for, and no rank writes."""
        try:
            self._take(
                await self._reads.call(self._load, _READ_TIMEOUT_S, "the directory"), resumes
            )
        except (bounded.Overrun, OSError) as error:
            self._say_once({"read": f"the checkpoints in {self._root} are not known: {error}"})
        if resumes and self._told is None:
            self._post(ev.CheckpointsFound(()))

    def _load(self) -> list[Checkpoint]:
        """In the thread."""
        from nvrx_slurm.system import checkpoints  # not at the start

        if not os.path.exists(self._root):  # the script makes it
            return []
        found, known = checkpoints.survey(self._root, self._pattern), self._samples
        self._nameless = "" if found else checkpoints.nameless(self._root, self._pattern)
        last = [(one.name, one.saved_s) for one in found if not one.why][:2]
        self._samples = {
            key: known.get(key) or checkpoints.sample(self._root, key[0]) for key in last
        }
        space = os.statvfs(self._root)
        self._free = space.f_bavail * space.f_frsize
        return found

    def _take(self, found: list[Checkpoint], resumes: bool) -> None:
        now, complete = time.time(), [one for one in found if not one.why][:_MOST_TOLD]
        saved = [
            ev.Resumable(one.iteration, f"{self._root}/{one.name}", now - one.saved_s)
            for one in complete
        ]
        paths = tuple(one.path for one in saved)
        if paths != self._told:
            self._told = paths
            self._post(ev.CheckpointsFound(tuple(saved)))
        later = found[: found.index(complete[0])] if complete else found
        torn = {
            one.name: one.why[:200] for one in later if resumes or now - one.saved_s > _WRITING_S
        }
        for name, why in torn.items() if resumes else ():
            self._say(
                f"checkpoint {name} is torn: {why}"
                + "".join(f"; {one.name} is complete" for one in complete[:1])
            )
        self.iteration = complete[0].iteration if complete else None
        if not found and self._nameless:
            self._say_once({"name": no_iteration(self._nameless, self._pattern)})
        for newest in complete[:1]:
            notes = self._worries(newest, now)
            self._say_once(notes)
            self.facts = {
                "iteration": newest.iteration,
                "time": newest.saved_s,
                "name": newest.name,
            }
            self.facts |= {"bytes": newest.size, "torn": torn, "notes": [*notes.values()]}

    def _worries(self, newest: Checkpoint, now: float) -> dict[str, str]:
        self._saved[newest.name] = newest.saved_s
        core, data = self._core, self._samples.get((newest.name, newest.saved_s))
        same = [
            name
            for (name, _), other in self._samples.items()
            if data and other == data and name != newest.name
        ]
        return worries(
            min(now - newest.saved_s, asyncio.get_running_loop().time() - core.job.started_at),
            sorted(self._saved.values()),
            "".join(same[:1]),
            (newest.size, self._free),
            max(newest.took_s, self._account.save_s),
            core.settings.warn_before_end_s,
        )

    def _say_once(self, notes: dict[str, str]) -> None:
        for about in notes.keys() - self._said:
            self._say(notes[about])
        self._said = {*notes}
