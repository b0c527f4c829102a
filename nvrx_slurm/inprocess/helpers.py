"""Everything that runs or is open beside the wrapped function in one rank, and how it is started and ended."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch.distributed as dist

from nvrx_slurm.errors import UsageError
from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.environment import Environment
from nvrx_slurm.inprocess.exception import InternalError, RankDiscarded
from nvrx_slurm.inprocess.meeting import store
from nvrx_slurm.inprocess.meeting.barriers import Round
from nvrx_slurm.inprocess.meeting.coordinator import ALL_LEFT, CLOSED, SERVES
from nvrx_slurm.inprocess.meeting.store import StoreLost, StoreView
from nvrx_slurm.inprocess.monitor_thread import MonitorThread, end_child_after
from nvrx_slurm.inprocess.plugins.abort import cut_again, forget_half_made_groups, keep_connections
from nvrx_slurm.inprocess.state import FrozenState, State
from nvrx_slurm.inprocess.watch.monitor_keeper import MonitorKeeper
from nvrx_slurm.inprocess.watch.monitor_process import Identity, MonitorProcess
from nvrx_slurm.inprocess.watch.progress import COUNTED, GONE, LEFT, LOST, STOPPING, OwnTime, Page, ProgressWatchdog
from nvrx_slurm.inprocess.watch.stopping import Stopper

logger = logging.getLogger(__name__)

_calls = itertools.count()  # of wrapped functions in this process; all ranks call them in the same order
_UNWIND_S = 0.2  # for a function whose collective `abort` has ended: longest clean-up that is not hit
_GONE_S = 6.0  # longest wait for the store's server to end, which waits for all to have read the last verdict


class _Past(NamedTuple):
    """What the last call that returned in this process has left to the next one."""

    gone: frozenset[int] = frozenset()  # initial ranks
    served: bool = False  # the store, by the monitor process of its first rank


_past: dict[tuple[int, int], _Past] = {}  # by rank and world size: with other ones it is another job


class Helpers:
    """Monitor process, monitor thread, progress watchdog, the connections to the store, and the environment."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments
        self.environment = Environment()
        self.state = State.from_env()
        self.page = Page()
        rank, size, prefix = self.state.rank, self.state.world_size, f"nvrx/{_job()}/{next(_calls)}"
        self._past = _past.get((rank, size), _Past())
        self.me = Identity(rank, size, prefix, self.environment, self._past.gone)
        self.thread = MonitorThread(self.page)
        self.monitor = MonitorProcess(arguments, self.me, self.page)
        interval_s = arguments.seconds("progress_watchdog_interval")
        keeper = MonitorKeeper(self.monitor, self.page, arguments.seconds("heartbeat_timeout"), interval_s)
        looks = (keeper.look, self._look_at_store, self._look_at_terminate)
        self._watchdog = ProgressWatchdog(self.page, interval_s, looks)
        self.call_or_none: StoreView | None = None
        self._reached: StoreView | None = None  # the last connection that was made
        self._waiting: StoreView | None = None
        self._watching: tuple[FrozenState, Stopper] | None = None
        self._serves = False
        self._finished = self._told_lost = self._terminates = False

    @property
    def call(self) -> StoreView:
        """The call's keys, for the main thread."""
        assert self.call_or_none is not None
        return self.call_or_none

    # --- begin --------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Start everything. Raises what keeps a part from starting."""
        self._expect_a_server()
        try:
            self.monitor.start()
        except OSError as error:
            raise InternalError(f"no monitor process can be started: {error}") from error
        timeout_s = self._arguments.seconds("barrier_timeout")
        if self.me.leads:
            self.monitor.await_ready(timeout_s)
        self.thread.start()
        self._watchdog.start()
        self.call_or_none = self._connection(self._arguments.first_store_s)
        self._waiting = self._connection(timeout_s)
        if not self.me.leads:
            self.monitor.await_ready(timeout_s)
        if self.call.add(f"entered/{self.me.rank}", 1) > 1:
            raise UsageError(f"two processes of this job have RANK={self.me.rank}, or the store is not new")

    def _expect_a_server(self) -> None:
        """Rank 0 is the one that can serve the store at MASTER_ADDR: who waits for it may do so for long."""
        factory, given = self._arguments.store_factory, self._arguments.store_kwargs or {}
        if 0 not in self.me.gone or not (isinstance(factory, type) and issubclass(factory, store.TCPStore)):
            return
        host, port = given.get("host_name") or os.environ["MASTER_ADDR"], given.get("port") or os.environ["MASTER_PORT"]
        ends = self._past.served and not given.keys() & {"host_name", "port"}
        if ends or store.refused(host, int(port)):
            raise StoreLost(
                f"no store for another call: rank 0, which would serve it at {host}:{port}, has left an earlier call;"
                " start all ranks again, or use a store that needs no rank (FileStore, a server outside of the ranks)"
            )

    def _connection(self, timeout_s: float) -> StoreView:
        """Made in the monitor thread: the main thread must not wait for a server that may be silent."""
        try:
            made: StoreView = self.thread.call(self._connect, timeout_s)
        except TimeoutError:
            factory = self._arguments.store_factory
            raise StoreLost(f"no store: {factory!r} (store_factory) has not made one for {timeout_s:g} s") from None
        return made

    def _connect(self) -> StoreView:
        """A connection to this call's server, not to the one of an earlier call that is about to end."""
        waited, timeout_s = OwnTime(1.0), self._arguments.seconds("barrier_timeout")
        while True:
            made = self._reached = StoreView(self._arguments.make_store())
            if not made.check([CLOSED]) or waited.seconds() > timeout_s:
                return made.under(self.me.prefix)
            time.sleep(0.005)

    def before_call(self) -> None:
        """What is open now belongs to the wrapper, and torch.distributed is the same on all ranks."""
        keep_connections()
        forget_half_made_groups()

    # --- the monitor thread's job -------------------------------------------------------------------------------------

    def for_waiting(self, this: Round) -> Round:
        """The same round through the monitor thread's own connection: a wait keeps a connection busy."""
        assert self._waiting is not None
        return Round(self._waiting, this.number)

    def await_end(self, this: Round, state: FrozenState, stopper: Stopper) -> bool:
        """Until the iteration ends; whether it is complete. After a fault: `abort`, and the function is stopped."""
        self._watching = (state, stopper)
        lost: StoreLost | RankDiscarded | None = None
        try:
            if self.for_waiting(this).await_end():
                return True
        except (StoreLost, RankDiscarded) as error:
            lost = error
        self.page.words[STOPPING] = time.monotonic_ns()
        wait_s = self._arguments.seconds("last_call_wait")
        if lost is None and wait_s:  # a sleep of 0 s would hand the GIL to a function that computes
            time.sleep(wait_s)
        self._stop(state, stopper)
        if lost is not None:
            raise lost
        return False

    def _stop(self, state: FrozenState, stopper: Stopper) -> None:
        stopper.begin()
        was_initialized = dist.is_initialized()
        breaks = self._arguments.abort is not None and was_initialized  # a collective, so the function may end
        self._abort(state)
        stopper.stop(self._arguments.seconds("soft_timeout"), _UNWIND_S if breaks else 0.0, cut_again)
        if dist.is_initialized() and not was_initialized:  # `init_process_group` came through between the two
            self._abort(state)

    def _abort(self, state: FrozenState) -> None:
        if self._arguments.abort is None:
            return
        try:
            self._arguments.abort(state)
        except Exception:
            if self.page.is_of_another:
                raise
            logger.exception("abort failed")
        self.page.still_the_rank()

    # --- the watchdog's looks -----------------------------------------------------------------------------------------

    def _look_at_store(self) -> None:
        """If the store does not answer any more, or the others have gone on without this rank, whoever waits for it may
        do so for ever: end the connections."""
        words = self.page.words
        if not (words[LOST] or words[GONE]) or words[LEFT] or self._told_lost or self._reached is None:
            return
        self._told_lost = True
        if words[LOST]:
            logger.error("the store at %s is lost", self._reached.place)
        else:
            logger.warning("the others have declared rank %d gone", self.me.rank)
        if not self._reached.hang_up():
            threading.Thread(
                target=self._answer_instead, args=(self._reached.place,), name="nvrx-lost", daemon=True
            ).start()

    def _look_at_terminate(self) -> None:
        """The monitor process has told the others that this rank has left, and looks no more."""
        idle_s = self.page.idle_s()
        if self._terminates and idle_s >= self._arguments.seconds("hard_timeout"):
            logger.error("rank %d: terminate has made no progress for %.1f s: it is killed", self.me.rank, idle_s)
            os.kill(os.getpid(), signal.SIGKILL)

    def _answer_instead(self, place: str) -> None:
        """A store without connections that we know of: the monitor thread stays where it is."""
        if self._watching is not None:
            state, stopper = self._watching
            end_child_after(lambda: self._stop(state, stopper), self.page)
        self.thread.answer_instead(StoreLost(f"the store ({place}) does not answer any more; start all ranks again"))

    # --- end ----------------------------------------------------------------------------------------------------------

    def left(self, why: str = "") -> None:
        """This rank need not be watched any more."""
        self.page.words[LEFT] = 1
        if self.page.words[COUNTED]:
            self.monitor.say_that_we_leave(why)

    def terminates(self) -> None:
        """`terminate` is about to be called: the last thing that the wrapper does in this rank."""
        self.page.beat()
        self._terminates = True

    def all_have_finished(self, gone: frozenset[int]) -> None:
        """Everybody who is not `gone` returns now, and may call a wrapped function again, without them."""
        self._serves = self.call.get(SERVES) == b"1"
        _past[self.me.rank, self.me.world_size] = _Past(gone, self._serves)
        self._finished = True
        self.left()
        self.has_read_the_last_verdict(len(gone))

    def has_read_the_last_verdict(self, gone: int) -> None:
        """The store's server may end when all who are not `gone` have."""
        if self.call.add("left", 1) >= self.me.world_size - gone:
            self.call.set(ALL_LEFT, "1")

    def close(self) -> None:
        """End and reap everything, whatever has been started. In a child that the user has forked: nothing is its."""
        if self.page.is_of_another:
            return
        self.left()
        if self._watchdog.ident is not None:
            self._watchdog.stop()
        if self.monitor.pid:
            serves = self.me.leads or self.monitor.meeting is not None  # the others, perhaps
            serves = serves and self.call_or_none is not None and not self._finished
            if serves or self.page.words[COUNTED]:
                self.monitor.let_go()
            else:
                self.monitor.leave(15.0)
        if self.thread.ident is not None:
            self.thread.stop()
        if self._serves and self._reached is not None and not self.me.leads:
            self._reached.await_hang_up(_GONE_S)  # nobody shall connect to a server that is about to end
        self.call_or_none = self._reached = self._waiting = None
        self.environment.restore()


def _job() -> str:
    """Tells this start of the ranks from earlier ones in a store that lives longer (torchrun's)."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "NVRX_TERM", "NVRX_CYCLE")
    said = "/".join(os.environ.get(name, "") for name in names)
    return hashlib.sha256(said.encode()).hexdigest()[:8]


@contextlib.contextmanager
def frozen_heap() -> Iterator[None]:
    """Objects that exist already (torch has a million) are left out of garbage collection at every restart."""
    ours = gc.get_freeze_count() == 0
    if ours:
        gc.freeze()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()
