"""How long Slurm still gives the job: the coordinator's node asks it, in a thread."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable

from nvrx_slurm.slurm import control
from nvrx_slurm.system import bounded

_NO_LIMIT_S = 10 * 365 * 86400.0
_MARGIN_S = 2.0  # for the thread, above the timeouts of its commands


class TimeLeft:
    """Asks for the seconds until Slurm ends job `job_id`; None = there is no Slurm.

    The first answer is the environment's where Slurm tells it there (23.02 and later). After that squeue is asked,
    because the limit may have been changed: at most twice, each time for at most `timeout_s` seconds.
    """

    def __init__(self, job_id: int | None, timeout_s: float = control.TIMEOUT_S) -> None:
        self._job_id = job_id
        self._timeout_s = timeout_s
        self._asked = False
        self._task: asyncio.Task[None] | None = None  # the loop keeps only weak references

    def ask(self, answer: Callable[[float | None], None]) -> None:
        """Call `answer(left_s)` once on the running loop, later; None: no Slurm, no limit, or no answer."""
        self._task = asyncio.ensure_future(self._tell(answer))

    async def _tell(self, answer: Callable[[float | None], None]) -> None:
        left_s = None
        if self._job_id is not None:
            job_id, again, self._asked = self._job_id, self._asked, True
            timeout_s = 2 * self._timeout_s + _MARGIN_S
            try:
                left_s = await bounded.call_async(lambda: self._ask(job_id, again), timeout_s, "time left")
            except (bounded.Overrun, RuntimeError):  # RuntimeError: no thread can be started
                left_s = None
        answer(left_s)

    def _ask(self, job_id: int, again: bool) -> float | None:
        """In the thread."""
        env = {} if again else os.environ
        left_s = control.time_left_s(job_id, env, timeout_s=self._timeout_s)
        if left_s is None:  # a busy controller; or this squeue was killed with the orphans of a failed worker
            left_s = control.time_left_s(job_id, env, timeout_s=self._timeout_s)
        if left_s == math.inf:
            return _NO_LIMIT_S if again else None  # a limit that was known before holds no more
        return left_s
