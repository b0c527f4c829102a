"""What the coordinator asks for, in threads: how far the training is, and how long Slurm still gives the job."""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Callable

from nvrx_slurm.slurm.control import Control
from nvrx_slurm.system import bounded

READ_TIMEOUT_S = 5.0
_HANGS = f"its file system does not answer within {READ_TIMEOUT_S:g} s"
_MAX_DIGITS = 18  # an iteration has to fit into a message
_MAX_BYTES = 4096
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
        self._reading = False  # a thread reads, and may be stuck: no second one is started

    async def read(self) -> int | None:
        """The iteration, at most READ_TIMEOUT_S later; None = there is no usable one.

        The file must hold one decimal integer of 0 or more, in at most 4,096 bytes.
        """
        try:
            iteration = await self._iteration()
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no thread can be started
            why = str(getattr(error, "strerror", None) or error)
            if why != self._said:
                self._say(f"progress is not counted: the checkpoint iteration file {self._path} cannot be used: {why}")
            self._said = why
            return None
        self._said = ""
        return iteration

    async def _iteration(self) -> int:
        """Raises ValueError (no iteration, or a name with a 0 in it), OSError and RuntimeError."""
        if self._reading:
            raise ValueError(_HANGS)  # an earlier read has not ended
        try:
            content = await bounded.call_async(self._load, READ_TIMEOUT_S, "progress file")
        except bounded.Overrun:
            raise ValueError(_HANGS) from None
        text = content.strip()
        if len(content) > _MAX_BYTES or len(text) > _MAX_DIGITS or not text.isdigit():  # of bytes: ASCII digits only
            found = text[:40].decode("ascii", "backslashreplace")
            raise ValueError(f"it must hold one integer of 0 or more, in at most {_MAX_BYTES} bytes, not {found!r}")
        return int(text)

    def _load(self) -> bytes:
        """In the thread."""
        self._reading = True
        try:
            return _read(self._path)
        finally:
            self._reading = False


def _read(path: str) -> bytes:
    """At most _MAX_BYTES + 1 of the file."""
    with open(path, "rb", buffering=0) as file:
        return file.read(_MAX_BYTES + 1)


async def began(control: Control, job_id: int) -> tuple[int, int] | None:
    """When Slurm got and started the job; None where it does not say. Not asked while the job starts."""
    await asyncio.sleep(_LATER_S)
    try:
        return await bounded.call_async(functools.partial(control.began, job_id), _TIMEOUT_S + _MARGIN_S, "queue")
    except (bounded.Overrun, RuntimeError):
        return None


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
        if left_s is None:  # a busy controller; or the tool was killed with the orphans of a failed worker
            await asyncio.sleep(_RETRY_S)
            left_s = await self._ask(self._job_id, again)
        if left_s == math.inf:
            return _NO_LIMIT_S if again else None  # a limit that was known before holds no more
        return left_s

    async def _ask(self, job_id: int, again: bool) -> float | None:
        ask = functools.partial(self._control.time_left_s, job_id, {} if again else os.environ)
        try:
            return await bounded.call_async(ask, _TIMEOUT_S + _MARGIN_S, "time left")
        except (bounded.Overrun, RuntimeError):  # RuntimeError: no thread can be started
            return None
