"""How long Slurm still gives the job: the coordinator's node asks it, in a thread."""

from __future__ import annotations

import asyncio
import functools
import math
import os

from nvrx_slurm.slurm.control import Control
from nvrx_slurm.system import bounded

_TIMEOUT_S = 10.0  # of one question

_NO_LIMIT_S = 10 * 365 * 86400.0
_MARGIN_S = 2.0  # for the thread, above the timeout of its command
_RETRY_S = 1.0  # a job that ends meanwhile starts no second tool, which would outlive it


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
