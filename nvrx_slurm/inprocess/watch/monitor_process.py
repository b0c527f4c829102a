"""The process beside each rank that sees what the rank itself cannot: that it is dead, stopped, or hangs.

It is forked, not started anew: talking to the store needs torch, whose import costs a second and 200 MB; a fork
shares all of that. What makes the fork safe: the child touches no CUDA, uses no thread or lock of the parent, closes
all file descriptors and device mappings it was born with, and never returns into the parent's code. It ignores SIGTERM,
SIGINT and SIGHUP, since it has to outlive its rank long enough to tell the others; what ends it is the end of its rank,
or of everybody.

That of rank 0 also runs the store's server (unless that is elsewhere), and the coordinator of all barriers, until
everybody has left. So the loss of rank 0 is like the loss of any rank.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import re
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord, describe
from nvrx_slurm.inprocess.environment import Environment
from nvrx_slurm.inprocess.exception import InternalError
from nvrx_slurm.inprocess.meeting.barriers import ENTRY
from nvrx_slurm.inprocess.meeting.coordinator import Coordinator, overdue_slack_s
from nvrx_slurm.inprocess.meeting.stand_in import Meeting, StandIn
from nvrx_slurm.inprocess.meeting.store import StoreLost, StoreView
from nvrx_slurm.inprocess.watch import detach
from nvrx_slurm.inprocess.watch.board import Board
from nvrx_slurm.inprocess.watch.monitor_link import Link, Times
from nvrx_slurm.inprocess.watch.progress import (
    COUNTED,
    GONE,
    LEFT,
    LOST,
    ROUND,
    SEEN,
    STOPPING,
    SUSPENDED,
    WATCHED,
    OwnTime,
    Page,
    StandsStill,
    seconds_since,
)

logger = logging.getLogger(__name__)

# 3.12 warns of any fork with threads; see above why this one is safe. Once and for all, since `catch_warnings` around
# the fork would undo, in the watchdog thread, what other threads do to the filters meanwhile.
warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning, rf"{re.escape(__name__)}$")

_LEAVE, _MEET = b"L", b"M"
_READY, _SERVING = b"+", b"+s"  # it works; it works, and the store's server is in it
_MAX_MESSAGE = 4096
_MAX_TEXT = 1024  # of a message
_LOOK_S = 5.0  # longest between two looks
_OUTLAST_S = 1.0  # between two looks at the store when the rank has left
_AWAY_S = 1.0  # a look that is later than this was not slow: this process did not run
_KILL_WAIT_S = 10.0  # after SIGKILL: a process that cannot be interrupted by anything is told as dead


@dataclass(frozen=True)
class Identity:
    """Which rank, in which call of a wrapped function."""

    rank: int  # initial
    world_size: int  # initial
    prefix: str  # of the call's keys, without the slash
    environment: Environment  # as it was when the function was called: what makes the store reads it
    gone: frozenset[int] = frozenset()  # who has left an earlier call of this process: nobody waits for them

    @property
    def leads(self) -> bool:
        """Whether this is the first rank that is left: its monitor process coordinates, and serves if it can."""
        return not any(rank not in self.gone for rank in range(self.rank))


class MonitorProcess:
    """The rank's handle on its monitor process; `start` forks, `leave` ends and reaps it."""

    def __init__(self, arguments: Arguments, identity: Identity, page: Page) -> None:
        self._arguments, self._identity, self._page = arguments, identity, page
        self.pid = 0
        self.serves = False  # whether the store's server is in it
        self._pidfd = -1
        self._channel: socket.socket | None = None
        self.meeting: Meeting | None = None  # the last one at this rank

    def start(self, again: bool = False) -> None:
        """Fork; `again` in place of an earlier one. Raises OSError if no process can be made."""
        detach.hold_standard_streams()
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            with theirs:
                self.pid = self._fork(theirs, again)
            self._pidfd = self._pidfd_of_child()
            undo.pop_all()
        self._channel = ours
        if self.meeting is not None:
            self.meet(self.meeting)

    def _fork(self, channel: socket.socket, again: bool) -> int:
        rank_pidfd, loggers = os.pidfd_open(os.getpid()), detach.loggers()
        try:
            pid = os.fork()
            if pid == 0:
                _child(Monitor(self._arguments, self._identity, self._page, rank_pidfd, channel, loggers, again))
            return pid
        finally:
            os.close(rank_pidfd)

    def _pidfd_of_child(self) -> int:
        try:
            return os.pidfd_open(self.pid)
        except OSError:  # too many open files: nobody could look after it
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise

    def await_ready(self, timeout_s: float) -> None:
        """Until it runs (for rank 0: the store's server too). Raises InternalError with its reason."""
        assert self._channel is not None
        self._channel.settimeout(timeout_s)
        try:
            answer = self._channel.recv(_MAX_MESSAGE)
        except TimeoutError:
            answer = f"nothing happened for {timeout_s:g} s; see whether store_factory hangs, or a log's disk".encode()
        if answer not in (_READY, _SERVING):
            raise InternalError(
                f"the monitor process cannot do its work: {answer.decode(errors='replace') or 'it has ended'}"
            )
        self.serves = answer == _SERVING

    @property
    def alive(self) -> bool:
        """Whether there is one, and it has not ended."""
        return self._pidfd >= 0 and not select.select([self._pidfd], [], [], 0)[0]

    def kill(self) -> None:
        """At once, even if it is stopped."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def leave(self, timeout_s: float) -> None:
        """Tell it that the rank has left, and reap it; after `timeout_s` seconds it is killed."""
        if self._pidfd < 0:
            return
        self.say_that_we_leave()
        if not select.select([self._pidfd], [], [], timeout_s)[0]:
            logger.warning("the monitor process did not end within %g s and is killed", timeout_s)
            self.kill()
        self._close()

    def let_go(self) -> None:
        """The rank leaves, but the process has to stay for the others. It will end by itself, and then is reaped."""
        if self._pidfd < 0:
            return
        self.say_that_we_leave()
        threading.Thread(target=self._close, name="nvrx-reaper", daemon=True).start()

    def say_that_we_leave(self, why: str = "") -> None:
        """It says so to the others, if nobody may have yet (see COUNTED). Only the first time counts."""
        if self._channel is None:
            return
        with contextlib.suppress(OSError):
            self._channel.settimeout(1.0)
            self._channel.send(_LEAVE + why.encode()[:_MAX_TEXT], socket.MSG_NOSIGNAL)

    def meet(self, meeting: Meeting) -> None:
        """The process group of an iteration meets at this rank: see `stand_in`."""
        self.meeting = meeting
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.settimeout(1.0)
                self._channel.send(_MEET + str(meeting).encode(), socket.MSG_NOSIGNAL)

    def restart(self) -> None:
        """A new one in place of one that has died. Raises OSError as `start` does; it may be called again then."""
        self._close()
        self.start(again=True)

    def _close(self) -> None:
        """Reap it: wait until it has ended."""
        if self._pidfd < 0:
            return
        with contextlib.suppress(ChildProcessError):  # the user's code may have reaped it
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._channel is not None:
            self._channel.close()


def _child(monitor: Monitor) -> NoReturn:
    """Never returns into the code of the parent, whatever happens."""
    code = 1
    try:
        monitor.run()
        code = 0
    except BaseException:
        logger.exception("the monitor process failed")
    finally:
        os._exit(code)


class Monitor:
    """What runs in the monitor process."""

    def __init__(
        self,
        arguments: Arguments,
        identity: Identity,
        page: Page,
        rank_pidfd: int,
        channel: socket.socket,
        loggers: list[logging.Logger],
        again: bool = False,
    ) -> None:
        self._arguments, self._me, self._page = arguments, identity, page
        self._pidfd, self._channel = rank_pidfd, channel
        self._loggers = loggers  # that have handlers
        self._again = again  # in place of one that has died
        self._serves = False  # whether the store's server is here
        self._told_round = -2  # the last round that a soft timeout was told for
        self._looked_ns = time.monotonic_ns()  # when it last judged
        self._back_ns = 0  # since when it has been there to look
        self._left = False

    def run(self) -> None:
        """Until there is nothing left to do."""
        pidfile = self._arguments.file_of("monitor_process_pidfile", self._me.rank)
        try:
            self._prepare(pidfile)
            self._serve()
        finally:
            if pidfile:
                with contextlib.suppress(OSError):
                    os.unlink(pidfile)

    def _prepare(self, pidfile: str | None) -> None:
        """Tells the rank when it is done, or why it cannot be."""
        detach.detach({self._pidfd, self._channel.fileno()})
        self._me.environment.restore_variables()
        try:
            detach.log_to(self._arguments.file_of("monitor_process_logfile", self._me.rank), self._loggers)
            if pidfile:
                with open(pidfile, "w") as file:
                    file.write(f"{os.getpid()}\n")
            self._make = self._connect()
        except BaseException as error:
            self._answer(describe(error).encode()[:_MAX_MESSAGE])
            raise
        self._page.words[SEEN] = time.monotonic_ns()
        self._answer(_SERVING if self._serves else _READY)

    def _answer(self, message: bytes) -> None:
        """To the rank, which may have died or left already: then there is all the more to tell the others."""
        with contextlib.suppress(OSError):
            self._channel.send(message, socket.MSG_NOSIGNAL)

    def _serve(self) -> None:
        arguments = self._arguments
        times = Times(arguments.seconds("heartbeat_interval"), arguments.seconds("heartbeat_timeout"))
        self._link = Link(self._make, self._me.rank, self._me.world_size, times, self._lost, self._gone)
        self._link_stands_still = StandsStill(self._longest_s)
        coordinator = None
        if self._me.leads:
            coordinator = Coordinator(self._make_view, self._me.world_size, self._me.gone, arguments)
            self._link.stays = True
            coordinator.start()
        self._link.start()
        longest_s = arguments.seconds("barrier_timeout") + overdue_slack_s(arguments)
        self._stand_in = StandIn(self._make_view, arguments.seconds("last_call_wait"), longest_s)
        gc.freeze()
        self._watch()
        if coordinator is not None:
            self._outlast(coordinator.over, math.inf)  # until everybody has left
        elif not self._left:
            self._outlast(self._link.over, arguments.seconds("barrier_timeout"))
        else:
            self._outlast(self._stand_in.idle, longest_s)
        logger.info("the monitor process of rank %d ends", self._me.rank)

    def _outlast(self, over: threading.Event, timeout_s: float) -> None:
        """Stay for the others, or until nobody can be reached."""
        look_s = min(_OUTLAST_S, self._longest_s)
        waited = OwnTime(look_s)
        while not over.wait(look_s):
            if self._is_lost() or waited.seconds() >= timeout_s:
                return

    @property
    def _has_entered(self) -> bool:
        """Whether all ranks were there once; before that the server may not have been started yet."""
        return bool(self._page.words[ROUND] > ENTRY)

    def _make_view(self) -> StoreView:
        view = StoreView(self._arguments.make_store()).under(self._me.prefix)
        if self._again and self._has_entered and not view.check(["serves"]):
            raise StoreLost("the store has lost what was in it: it is another one than before")
        return view

    def _connect(self) -> Callable[[], StoreView]:
        """The first rank: make the store at once, since it may be the server; the others have time."""
        if not self._me.leads or self._again:
            return self._make_view
        view = self._make_view()
        self._serves = bool(getattr(view.store, "serves", False))
        view.set("serves", "1" if self._serves else "0")
        return lambda: view

    def _is_lost(self) -> bool:
        """Whether the store is; also one that just does not answer, on which the link waits without a bound."""
        link = self._link
        if (link.passes or self._has_entered) and not link.lost:
            silent_s = self._link_stands_still.seconds(link.passes)
            if silent_s >= self._arguments.seconds("heartbeat_timeout"):
                link.give_up(f"it has not answered for {silent_s:.1f} s")
        return link.lost

    def _lost(self) -> None:
        self._page.words[LOST] = 1

    def _gone(self) -> None:
        self._page.words[GONE] = 1

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the rank has left or is dead and the others have been told."""
        board = Board.from_env()
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        poll.register(self._channel.fileno(), select.POLLIN)
        if board is not None and board.fd is not None:
            poll.register(board.fd, select.POLLIN)
        while True:
            patience_s = self._patience_s(board)
            ready = {fd for fd, _ in poll.poll(1000 * patience_s)}
            if self._channel.fileno() in ready:  # first: what the rank has said before it died
                if not self._hear(poll):
                    return
            elif self._pidfd in ready:
                self._rank_died()
                return
            if board is not None:
                self._look_at(board, ready)
            self._page.words[SEEN] = time.monotonic_ns()
            self._is_lost()
            self._notice_absence(patience_s)
            if self._judge():
                return

    def _hear(self, poll: Any) -> bool:
        """Whether to go on after what the rank says."""
        try:
            word = self._channel.recv(_MAX_MESSAGE)
        except ConnectionError:  # it died with our word that we are ready unread
            word = b""
        if word.startswith(_MEET):
            self._stand_in.expect(Meeting.parse(word[len(_MEET) :].decode()))
            return True
        if word.startswith(_LEAVE):
            self._rank_died(f"it leaves: {word[len(_LEAVE) :].decode(errors='replace')}")
            return False
        poll.unregister(self._channel.fileno())  # its end: the rank is dying, and pidfd says when it is dead
        return True

    def _look_at(self, board: Board, ready: set[int]) -> None:
        if board.fd is not None and board.fd in ready:
            board.changed()
        records = board.read()
        if records:
            logger.info("told from outside: %s", "; ".join(record.sentence() for record in records))
            self._link.declare(records)

    @property
    def _longest_s(self) -> float:
        """Between two looks, though nothing happens: a few within the heartbeat's timeout, after which the rank misses
        a sign of life, and one before the soft timeout, which may begin to count just after a look. What happens wakes
        us, and known limits are looked at when they are reached."""
        seconds = self._arguments.seconds
        return min(_LOOK_S, seconds("heartbeat_timeout") / 5, seconds("soft_timeout") / 2)

    def _notice_absence(self, patience_s: float) -> None:
        """Who has not looked (this process was stopped, or its machine was) blames nobody: all limits begin anew."""
        away_s = seconds_since(self._looked_ns)
        self._looked_ns = time.monotonic_ns()
        if away_s > patience_s + _AWAY_S:
            logger.info("this process was away for %.1f s: all limits begin anew", away_s)
            self._back_ns = self._looked_ns

    def _here_s(self) -> float:
        return seconds_since(self._back_ns)

    def _idle_s(self) -> float:
        """Without progress while this process was there to see it."""
        return min(self._page.idle_s(), self._here_s())

    def _patience_s(self, board: Board | None) -> float:
        """Exactly until the next limit can be reached, at most an interval."""
        arguments, words = self._arguments, self._page.words
        interval_s = arguments.seconds("monitor_process_interval")
        longest_s = interval_s if board is not None and board.fd is None else self._longest_s
        idle_s = self._idle_s()
        limit_s = arguments.seconds("hard_timeout")
        if words[WATCHED] and not words[STOPPING] and self._told_round != words[ROUND]:
            limit_s = arguments.seconds("soft_timeout")
        left_s = math.inf if words[SUSPENDED] else limit_s - idle_s  # a limit that does not count must not wake us
        if words[STOPPING]:
            left_s = min(left_s, self._overdue_s - self._stopping_s())
        return max(0.002, min(longest_s, left_s + 0.001))

    def _stopping_s(self) -> float:
        """On the way to the next iteration, while this process was there to see it."""
        began_ns = self._page.words[STOPPING]
        return min(seconds_since(began_ns), self._here_s()) if began_ns else 0.0

    @property
    def _overdue_s(self) -> float:
        """How long the way to the next iteration may take."""
        return self._arguments.seconds("barrier_timeout") + self._arguments.seconds("last_call_wait")

    def _judge(self) -> bool:
        """Soft and hard timeout; whether the rank had to be killed."""
        words, arguments = self._page.words, self._arguments
        if words[LEFT]:
            return False
        quiet = bool(words[SUSPENDED])  # no word about progress, but a restart waits for nobody
        idle_s, number = self._idle_s(), words[ROUND]
        stopping_s = self._stopping_s()
        if not quiet and idle_s >= arguments.seconds("hard_timeout"):
            self._kill(number, f"no progress for {idle_s:.1f} s")
            return True
        if stopping_s >= self._overdue_s:
            self._kill(number, f"not ready for the next iteration after {stopping_s:.1f} s")
            return True
        due = words[WATCHED] and not words[STOPPING] and self._told_round != number  # who is stopped has been told
        if due and not quiet and idle_s >= arguments.seconds("soft_timeout"):
            self._told_round = number
            self._tell(number, Interruption.SOFT_TIMEOUT, f"no progress for {idle_s:.1f} s")
        return False

    def _tell(self, number: int, kind: Interruption, text: str) -> None:
        logger.warning("iteration %d: %s: %s", number, kind.name, text)
        self._link.interrupt(number, InterruptionRecord(self._me.rank, kind, text))

    def _kill(self, number: int, why: str) -> None:
        """SIGCONT, SIGTERM, grace, SIGCONT, SIGTERM, SIGKILL; then its word is said for it."""
        self._tell(number, Interruption.HARD_TIMEOUT, why)
        self._send(signal.SIGCONT, signal.SIGTERM)
        if not self._dead_within(self._arguments.seconds("termination_grace_time")):
            self._send(signal.SIGCONT, signal.SIGTERM, signal.SIGKILL)
            if not self._dead_within(_KILL_WAIT_S):
                logger.error("rank %d cannot be killed (it is stuck in the kernel)", self._me.rank)
        self._rank_died(f"killed: {why}")

    def _send(self, *signals: int) -> None:
        for signum in signals:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    def _dead_within(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while not select.select([self._pidfd], [], [], max(0.0, min(1.0, deadline_s - time.monotonic())))[0]:
            if time.monotonic() >= deadline_s:
                return False
            self._page.words[SEEN] = time.monotonic_ns()  # this may take long
        return True

    def _rank_died(self, why: str = "its process has ended") -> None:
        if self._page.words[LEFT] and not self._page.words[COUNTED]:
            self._left = True
            return
        logger.warning("rank %d: %s", self._me.rank, why)
        self._link.declare([InterruptionRecord(self._me.rank, Interruption.TERMINATED, why)])
