"""The monitor process of a rank: the rank's handle on it, and its program.

It sees that its rank is dead, stopped or hung. The monitor process of rank 0 also runs the store's server (unless that
is elsewhere) and the server of all barriers, until all ranks have left. So the loss of rank 0's process is like the
loss of any other.

The process is forked, not started anew: talking to the store needs torch, whose import costs a second and 200 MB, and a
fork shares all of that. The fork is safe: the child touches no CUDA, uses no thread or lock of the parent, closes all
file descriptors and device mappings that it inherited, and never returns into the parent's code. It ignores SIGTERM,
SIGINT and SIGHUP, since it has to outlive its rank long enough to tell the others. It ends when its rank has ended and
the others know, or when all ranks have.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import json
import logging
import math
import os
import re
import resource
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord, describe
from nvrx_slurm.inprocess.environment import CallFacts
from nvrx_slurm.inprocess.exception import InternalError
from nvrx_slurm.inprocess.guard.call_page import COUNTED, ITERATION, LEFT, SEEN, Stall
from nvrx_slurm.inprocess.guard.hang_watch import HangWatch
from nvrx_slurm.inprocess.guard.launcher import LauncherFile
from nvrx_slurm.inprocess.guard.store_link import StoreLink
from nvrx_slurm.inprocess.log import LOGGER_NAME
from nvrx_slurm.inprocess.store.barriers import ENTRY, serve_barriers
from nvrx_slurm.inprocess.store.stores import StoreView
from nvrx_slurm.monitor import kill

logger = logging.getLogger(__name__)

# Python 3.12 warns of any fork with threads.
warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning, rf"{re.escape(__name__)}$")

_LEAVE, _MEET = b"L", b"M"  # first byte of a message from the rank
_READY = b"+"  # the answer when it works
_MAX_MESSAGE = 4096  # bytes
_MAX_TEXT = 1024  # bytes of the text of a message
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
_PR_SET_NAME = 15
_EVENTS = ("anon_inode:[eventfd]", "anon_inode:[eventpoll]")
_FORMAT = "%(asctime)s [%(levelname)s] %(filename)s:%(lineno)d %(message)s"
_OUTLAST_S = 1.0  # between two checks of the store when the rank has left


# --- in the rank ------------------------------------------------------------------------------------------------------


class MonitorProcess:
    """`start` forks, `leave` ends and reaps it."""

    def __init__(self, me: CallFacts) -> None:
        self._me = me
        self.pid = 0
        self._pidfd = -1
        self._channel: socket.socket | None = None
        self.serves_groups = False  # whether a process group has met at this rank

    def start(self) -> None:
        """Fork. Raises OSError if no process can be made."""
        self._channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self.pid = self._fork(theirs)
        self._pidfd = os.pidfd_open(self.pid)

    def _fork(self, channel: socket.socket) -> int:
        rank_pidfd = os.pidfd_open(os.getpid())
        try:
            pid = os.fork()
            if pid == 0:
                _MonitorProgram(self._me, rank_pidfd, channel).main()
            return pid
        finally:
            os.close(rank_pidfd)

    def await_ready(self, timeout_s: float) -> None:
        """Wait until it works (on rank 0: the store's server too). Raises InternalError with its reason if it
        cannot."""
        assert self._channel is not None
        self._channel.settimeout(timeout_s)
        try:
            answer = self._channel.recv(_MAX_MESSAGE)
        except TimeoutError:
            answer = f"nothing happened for {timeout_s:g} s; see whether store_factory hangs, or a log's disk".encode()
        if answer != _READY:
            raise InternalError(
                f"the monitor process cannot do its work: {answer.decode(errors='replace') or 'it has ended'}"
            )

    @property
    def alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._pidfd >= 0 and not kill.is_dead(self._pidfd)

    def kill(self) -> None:
        """Kill it at once, even if it is stopped."""
        kill.send(self._pidfd, signal.SIGKILL)

    def leave(self, timeout_s: float | None) -> None:
        """Tell it that the rank has left, and reap it; after `timeout_s` seconds it is killed.

        None: it stays for the others, and ends by itself.
        """
        if self._pidfd < 0:
            return
        self.announce_leaving()
        if timeout_s is None:
            return
        if not select.select([self._pidfd], [], [], timeout_s)[0]:
            logger.warning("the monitor process did not end within %g s and is killed", timeout_s)
            self.kill()
        with contextlib.suppress(ChildProcessError):  # the user's code may have reaped it
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._channel is not None:
            self._channel.close()

    def announce_leaving(self, why: str = "") -> None:
        """Have it tell the others, if they still count on this rank (see COUNTED). Only the first call counts."""
        self._send(_LEAVE + why.encode()[:_MAX_TEXT])

    def meet(self, number: int, address: str, port: int) -> None:
        """The process group of iteration `number` meets at this rank: see `FallbackServer`."""
        self.serves_groups = True
        self._send(_MEET + json.dumps([number, address, port]).encode())

    def _send(self, message: bytes) -> None:
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.settimeout(1.0)
                self._channel.send(message, socket.MSG_NOSIGNAL)


# --- the program ------------------------------------------------------------------------------------------------------


class _MonitorProgram:
    """The program of the monitor process."""

    def __init__(self, me: CallFacts, rank_pidfd: int, channel: socket.socket) -> None:
        self._me = me
        self._arguments = me.arguments
        self._page = me.page
        self._pidfd = rank_pidfd
        self._channel = channel
        self._left = False

    def main(self) -> NoReturn:
        """Run until nothing is left to do; never returns into the code of the parent."""
        code = 1
        pidfile = self._path(self._arguments.monitor_process_pidfile)
        try:
            self._prepare(pidfile)
            self._serve()
            code = 0
        except BaseException:
            logger.exception("the monitor process failed")
        finally:
            if pidfile:
                with contextlib.suppress(OSError):
                    os.unlink(pidfile)
            os._exit(code)

    def _path(self, given: str | None) -> str | None:
        """The path of this rank's file."""
        return given and given.replace("{rank}", str(self._me.rank))

    def _prepare(self, pidfile: str | None) -> None:
        """Tells the rank when it is done, or why it cannot be."""
        detach({self._pidfd, self._channel.fileno()})
        self._me.environment.restore_variables()
        try:
            log_to(self._path(self._arguments.monitor_process_logfile))
            if pidfile:
                with open(pidfile, "w") as file:
                    file.write(f"{os.getpid()}\n")
            self._make = self._connect()
        except BaseException as error:
            self._answer(describe(error).encode()[:_MAX_MESSAGE])
            raise
        self._page.words[SEEN] = time.monotonic_ns()
        self._answer(_READY)

    def _answer(self, message: bytes) -> None:
        """Answer the rank, which may have died or left already."""
        with contextlib.suppress(OSError):
            self._channel.send(message, socket.MSG_NOSIGNAL)

    # --- the store ----------------------------------------------------------------------------------------------------

    def _make_view(self) -> StoreView:
        return self._arguments.connect(self._me.prefix)

    def _connect(self) -> Callable[[], StoreView]:
        """The first rank makes the store at once, since it may be the server; the others connect later."""
        if not self._me.leads:
            return self._make_view
        view = self._make_view()
        self._serves = bool(getattr(view.store, "serves", False))
        return lambda: view

    def _is_lost(self) -> bool:
        """Whether the store is lost. A store that does not answer is, since the link waits for it without a bound."""
        link = self._link
        # before, there may be no server yet
        entered = link.passes or self._page.words[ITERATION] > ENTRY
        if entered and not link.lost:
            silent_s = self._link_stall.seconds(link.passes)
            if silent_s >= self._arguments.heartbeat_timeout.total_seconds():
                link.give_up(f"it has not answered for {silent_s:.1f} s")
        return link.lost

    # --- threads, from beginning to end -------------------------------------------------------------------------------

    def _serve(self) -> None:
        me = self._me
        self._link = StoreLink(self._make, me)
        self._hangs = HangWatch(me, self._pidfd, self._link)
        self._link_stall = Stall(self._hangs.longest_s)
        if me.leads:
            barriers = threading.Thread(
                target=serve_barriers,
                args=(self._make_view, me, self._serves),
                name="nvrx-barriers",
                daemon=True,
            )
            barriers.start()
        self._link.start()
        gc.freeze()
        self._watch()
        if me.leads:
            self._outlast(barriers, math.inf)  # until all ranks have left
        elif self._link.serves_a_group or not self._left:
            self._outlast(self._link, me.arguments.overdue_s)
        logger.info("the monitor process of rank %d ends", me.rank)

    def _outlast(self, thread: threading.Thread, timeout_s: float) -> None:
        """Stay for the others, until no rank can be reached any more."""
        deadline_s = time.monotonic() + timeout_s
        while thread.is_alive():
            thread.join(min(_OUTLAST_S, self._hangs.longest_s))
            if self._is_lost() or time.monotonic() >= deadline_s:
                return

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Watch until the rank has left, or is dead and the link knows."""
        launcher = LauncherFile.from_env()
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(self._channel.fileno(), select.POLLIN)
        if launcher is not None and launcher.fd is not None:
            poll.register(launcher.fd, select.POLLIN)
        due_s = time.monotonic()
        while True:
            next_s, killed = self._hangs.check(due_s)
            if killed:
                self._declare_dead(f"killed: {killed}")
                return
            ready = {fd for fd, _ in poll.poll(max(0.0, 1000 * (next_s - time.monotonic())))}
            due_s = min(next_s, time.monotonic())
            if self._channel.fileno() in ready:  # first: what the rank sent before it died
                if not self._receive(poll):
                    return
            elif self._pidfd in ready:
                self._declare_dead("its process has ended")
                return
            if launcher is not None and (records := launcher.read()):
                logger.info(
                    "reported from outside: %s", "; ".join(record.sentence() for record in records)
                )
                self._link.declare(records)
            self._is_lost()

    def _receive(self, poll: Any) -> bool:
        """One message of the rank; whether to go on."""
        try:
            message = self._channel.recv(_MAX_MESSAGE)
        except ConnectionError:  # it died before it read our _READY
            message = b""
        if message.startswith(_MEET):
            self._link.expect(*json.loads(message[len(_MEET) :]))
            return True
        if message.startswith(_LEAVE):
            self._declare_dead(f"it leaves: {message[len(_LEAVE) :].decode(errors='replace')}")
            return False
        # closed: the rank is dying, and the pidfd tells when it is dead
        poll.unregister(self._channel.fileno())
        return True

    def _declare_dead(self, why: str) -> None:
        if self._page.words[LEFT] and not self._page.words[COUNTED]:
            self._left = True
            return
        logger.warning("rank %d: %s", self._me.rank, why)
        self._link.declare([InterruptionRecord(self._me.rank, Interruption.TERMINATED, why)])


# --- the fork: parent and child share only memory that neither writes to ----------------------------------------------


def detach(kept: Collection[int]) -> None:
    """Give a forked process its own session, signals and limits; disconnect all file descriptors but `kept`."""
    with contextlib.suppress(OSError):
        os.setsid()
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            signal.signal(signum, signal.SIG_IGN if signum in _IGNORED else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _disconnect_all_but(kept)
    _unmap_devices()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"nvrx-monitor", 0, 0, 0)
    # on rank 0 it holds the connections of all ranks
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()


def _disconnect_all_but(kept: Collection[int]) -> None:
    """The other numbers refer to /dev/null.

    Numbers that were free could be used for a connection to the store, and a log handler of the user would write to it.
    Event loops stay: gRPC starts its threads anew in a forked child, and they abort the process without their eventfd.
    """
    names = os.listdir("/proc/self/fd")
    with open(os.devnull, "r+b", buffering=0) as null:
        for fd in {0, 1, 2, *map(int, names)} - {*kept, null.fileno()}:
            # a standard stream that is closed, or the list's own number
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/self/fd/{fd}") in _EVENTS:
                    continue
            os.dup2(null.fileno(), fd)


def _unmap_devices() -> None:
    """A mapping of a GPU's device file keeps the GPU busy after its process is gone."""
    with open("/proc/self/maps", "rb") as maps:
        devices = [line.split()[0] for line in maps if b" /dev/nvidia" in line]  # read in one go
    libc = ctypes.CDLL(None)
    for span in devices:
        start, end = (int(part, 16) for part in span.split(b"-"))
        libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(end - start))


def log_to(path: str | None) -> None:
    """Have the wrapper's logger append to this file, and write nowhere else; None: it writes nowhere."""
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers = [logging.FileHandler(path) if path else logging.NullHandler()]
    logger.handlers[0].setFormatter(logging.Formatter(_FORMAT))
    logger.propagate = False
    if path and logger.getEffectiveLevel() > logging.INFO:  # setLevel goes through all loggers, too
        logger.setLevel(logging.INFO)
