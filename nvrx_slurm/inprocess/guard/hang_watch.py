"""The monitor process's deadlines for its rank, and the signals that end a rank that hangs."""

from __future__ import annotations

import logging
import select
import signal
import time

from nvrx_slurm.core.inprocess.deadlines import Action, Deadlines, Observation
from nvrx_slurm.core.rank.watch import LATE_S
from nvrx_slurm.inprocess.attribution import Interruption
from nvrx_slurm.inprocess.environment import CallFacts
from nvrx_slurm.inprocess.guard.call_page import (
    GONE,
    ITERATION,
    LEFT,
    SEEN,
    STOPPING,
    UNPROTECTED,
    WATCHED,
)
from nvrx_slurm.inprocess.guard.store_link import StoreLink
from nvrx_slurm.monitor import kill

logger = logging.getLogger(__name__)

_KILL_WAIT_S = 10.0  # after SIGKILL: a process in an uninterruptible sleep is reported as dead
_LONGEST_PAUSE_S = 5.0


class HangWatch:
    """Reads the page of the rank that `pidfd` refers to.

    It reports faults through `link`. All limits begin anew after a check that comes late: this process was
    suspended (scontrol suspend, a paused machine), and so probably was its rank.
    """

    def __init__(self, me: CallFacts, pidfd: int, link: StoreLink) -> None:
        arguments = me.arguments
        soft_s, hard_s = (
            arguments.soft_timeout.total_seconds(),
            arguments.hard_timeout.total_seconds(),
        )
        self._deadlines = Deadlines(soft_s, hard_s, arguments.restart_s)
        self._grace_s = arguments.termination_grace_time.total_seconds()
        # SEEN has to move a few times per heartbeat timeout, and the soft timeout may begin just after a check.
        self.longest_s = min(
            _LONGEST_PAUSE_S, arguments.heartbeat_timeout.total_seconds() / 5, soft_s / 2
        )
        self._page = me.page
        self._pidfd = pidfd
        self._link = link
        self._told = -2  # the last iteration that a soft timeout was reported for
        self._resumed_s = 0.0

    def check(self, due_s: float) -> tuple[float, str]:
        """Check now; it was due at `due_s`. Returns when to check again (monotonic seconds), and why the rank was
        killed ("": it was not).
        """
        now_s = time.monotonic()
        words = self._page.words
        if now_s > due_s + LATE_S:
            logger.info(
                "this process was suspended for %.1f s: all limits begin anew", now_s - due_s
            )
            self._resumed_s = now_s
        words[SEEN] = time.monotonic_ns()
        if words[LEFT]:
            return now_s + self.longest_s, ""
        number = words[ITERATION]
        stopping_ns = words[STOPPING]
        seen = Observation(
            None if words[UNPROTECTED] else self._page.progress_ns() / 1e9,
            bool(words[WATCHED]) and not stopping_ns and self._told != number,
            stopping_ns / 1e9 if stopping_ns else None,
            self._resumed_s,
        )
        action, next_s, why = self._deadlines.judge(seen, time.monotonic())
        if action is Action.KILL:
            self._kill(number, why)
            return now_s, why
        if action is Action.INTERRUPT:
            self._told = number
            self._link.interrupt(number, Interruption.SOFT_TIMEOUT, why)
        return min(next_s, now_s + self.longest_s), ""

    def _kill(self, number: int, why: str) -> None:
        """SIGCONT, SIGTERM, grace time, SIGCONT, SIGTERM, SIGKILL.

        A rank may go on after SIGTERM, so it is shut out first. The others wait until it has left: it may still write.
        """
        self._page.words[GONE] = 1
        self._link.interrupt(number, Interruption.HARD_TIMEOUT, why)
        end = signal.SIGCONT, signal.SIGTERM
        for signals, wait_s in ((end, self._grace_s), ((*end, signal.SIGKILL), _KILL_WAIT_S)):
            for signum in signals:
                kill.send(self._pidfd, signum)
            if self._gone_within(wait_s):
                return
        logger.error("the rank cannot be killed: it is in an uninterruptible sleep in the kernel")

    def _gone_within(self, timeout_s: float) -> bool:
        """Whether the rank has ended, or has left by itself."""
        deadline_s = time.monotonic() + timeout_s
        while not select.select(
            [self._pidfd], [], [], max(0.0, min(1.0, deadline_s - time.monotonic()))
        )[0]:
            if self._page.words[LEFT] or time.monotonic() >= deadline_s:
                return bool(self._page.words[LEFT])
            # the rank's watchdog must not miss this process meanwhile
            self._page.words[SEEN] = time.monotonic_ns()
        return True
