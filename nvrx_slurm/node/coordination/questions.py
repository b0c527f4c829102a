"""What the coordinator asks for, in threads: how far the training is, and how long Slurm still gives the job."""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Callable, Collection

from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.slurm.control import Control
from nvrx_slurm.system import bounded
from nvrx_slurm.system.foreign import last_bytes
from nvrx_slurm.types import Node

READ_TIMEOUT_S = 5.0
_MAX_DIGITS = 18  # an iteration has to fit into a message
_MAX_BYTES = 4096
_TAIL_BYTES = 16 * 1024  # of each log
_TIMEOUT_S = 10.0  # of one question to Slurm
_NO_LIMIT_S = 10 * 365 * 86400.0
_MARGIN_S = 2.0  # for the thread, above the timeout of its command
_LATER_S = 2.0  # for a question that can wait
_RETRY_S = 1.0  # a job that ends meanwhile starts no second tool, which would outlive it


class ProgressFile:
    """The checkpoint iteration file (--ft-checkpoint-iteration-file), in which the training writes how far it is.

    A thread reads it, because `path` may be on a file system that hangs. `say` gets one sentence when the file cannot
    be used, and the next one only after it could be used.
    """

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._said = ""  # the last reason that was said
        self._reads = bounded.OneAtATime()

    async def read(self) -> int | None:
        """The iteration, at most READ_TIMEOUT_S later; None = there is no usable one.

        The file must hold one decimal integer of 0 or more, in at most 4,096 bytes.
        """
        try:
            read = functools.partial(_read, self._path)
            iteration = _iteration(await self._reads.call(read, READ_TIMEOUT_S, "its file system"))
        except (OSError, ValueError, bounded.Overrun) as error:
            why = str(getattr(error, "strerror", None) or error)
            if why != self._said:
                self._say(
                    f"progress is not counted: the checkpoint iteration file {self._path} cannot be used: {why}"
                )
            self._said = why
            return None
        self._said = ""
        return iteration


def _iteration(content: bytes) -> int:
    """Raises ValueError."""
    text = content.strip()
    if (
        len(content) > _MAX_BYTES or len(text) > _MAX_DIGITS or not text.isdigit()
    ):  # of bytes: ASCII digits only
        found = text[:40].decode("ascii", "backslashreplace")
        raise ValueError(
            f"it must hold one integer of 0 or more, in at most {_MAX_BYTES} bytes, not {found!r}"
        )
    return int(text)


def _read(path: str) -> bytes:
    """At most _MAX_BYTES + 1 of the file."""
    with open(path, "rb", buffering=0) as file:
        return file.read(_MAX_BYTES + 1)


class RankOutput:
    """How far the ranks of a cycle got, as the ends of their logs tell. A thread reads them, see `ProgressFile`."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir, self._reads = run_dir, bounded.OneAtATime()

    async def reached(self, cycle: int, ranks: Collection[tuple[int, Node]]) -> int:
        """The last iteration that one of these ranks has printed; -1 = none has, or the logs cannot be read."""
        load = functools.partial(self._load, cycle, ranks)
        try:
            return await self._reads.call(load, READ_TIMEOUT_S, "logs of ranks")
        except (bounded.Overrun, OSError):
            return -1

    def _load(self, cycle: int, ranks: Collection[tuple[int, Node]]) -> int:
        from nvrx_slurm.core.attribution.reached import (
            iteration,
        )  # not at the start: it takes 10 ms

        stems = [self._run_dir.node_dir(cycle, node) / f"rank_{rank}" for rank, node in ranks]
        logs = [stem.with_suffix(suffix) for stem in stems for suffix in (".out", ".err")]
        return max(
            (iteration(last_bytes(log, _TAIL_BYTES)) for log in logs if log.exists()), default=-1
        )


async def began(control: Control, job_id: int) -> tuple[int, int] | None:
    """When Slurm got and started the job; None where it does not say. Not asked while the job starts."""
    await asyncio.sleep(_LATER_S)
    return await bounded.call_or_none(
        functools.partial(control.began, job_id), _TIMEOUT_S + _MARGIN_S, "queue"
    )


class AllocationClock:
    """Asks for the seconds until Slurm ends job `job_id`; None = there is no Slurm.

    The first answer is the environment's where Slurm tells it there (23.02 and later). After that Slurm is asked,
    because the limit may have been changed: at most twice, each time for at most 10 s.
    """

    def __init__(self, control: Control, job_id: int | None) -> None:
        self._control, self._job_id = control, job_id
        self._asked = False

    async def left_s(self) -> float | None:
        """None: no Slurm, no limit, or no answer. A tool that runs when this is cancelled ends by itself, or with the
        orphans of the workers."""
        again, self._asked = self._asked, True
        if self._job_id is None:
            return None
        left_s = await self._ask(self._job_id, again)
        # a busy controller; or the tool was killed with the orphans of a failed worker
        if left_s is None:
            await asyncio.sleep(_RETRY_S)
            left_s = await self._ask(self._job_id, again)
        if left_s == math.inf:
            return _NO_LIMIT_S if again else None  # a limit that was known before holds no more
        return left_s

    async def _ask(self, job_id: int, again: bool) -> float | None:
        ask = functools.partial(self._control.time_left_s, job_id, {} if again else os.environ)
        return await bounded.call_or_none(ask, _TIMEOUT_S + _MARGIN_S, "time left")
