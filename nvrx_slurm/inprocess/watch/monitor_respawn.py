"""Replaces the monitor process of a rank, from the rank's watchdog thread, and never waits."""

from __future__ import annotations

import logging
import time

from nvrx_slurm.inprocess.watch.monitor_process import MonitorProcess
from nvrx_slurm.inprocess.watch.page import LEFT, LOST, SEEN, Page
from nvrx_slurm.inprocess.watch.progress import Stall

logger = logging.getLogger(__name__)


class MonitorRespawn:
    """Replaces a monitor process that has ended, or kills and replaces one that does not run any more.

    That happens before the other ranks miss its heartbeats, which is after `timeout_s` seconds. The store's server
    cannot be replaced: if it was in that process, the store is lost. `look` is to be called every `interval_s` seconds.
    """

    def __init__(self, monitor: MonitorProcess, page: Page, timeout_s: float, interval_s: float) -> None:
        self._monitor, self._page, self._timeout_s = monitor, page, timeout_s
        self._stall = Stall(interval_s)

    def look(self) -> None:
        """See the class."""
        words = self._page.words
        if words[LEFT] or words[LOST]:
            return
        if self._monitor.alive:
            limit_s = self._timeout_s if self._monitor.serves else self._timeout_s / 2
            if words[SEEN] and self._stall.seconds(words[SEEN]) >= limit_s:
                logger.error("the monitor process of this rank is stopped or stuck, and is killed")
                self._monitor.kill()
        elif self._monitor.serves:
            logger.error("the monitor process of rank 0 has ended, and the store's server with it")
            words[LOST] = 1
        else:
            self._replace()

    def _replace(self) -> None:
        logger.warning("the monitor process of this rank has ended and is replaced")
        try:
            self._monitor.restart()
        except OSError as error:
            logger.error("no monitor process can be started (%s); the next look tries again", error)
            return
        self._page.words[SEEN] = time.monotonic_ns()
