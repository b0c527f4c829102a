"""How long Slurm still gives the job: asked off the loop, by the coordinator's node only."""

from __future__ import annotations

import asyncio
import math
import os
import threading
from collections.abc import Callable

from nvrx_slurm.slurm import control

_NO_LIMIT_S = 10 * 365 * 86400.0


class TimeLeft:
    """Seconds until Slurm ends job `job_id` (None: there is no Slurm), told on the running loop.

    The first answer is the environment's, where Slurm tells it there (23.02 and later); after that Slurm itself is
    asked, because somebody may have changed the limit since: by one squeue of at most `timeout_s`, or two.
    """

    def __init__(self, job_id: int | None, timeout_s: float = control.TIMEOUT_S) -> None:
        self._job_id = job_id
        self._timeout_s = timeout_s
        self._asked = False
        self._loop = asyncio.get_running_loop()

    def ask(self, answer: Callable[[float | None], None]) -> None:
        """Have `answer(left_s)` called once, later; never blocks. None: no Slurm, no limit, or nobody can tell."""
        if self._job_id is None:
            self._loop.call_soon(answer, None)
            return
        again, self._asked = self._asked, True
        # A thread that may be left behind: an executor's would hold up our exit. Its squeue is killed with the orphans.
        threading.Thread(target=self._ask, args=(self._job_id, again, answer), name="time left", daemon=True).start()

    def _ask(self, job_id: int, again: bool, answer: Callable[[float | None], None]) -> None:
        env = {} if again else os.environ
        left_s = control.time_left_s(job_id, env, timeout_s=self._timeout_s)
        if left_s is None:  # a busy controller; or our squeue was killed, together with the orphans of a failed worker
            left_s = control.time_left_s(job_id, env, timeout_s=self._timeout_s)
        if left_s == math.inf:
            left_s = _NO_LIMIT_S if again else None  # a limit that was known before holds no more
        try:
            self._loop.call_soon_threadsafe(answer, left_s)
        except RuntimeError:
            return  # the loop is closed: nobody waits for it any more
