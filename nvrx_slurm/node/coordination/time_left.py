"""How long Slurm still gives the job: the coordinator's node asks it, in a thread."""

from __future__ import annotations

import asyncio
import functools
import math
import os
from collections.abc import Callable

from nvrx_slurm.slurm.control import Control
from nvrx_slurm.system import bounded

_TIMEOUT_S = 10.0  # of one question

_NO_LIMIT_S = 10 * 365 * 86400.0
_MARGIN_S = 2.0  # for the thread, above the timeout of its command
_RETRY_S = 1.0  # a job that ends meanwhile starts no second one, which would outlive it


class TimeLeft:
    """Asks for the seconds until Slurm ends job `job_id`; None = there is no Slurm.

    The first answer is the environment's where Slurm tells it there (23.02 and later). After that Slurm is asked,
    because the limit may have been changed: at most twice, each time for at most 10 s.
    """

    def __init__(self, control: Control, job_id: int | None) -> None:
        self._control = control
        self._job_id = job_id
        self._asked = False
        self._task: asyncio.Task[None] | None = None  # the loop keeps only weak references

    def ask(self, answer: Callable[[float | None], None]) -> None:
        """Call `answer(left_s)` once on the running loop, later; None: no Slurm, no limit, or no answer."""
        self._task = asyncio.ensure_future(self._tell(answer))

    def close(self) -> None:
        """Ask no more. A tool that runs is left to end by itself or with the orphans of the workers."""
        if self._task is not None:
            self._task.cancel()

    async def _tell(self, answer: Callable[[float | None], None]) -> None:
        again, self._asked = self._asked, True
        left_s = None
        if self._job_id is not None:
            left_s = await self._ask(self._job_id, again)
            if left_s is None:  # a busy controller; or the tool was killed with the orphans of a failed worker
                await asyncio.sleep(_RETRY_S)
                left_s = await self._ask(self._job_id, again)
        if left_s == math.inf:
            left_s = _NO_LIMIT_S if again else None  # a limit that was known before holds no more
        answer(left_s)

    async def _ask(self, job_id: int, again: bool) -> float | None:
        env = {} if again else os.environ
        ask = functools.partial(self._control.time_left_s, job_id, env)
        try:
            return await bounded.call_async(ask, _TIMEOUT_S + _MARGIN_S, "time left")
        except (bounded.Overrun, RuntimeError):  # RuntimeError: no thread can be started
            return None
