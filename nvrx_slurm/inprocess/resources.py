"""Threads, processes and connections beside the wrapped function in one rank, and how they are started and ended."""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import signal

from nvrx_slurm.errors import UsageError
from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.environment import CallFacts, Environment
from nvrx_slurm.inprocess.exception import InternalError
from nvrx_slurm.inprocess.guard.call_page import (
    AUTO,
    COUNTED,
    GONE,
    LEFT,
    LOST,
    SEEN,
    CallPage,
    ProgressWatchdog,
    Stall,
)
from nvrx_slurm.inprocess.guard.monitor_process import MonitorProcess
from nvrx_slurm.inprocess.guard.monitor_thread import MonitorThread
from nvrx_slurm.inprocess.state import Mode, State
from nvrx_slurm.inprocess.store.barriers import ALL_LEFT, Iteration
from nvrx_slurm.inprocess.store.stores import StoreLost, StoreView

logger = logging.getLogger(__name__)

# of wrapped functions in this process; all ranks call them in the same order
_calls = itertools.count()
_MONITOR_END_S = 15.0
_SERVER_END_S = 6.0  # it waits 5 s for ranks that have not read the last result


class Resources:
    """Monitor process, monitor thread, progress watchdog, the connections to the store, and the environment."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self.environment = Environment()
        self.state = State.from_env()
        self.page = CallPage()
        rank = self.state.rank
        size = self.state.world_size
        prefix = f"nvrx/{_job()}/{next(_calls)}"
        self.me = CallFacts(arguments, self.page, rank, size, prefix, self.environment)
        self.thread = MonitorThread(self.page)
        self.monitor = MonitorProcess(self.me)
        interval_s = arguments.progress_watchdog_interval.total_seconds()
        self._monitor_stall = Stall(interval_s)
        self._terminate_stall = Stall(interval_s)
        self._heartbeat_timeout_s = arguments.heartbeat_timeout.total_seconds()
        self._watchdog = ProgressWatchdog(
            self.page, interval_s, (self._check_monitor, self._check_store, self._check_terminate)
        )
        self._call: StoreView | None = None
        self._waiting: StoreView | None = None
        self._finished = self._server_ends = self._told_lost = False

    @property
    def call(self) -> StoreView:
        """The call's keys, for the main thread."""
        assert self._call is not None
        return self._call

    # --- begin --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start everything. Raises InternalError, StoreLost or UsageError if a part cannot start."""
        try:
            self.monitor.start()
        except OSError as error:
            raise InternalError(f"no monitor process can be started: {error}") from error
        timeout_s = self._arguments.barrier_timeout.total_seconds()
        if self.me.leads:
            self.monitor.await_ready(timeout_s)
        self.thread.start()
        self._watchdog.start()
        self._call = self._connection(self._arguments.first_store_s)
        self._waiting = self._connection(timeout_s)
        if not self.me.leads:
            self.monitor.await_ready(timeout_s)
        if self.call.add(f"entered/{self.me.rank}", 1) > 1:
            raise UsageError(
                f"two processes of this job have RANK={self.me.rank}, or the store is not new"
            )

    def _connection(self, timeout_s: float) -> StoreView:
        """Made in the monitor thread: the main thread must not wait for a server that may be silent."""
        try:
            made: StoreView = self.thread.call(
                lambda: self._arguments.connect(self.me.prefix), timeout_s
            )
        except TimeoutError:
            factory = self._arguments.store_factory
            raise StoreLost(
                f"no store: {factory!r} (store_factory) has not made one for {timeout_s:g} s"
            ) from None
        return made

    def for_waiting(self, this: Iteration) -> Iteration:
        """The same iteration through the monitor thread's own connection: a wait keeps a connection busy."""
        assert self._waiting is not None
        return Iteration(self._waiting, this.number)

    # --- checks of the watchdog ---------------------------------------------------------------------------------------

    def _check_monitor(self) -> None:
        """A rank without its monitor process leaves: no process would see that it hangs."""
        words = self.page.words
        if words[LEFT] or words[LOST]:
            return
        if not self.monitor.alive:
            logger.error(
                "the monitor process of rank %d has ended, and the rank cannot go on", self.me.rank
            )
            words[LOST] = 1
        elif words[SEEN] and self._monitor_stall.seconds(words[SEEN]) >= self._heartbeat_timeout_s:
            logger.error("the monitor process of this rank is stopped or stuck, and is killed")
            self.monitor.kill()

    def _check_store(self) -> None:
        """Shut down the connections if the store does not answer any more, or the others have gone on without this
        rank: a wait for the store might never end."""
        words = self.page.words
        if not (words[LOST] or words[GONE]) or words[LEFT] or self._told_lost or self._call is None:
            return
        self._told_lost = True
        if words[LOST]:
            logger.error("the store at %s is lost", self._call.place)
        else:
            logger.warning("the others have declared rank %d gone", self.me.rank)
        # a wait for it may last for ever, as on a file system that is away
        if not self._call.disconnect():
            os.kill(os.getpid(), signal.SIGKILL)

    def _check_terminate(self) -> None:
        """The monitor process has told the others that this rank has left, and watches it no more."""
        limit_s = self._arguments.hard_timeout.total_seconds()
        if (
            self.state.mode is Mode.TERMINATED
            and self._terminate_stall.seconds(self.page.words[AUTO]) >= limit_s
        ):
            logger.error(
                "rank %d: terminate makes no progress, and the rank is killed", self.me.rank
            )
            os.kill(os.getpid(), signal.SIGKILL)

    # --- end ----------------------------------------------------------------------------------------------------------

    def left(self, why: str = "") -> None:
        """This rank need not be watched any more."""
        self.page.words[LEFT] = 1
        if self.page.words[COUNTED]:
            self.monitor.announce_leaving(why)

    def all_have_finished(self, gone: int) -> None:
        """All ranks but the `gone` ones return now, and may call a wrapped function again."""
        self._finished, self._server_ends = True, self.call.closes()
        self.left()
        self.has_read_the_last_result(gone)

    def has_read_the_last_result(self, gone: int) -> None:
        """The store's server may end when all ranks but the `gone` ones have."""
        if self.call.add("left", 1) >= self.me.world_size - gone:
            self.call.set(ALL_LEFT, "1")

    def close(self) -> None:
        """End and reap all that was started."""
        self.left()
        if self._watchdog.ident is not None:
            self._watchdog.stop()
        if self.monitor.pid:
            serves = self.me.leads or self.monitor.serves_groups  # the others, perhaps
            serves = serves and self._call is not None and not self._finished
            self.monitor.leave(None if serves or self.page.words[COUNTED] else _MONITOR_END_S)
        if self._server_ends and self._call is not None:
            # The ranks may meet at MASTER_PORT next: none may take this server for the one that rank 0 starts then.
            self._call.await_end_of_server(_SERVER_END_S)
        if self.thread.ident is not None:
            self.thread.stop()
        self._call = self._waiting = None
        self.environment.restore()


def _job() -> str:
    """Distinguishes this start of the ranks from earlier ones in a store that lives longer (torchrun's)."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "NVRX_TERM", "NVRX_CYCLE")
    text = "/".join(os.environ.get(name, "") for name in names)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
