"""Looks after the monitor process of a rank, from the rank's watchdog thread, and never waits."""

from __future__ import annotations

import logging
import time

from nvrx_slurm.inprocess.watch.monitor_process import MonitorProcess
from nvrx_slurm.inprocess.watch.progress import LEFT, LOST, SEEN, Page, StandsStill

logger = logging.getLogger(__name__)

_PAUSE_S = (1.0, 30.0)  # first and longest, between two tries to have another process


class MonitorKeeper:
    """Replaces a monitor process that has ended, or that is stopped or stuck: before the other ranks miss its
    heartbeats, which is after `timeout_s` seconds. The store's server cannot be replaced: if it was there, the store is
    lost. `look` is to be called every `interval_s`."""

    def __init__(self, monitor: MonitorProcess, page: Page, timeout_s: float, interval_s: float) -> None:
        self._monitor, self._page, self._timeout_s = monitor, page, timeout_s
        self._stands_still = StandsStill(interval_s)
        self._pause_s, self._not_before_s = _PAUSE_S[0], 0.0

    def look(self) -> None:
        """See the class."""
        words = self._page.words
        if words[LEFT] or words[LOST]:
            return
        if self._monitor.alive:
            limit_s = self._timeout_s if self._monitor.serves else self._timeout_s / 2
            if words[SEEN] and self._stands_still.seconds(words[SEEN]) >= limit_s:
                logger.error("the monitor process of this rank is stopped or stuck, and is killed")
                self._monitor.kill()
        elif self._monitor.serves:
            logger.error("the monitor process of rank 0 has ended, and the store's server with it")
            words[LOST] = 1
        else:
            self._replace()

    def _replace(self) -> None:
        now_s = time.monotonic()
        if now_s < self._not_before_s:
            return
        lived = now_s > self._not_before_s + _PAUSE_S[1]
        self._pause_s = _PAUSE_S[0] if lived else min(2 * self._pause_s, _PAUSE_S[1])
        self._not_before_s = now_s + self._pause_s
        logger.warning("the monitor process of this rank has ended; another one takes its place")
        try:
            self._monitor.restart()
        except OSError as error:
            logger.error("no monitor process can be started (%s); the next try is in %g s", error, self._pause_s)
            return
        self._page.words[SEEN] = time.monotonic_ns()  # from here on it has as long as any other
